"""Receipts: the record of each cache decision, in a bounded ring and as JSON lines on stdout.

A receipt never holds text, token ids, a tenant's name or a salt. Lines are handed to a thread in batches, so that a
reader of stdout that stalls can't stall requests; what it can't take is dropped and counted.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from kvsteward_contract.directive import Mode, Outcome
from kvsteward_contract.metrics import band

from .ticket import Ending, Ticket

BACKEND = "Builtin"
RING = 4096
FLUSH_SECONDS = 0.1
MAX_UNWRITTEN = 8_192  # lines; a reader that is this far behind loses some


class Receipt(msgspec.Struct, frozen=True, rename="camel"):
    """One request. Times are seconds; `tenant` is an opaque digest."""

    id: str
    time: float  # Unix time of arrival
    policy_version: str
    generation: str
    stage: str
    cohort: str  # Protected, Canary or Rest
    decision: str
    mode: str  # the engine's, after its epoch check; "" when it never said
    ending: str
    scope_kind: str
    tenant: str
    workload: str
    backend: str
    band: str = ""
    prompt_tokens: int = 0
    eligible_tokens: int = 0
    resident_tokens: int = 0
    reused_tokens: int = 0
    saved_tokens: int = 0
    misses: dict[str, int] = {}
    output_tokens: int = 0
    tokenize_seconds: float = 0.0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    time_to_first_token_seconds: float | None = None
    peak_pages: int = 0
    output_digest: str = ""
    finish: str = ""
    scope_violation: bool = False


_UNTOLD = Outcome(request="", mode=Mode.COLD, epoch=0)


def receipt_of(ticket: Ticket, outcome: Outcome | None, ttft: float | None, ending: Ending) -> Receipt:
    """The receipt of a request; without an outcome all that the engine alone knows is missing from it."""
    arrival = ticket.arrival
    permission = arrival.permission
    if permission.protects(arrival.bucket):
        cohort = "Protected"
    else:
        cohort = "Canary" if permission.in_cohort(arrival.bucket, arrival.workload) else "Rest"
    told = outcome if outcome is not None else _UNTOLD
    return Receipt(
        id=ticket.request,
        time=ticket.time,
        policy_version=permission.version,
        generation=permission.generation,
        stage=permission.stage.value,
        cohort=cohort,
        decision=ticket.decision.reason.value,
        mode=outcome.mode.value if outcome is not None else "",
        ending=ending.value,
        scope_kind=arrival.scope_kind,
        tenant=arrival.grant.digest if arrival.grant else "",
        workload=arrival.workload,
        backend=BACKEND,
        band=band(outcome.prompt_tokens) if outcome is not None else "",
        prompt_tokens=told.prompt_tokens,
        eligible_tokens=told.eligible_tokens,
        resident_tokens=told.resident_tokens,
        reused_tokens=told.reused_tokens,
        saved_tokens=told.reused_tokens,
        misses=told.misses,
        output_tokens=told.output_tokens,
        tokenize_seconds=told.tokenize_seconds,
        queue_seconds=told.queue_seconds,
        prefill_seconds=told.prefill_seconds,
        decode_seconds=told.decode_seconds,
        time_to_first_token_seconds=ttft,
        peak_pages=told.peak_pages,
        output_digest=told.output_digest,
        finish=told.finish,
        scope_violation=told.scope_violation,
    )


def write_stdout(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


class Receipts:
    """The ring and the way out. `write` gets whole lines, in a thread of its own."""

    def __init__(self, write: Callable[[bytes], Any] = write_stdout, ring: int = RING) -> None:
        self.unwritten_dropped = 0
        self._ring: deque[Receipt] = deque(maxlen=ring)
        self._lines: list[Receipt] = []
        self._write = write
        self._encoder = msgspec.json.Encoder()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="receipts")
        self._scheduled = False

    def add(self, receipt: Receipt) -> None:
        self._ring.append(receipt)
        if len(self._lines) >= MAX_UNWRITTEN:
            self.unwritten_dropped += 1
            return
        self._lines.append(receipt)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._hand_over)

    def newest(self, limit: int) -> list[Receipt]:
        """Newest first."""
        found: list[Receipt] = []
        for receipt in reversed(self._ring):
            if len(found) == limit:
                break
            found.append(receipt)
        return found

    def find(self, identity: str) -> Receipt | None:
        return next((receipt for receipt in reversed(self._ring) if receipt.id == identity), None)

    def close(self) -> None:
        """Writes what is left; call it once, at the end."""
        self._emit(self._lines)
        self._lines = []
        self._thread.shutdown(wait=True)

    def _hand_over(self) -> None:
        lines, self._lines = self._lines, []
        loop = asyncio.get_running_loop()
        written = loop.run_in_executor(self._thread, self._emit, lines)
        written.add_done_callback(lambda _: self._written())

    def _written(self) -> None:
        """One batch at a time: the next is handed over when this one is out."""
        self._scheduled = bool(self._lines)
        if self._scheduled:
            asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._hand_over)

    def _emit(self, receipts: list[Receipt]) -> None:
        if receipts:
            try:
                self._write(b"".join(self._encoder.encode(receipt) + b"\n" for receipt in receipts))
            except OSError:
                self.unwritten_dropped += len(receipts)

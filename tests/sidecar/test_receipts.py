"""Receipts: bounded, on stdout as lines, without anybody's name."""

from __future__ import annotations

import asyncio
import json
import threading

from kvsteward_contract.decision import Facts, decide
from kvsteward_contract.directive import Mode, Outcome
from kvsteward_contract.policy import Stage
from kvsteward_sidecar.permission import Permission
from kvsteward_sidecar.receipts import Receipts, receipt_of
from kvsteward_sidecar.ticket import Arrival, Ending, Grant, Ticket
from support.control_plane import until

GRANT = Grant("d" * 32, "5a17" * 16, "Private/" + "d" * 32, "private")


def ticket(number: int = 1, bucket: int = 5000) -> Ticket:
    permission = Permission(known=True, version="sha256:1", stage=Stage.FULL, protected_percent=5, epoch=3)
    decision = decide(Facts(stage=Stage.FULL))
    return Ticket(f"{number:032x}", decision, Arrival(permission, GRANT, "checkout", bucket), b"{}", 12.5)


def outcome(number: int = 1) -> Outcome:
    return Outcome(
        request=f"{number:032x}",
        mode=Mode.REUSE,
        epoch=3,
        prompt_tokens=1024,
        eligible_tokens=960,
        resident_tokens=928,
        reused_tokens=896,
        misses={"Evicted": 2},
        output_digest="0d",
        finish="stop",
    )


def test_a_receipt_says_what_was_decided_and_what_came_of_it() -> None:
    receipt = receipt_of(ticket(), outcome(), 0.25, Ending.COMPLETED)
    assert (receipt.decision, receipt.mode, receipt.stage, receipt.cohort) == ("Reuse", "Reuse", "Full", "Rest")
    assert (receipt.eligible_tokens, receipt.resident_tokens, receipt.reused_tokens) == (960, 928, 896)
    assert (receipt.band, receipt.saved_tokens, receipt.misses) == ("1024-4095", 896, {"Evicted": 2})
    assert (receipt.time, receipt.time_to_first_token_seconds, receipt.tenant) == (12.5, 0.25, "d" * 32)


def test_a_receipt_holds_no_salt() -> None:
    assert GRANT.namespace not in repr(receipt_of(ticket(), outcome(), 0.25, Ending.COMPLETED))


def test_a_protected_session_is_named_as_such() -> None:
    assert receipt_of(ticket(bucket=9999), None, None, Ending.FAILED).cohort == "Protected"


def test_without_an_outcome_only_what_the_sidecar_knows_is_told() -> None:
    receipt = receipt_of(ticket(), None, None, Ending.CANCELLED)
    assert (receipt.ending, receipt.mode, receipt.band, receipt.prompt_tokens) == ("cancelled", "", "", 0)


async def test_receipts_leave_as_json_lines() -> None:
    written: list[bytes] = []
    receipts = Receipts(written.append)
    for number in (1, 2):
        receipts.add(receipt_of(ticket(number), outcome(number), 0.1, Ending.COMPLETED))
    await until(lambda: written)
    lines = [json.loads(line) for line in b"".join(written).splitlines()]
    assert [line["id"] for line in lines] == [f"{1:032x}", f"{2:032x}"]
    assert lines[0]["timeToFirstTokenSeconds"] == 0.1
    receipts.close()


async def test_closing_writes_what_is_left() -> None:
    written: list[bytes] = []
    receipts = Receipts(written.append)
    receipts.add(receipt_of(ticket(), None, None, Ending.FAILED))
    receipts.close()
    assert b"".join(written).count(b"\n") == 1


async def test_the_ring_keeps_the_newest() -> None:
    receipts = Receipts(lambda _: None, ring=3)
    for number in range(5):
        receipts.add(receipt_of(ticket(number), None, None, Ending.COMPLETED))
    assert [receipt.id for receipt in receipts.newest(2)] == [f"{4:032x}", f"{3:032x}"]
    assert receipts.find(f"{2:032x}") is not None
    assert receipts.find(f"{1:032x}") is None
    receipts.close()


async def test_a_reader_that_stalls_does_not_stall_requests() -> None:
    gate = threading.Event()
    written: list[bytes] = []

    def stalled(data: bytes) -> None:
        gate.wait(5)
        written.append(data)

    receipts = Receipts(stalled)
    receipts.add(receipt_of(ticket(1), None, None, Ending.COMPLETED))
    await asyncio.sleep(0.15)  # the first batch is in the writer's hands
    began = asyncio.get_running_loop().time()
    for number in range(2, 50):
        receipts.add(receipt_of(ticket(number), None, None, Ending.COMPLETED))
    assert asyncio.get_running_loop().time() - began < 0.1
    assert not written
    gate.set()
    await until(lambda: b"".join(written).count(b"\n") == 49)
    receipts.close()


async def test_a_closed_stdout_is_counted() -> None:
    def broken(_: bytes) -> None:
        raise BrokenPipeError

    receipts = Receipts(broken)
    receipts.add(receipt_of(ticket(), None, None, Ending.COMPLETED))
    await until(lambda: receipts.unwritten_dropped)
    assert receipts.unwritten_dropped == 1
    receipts.close()

"""What became of requests: the outcome of one, and a bounded memory of the latest."""

from __future__ import annotations

from collections import OrderedDict

from kvsteward_contract.directive import Outcome
from kvsteward_contract.identity import output_digest

from kvsteward_engine.request import Request
from kvsteward_engine.sequence import Finish


def outcome_of(
    request: Request, finish: Finish, epoch: int, block_tokens: int, output_key: bytes, now: float
) -> Outcome:
    """The outcome of a request that ends at `now`. `epoch` is the engine's, for a request that never was admitted.
    The cost of tokenising is not known here and stays 0."""
    sequence = request.sequence
    admitted = now if request.admitted is None else request.admitted
    first = now if request.first_token is None else request.first_token
    return Outcome(
        request=request.id,
        mode=request.reported_mode,
        epoch=epoch if request.admitted is None else request.epoch,
        prompt_tokens=sequence.prompt_len,
        eligible_tokens=request.eligible * block_tokens,
        resident_tokens=request.resident * block_tokens,
        reused_tokens=request.reused * block_tokens,
        misses={reason.value: pages for reason, pages in request.misses.items()},
        output_tokens=sequence.output_len,
        queue_seconds=round(admitted - sequence.arrival, 6),
        prefill_seconds=round(first - admitted, 6),
        decode_seconds=round(now - first, 6),
        peak_pages=request.peak,
        stored_pages=request.stored,
        output_digest=output_digest(output_key, sequence.output) if output_key else "",
        finish=finish.value,
        preemptions=request.preemptions,
        scope_violation=request.violation,
    )


class OutcomeRing:
    """The newest `limit` outcomes by request id."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._outcomes: OrderedDict[str, Outcome] = OrderedDict()
        self.get = self._outcomes.get

    def add(self, outcome: Outcome) -> None:
        """The oldest goes when there are too many; an id seen before has its newest outcome."""
        self._outcomes.pop(outcome.request, None)
        self._outcomes[outcome.request] = outcome
        if len(self._outcomes) > self._limit:
            self._outcomes.popitem(last=False)

"""One engine: `step()` = schedule, run, postprocess. No threads of its own and no clock but the one it is given, so
that a simulation can drive it; `core.EngineThread` runs it for a server.

Submitting and cancelling only append to an inbox and never wait. What touches pages runs under one lock, which is free
while the runner computes.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from kvsteward_contract.directive import Directive, EnginePolicy, EngineState, Mode, Outcome

from kvsteward_engine.block_manager import Holding
from kvsteward_engine.errors import EngineFailed, InvalidRequest, OutOfMemory
from kvsteward_engine.ledger import ledger_slice
from kvsteward_engine.outcomes import OutcomeRing, outcome_of
from kvsteward_engine.request import Request
from kvsteward_engine.residency import Residency
from kvsteward_engine.scheduler import Scheduler
from kvsteward_engine.sequence import NO_TOKEN, Finish, Sampled, SamplingParams, Sequence, State, Step, Work
from kvsteward_engine.settings import EngineSettings

log = logging.getLogger(__name__)

SWEEP_PAGES = 256  # expired and over-quota pages dropped a step, besides those dropped when they are met
NOT_FINITE = "the model produced logits that aren't finite numbers; with FP16, try BF16 or FP32"
FAILURES = 3  # steps in a row that may fail before the engine counts as broken


class Runner(Protocol):
    """What computes a step. `run` reads `pages` of each sequence anew in every call: between steps a page may be
    exchanged for another one with the same content."""

    vocab_size: int

    def run(self, step: Step) -> list[Sampled]:
        """One token for each work with `sample`, in order. Raises `OutOfMemory`, or anything else if it is broken."""


@dataclass(slots=True)
class Delta:
    """What one step, or several taken together, added to a request."""

    request_id: str
    token_ids: list[int]
    sampled: list[Sampled] | None  # as many as tokens, if log probabilities were asked for
    finish: Finish | None = None
    outcome: Outcome | None = None  # with `finish`
    error: str = ""  # with Finish.ERROR: what happened


class Engine:
    """`clock` gives seconds that never go back, `wall` Unix seconds."""

    def __init__(
        self,
        runner: Runner,
        settings: EngineSettings,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        random_bits: Callable[[int], int] = secrets.randbits,
    ) -> None:
        self.settings = settings
        self.failed: str | None = None  # why the engine serves no more
        self.stalled = False  # the last step found nothing to run
        self._runner = runner
        self._clock = clock
        self._wall = wall
        self._instance = f"{random_bits(64):016x}"
        self._lock = threading.Lock()
        self.residency = Residency(settings, random_bits(256).to_bytes(32, "big"), wall)
        self.scheduler = Scheduler(settings, self.residency)
        self._inbox: deque[Request | str] = deque()  # new requests, and ids of those to cancel
        self._requests: dict[str, Request] = {}
        self._outcomes = OutcomeRing(settings.outcomes)
        self._output_key = b""
        self._oom_recoveries = 0
        self._failures = 0

    # ---- from any thread

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams,
        directive: Directive | None,
        stop: Callable[[int], bool] | None = None,
    ) -> None:
        """Queue a request. `stop` is shown each new token, by the thread that steps, and ends the answer with it by
        returning True: stop strings are the server's, but no token may come after one. Raises `InvalidRequest`,
        `QueueFull` or `EngineFailed`; then nothing was queued."""
        if self.failed is not None:
            raise EngineFailed(self.failed)
        self._check(request_id, prompt, sampling)
        queue = directive.queue if directive is not None else ""
        arriving = [item.queue for item in tuple(self._inbox) if isinstance(item, Request)]
        self.scheduler.queues.refuse_if_full(queue, arriving)
        sequence = Sequence(request_id, list(prompt), len(prompt), sampling, _readable(directive), self._clock())
        request = Request(sequence, queue, Holding(sequence.pages), stop=stop)
        self._requests[request_id] = request
        self._inbox.append(request)
        if self.failed is not None:  # meanwhile
            raise EngineFailed(self.failed)

    def cancel(self, request_id: str) -> None:
        """End a request within a step, wherever it is. Unknown and finished ones are left alone."""
        self._inbox.append(request_id)

    def set_policy(self, policy: EnginePolicy) -> EngineState:
        """Put a policy in force and answer once nothing of an older epoch can match any more. Where the state's epoch
        is above the policy's, the policy came too late and changed nothing."""
        with self._lock:
            self.residency.set_policy(policy)
            self._output_key = bytes.fromhex(self.residency.policy.output_key)
            return self.state()

    def state(self) -> EngineState:
        """What the engine is, and the epoch in force."""
        s, policy = self.settings, self.residency.policy
        return EngineState(
            instance=self._instance,
            epoch=policy.epoch,
            version=policy.version,
            last_match_seconds=self.residency.last_match_seconds,
            build=s.build,
            dtype=s.dtype,
            block_tokens=s.block_tokens,
            pool_tokens=s.pages * s.block_tokens,
            bytes_per_token=s.bytes_per_token,
            max_tokens=s.max_tokens,
            model=s.model,
            violations=self.residency.scope_violations,
            latched=self.residency.latched,
        )

    def outcome(self, request_id: str) -> Outcome | None:
        """What became of a finished request; None if it is running or unknown, see `in_flight`."""
        return self._outcomes.get(request_id)

    def in_flight(self, request_id: str) -> bool:
        """Whether the request waits or runs."""
        return request_id in self._requests

    def has_work(self) -> bool:
        """Whether a step would have anything to do."""
        return bool(self._inbox or self._requests)

    def stats(self) -> dict[str, Any]:
        """Figures for metrics and `/kv/v1/stats`: EngineState, and what is there and has happened since start."""
        with self._lock:
            residency = self.residency
            pages, shadow = residency.pages, residency.shadow.pages
            return msgspec.to_builtins(self.state()) | {
                "running": len(self.scheduler.running),
                "waiting": len(self._inbox) + self.scheduler.queues.waiting,
                "totalPages": pages.total,
                "freePages": pages.free,
                "retainedPages": pages.retained,
                "residentPages": {kind: count for kind, count in pages.resident_by_kind.items() if count},
                "shadowResidentPages": {kind: count for kind, count in shadow.resident_by_kind.items() if count},
                "evictions": {reason.value: count for reason, count in pages.evictions.items()},
                "shadowEvictions": {reason.value: count for reason, count in shadow.evictions.items()},
                "ghosts": len(pages.ghosts),
                "regretTokens": pages.regret_tokens,
                "shadowRegretTokens": shadow.regret_tokens,
                "reusedTokens": residency.reused_tokens,
                "predictedTokens": residency.predicted_tokens,
                "preemptions": self.scheduler.preemptions,
                "oomRecoveries": self._oom_recoveries,
                "scopeViolations": residency.scope_violations,
            }

    def ledger(self, limit: int, cursor: str = "") -> dict[str, Any]:
        """A slice of the ledger, see `ledger.ledger_slice`."""
        offset = self._wall() - self._clock()
        with self._lock:
            return ledger_slice(self.residency.pages, limit, cursor, lambda seconds: seconds + offset)

    # ---- from the one thread that steps

    def step(self) -> list[Delta]:
        """Schedule, run, postprocess once. Whatever the runner raises ends requests, never the engine; an exception
        from here is a bug, after which only `abandon` is of use."""
        deltas: list[Delta] = []
        with self._lock:
            now = self._clock()
            self._take_inbox(deltas, {}, now)
            self.residency.sweep(now, SWEEP_PAGES)
            works = self.scheduler.plan(now)
        self.stalled = not works
        if not works:
            return deltas
        try:
            sampled = self._runner.run(Step(tuple(works.values())))
        except OutOfMemory as error:
            with self._lock:
                self._make_room(deltas, works, str(error))
            return deltas
        except Exception as error:
            log.exception("a step of %d sequences failed", len(works))
            with self._lock:
                self._fail_step(deltas, works, f"the engine failed in a step: {type(error).__name__}: {error}")
            return deltas
        self._failures = 0
        with self._lock:
            self.scheduler.step_succeeded()
            self._postprocess(deltas, works, sampled)
        return deltas

    def abandon(self, reason: str) -> list[Delta]:
        """Serve no more: every request ends as an error, and so do those that come. Pages are left as they are."""
        self.failed = reason
        self._inbox.clear()
        deltas: list[Delta] = []
        with self._lock:
            for request in list(self._requests.values()):
                self._close(deltas, request, Finish.ERROR, self._clock(), error=reason)
        return deltas

    def _check(self, request_id: str, prompt: list[int], sampling: SamplingParams) -> None:
        s = self.settings
        length = len(prompt)
        if request_id in self._requests:
            raise InvalidRequest(f"request {request_id} is running already; give each request an id of its own")
        if not length:
            raise InvalidRequest("the prompt has no tokens")
        if min(prompt) < 0 or max(prompt) >= self._runner.vocab_size:
            raise InvalidRequest(f"the prompt has token ids outside the vocabulary of {self._runner.vocab_size}")
        if length + sampling.max_tokens > s.max_tokens:
            raise InvalidRequest(
                f"{length} tokens of prompt and {sampling.max_tokens} of answer are more than the {s.max_tokens} this "
                "engine serves; shorten the prompt or lower max_tokens"
            )
        if s.pages_for(length + sampling.max_tokens - 1) > s.pages:  # the last token is never computed
            raise InvalidRequest(
                f"{length} tokens of prompt and {sampling.max_tokens} of answer do not fit into the cache's "
                f"{s.pages * s.block_tokens} tokens; lower max_tokens or raise the engine's capacity"
            )

    def _take_inbox(self, deltas: list[Delta], works: Mapping[Request, Work], now: float) -> None:
        """Queue what was submitted and end what was cancelled; requests in `works` are only marked."""
        inbox = self._inbox
        while inbox:
            item = inbox[0]
            if isinstance(item, Request):
                self.scheduler.submit(item)
            else:
                request = self._requests.get(item)
                if request is not None and request in works:
                    request.cancelled = True
                elif request is not None:
                    self._end(deltas, request, Finish.CANCELLED, now)
            inbox.popleft()  # only now, so that at no moment a waiting request is counted nowhere

    def _postprocess(self, deltas: list[Delta], works: Mapping[Request, Work], sampled: list[Sampled]) -> None:
        """Take in what was computed: from here on full pages are complete, and only from here on matchable."""
        now = self._clock()
        self._take_inbox(deltas, works, now)
        results = iter(sampled)
        for request, work in works.items():
            sequence = work.sequence
            sequence.computed = work.start + work.count
            token = next(results) if work.sample else None
            if request.cancelled:
                self.residency.publish(request, now)
                self._end(deltas, request, Finish.CANCELLED, now)
                continue
            if token is None:
                self.residency.publish(request, now)
                continue
            if token.token == NO_TOKEN:  # what it wrote is of no use either: nothing of this step is published
                self._end(deltas, request, Finish.ERROR, now, error=NOT_FINITE)
                continue
            sequence.tokens.append(token.token)
            if request.first_token is None:
                request.first_token = now
            self.residency.publish(request, now)
            kept = [token] if sequence.sampling.logprobs is not None else None
            try:
                finish = self._finish(request, token.token)
            except Exception as error:  # the caller's `stop`; its fault is its own request's alone
                log.exception("the stop of request %s failed", request.id)
                self._end(deltas, request, Finish.ERROR, now, error=f"the request's own stop failed: {error!r}")
                continue
            if finish is None:
                self.scheduler.prompt_computed(request)
                deltas.append(Delta(request.id, [token.token], kept))
            else:
                self._end(deltas, request, finish, now, [token.token], kept)

    def _finish(self, request: Request, token: int) -> Finish | None:
        sequence = request.sequence
        sampling = sequence.sampling
        if token in sampling.stop_token_ids:
            return Finish.STOP
        if not sampling.ignore_eos and token in self.settings.eos_token_ids:
            return Finish.STOP
        if request.stop is not None and request.stop(token):
            return Finish.STOP
        if len(sequence.tokens) - sequence.prompt_len >= sampling.max_tokens:
            return Finish.LENGTH
        return None

    def _make_room(self, deltas: list[Delta], works: Mapping[Request, Work], error: str) -> None:
        """The device had no memory for the step. The pool is allocated once, so cached pages free nothing that a step
        could use; smaller steps do. Prompts of the step go back to their queues and are computed in smaller parts, else
        half of the decodes do; a request that is alone and still does not fit fails."""
        now = self._clock()
        self._oom_recoveries += 1
        self._take_inbox(deltas, works, now)
        for request in [request for request in works if request.cancelled]:
            self._end(deltas, request, Finish.CANCELLED, now)
        rest = [request for request in works if not request.cancelled]
        smaller = self.scheduler.shrink_steps()
        if len(rest) == 1 and (works[rest[0]].count == 1 or not smaller):
            self._end(deltas, rest[0], Finish.ERROR, now, error=f"{error}; even by itself the request does not fit")
            return
        prompts = [request for request in rest if not self.scheduler.decodes(request)]
        chosen = prompts or rest[len(rest) // 2 :]
        if not prompts:
            self.scheduler.shrink_places(len(rest) - len(chosen))
        for request in reversed(chosen):
            self.scheduler.preempt(request, now)
        log.warning("%s; %d of %d requests were queued again", error, len(chosen), len(rest))

    def _fail_step(self, deltas: list[Delta], works: Mapping[Request, Work], error: str) -> None:
        """End every request of the step: what it wrote can't be trusted, and was published to nobody."""
        now = self._clock()
        for request in list(works):
            self._end(deltas, request, Finish.ERROR, now, error=error)
        self._failures += 1
        if self._failures >= FAILURES:
            self.failed = f"{FAILURES} steps in a row failed, the last one so: {error}"
            for request in list(self._requests.values()):
                self._end(deltas, request, Finish.ERROR, now, error=self.failed)
            self._inbox.clear()

    def _end(
        self,
        deltas: list[Delta],
        request: Request,
        finish: Finish,
        now: float,
        tokens: list[int] | None = None,
        sampled: list[Sampled] | None = None,
        error: str = "",
    ) -> None:
        """A request is over: its pages go back, its outcome can be asked for."""
        self.scheduler.remove(request, now)
        self._close(deltas, request, finish, now, tokens, sampled, error)

    def _close(
        self,
        deltas: list[Delta],
        request: Request,
        finish: Finish,
        now: float,
        tokens: list[int] | None = None,
        sampled: list[Sampled] | None = None,
        error: str = "",
    ) -> None:
        sequence = request.sequence
        sequence.state = State.FINISHED
        sequence.finish = finish
        epoch = self.residency.policy.epoch
        outcome = outcome_of(request, finish, epoch, self.settings.block_tokens, self._output_key, now)
        self._outcomes.add(outcome)
        self._requests.pop(request.id, None)
        deltas.append(Delta(request.id, tokens or [], sampled, finish, outcome, error))


def _readable(directive: Directive | None) -> Directive | None:
    """The directive, as Cold if its salt is no salt: a bad one costs its own request the cache, and nothing else."""
    if directive is None:
        return None
    try:
        bytes.fromhex(directive.namespace)
    except ValueError:
        return msgspec.structs.replace(directive, mode=Mode.COLD, namespace="")
    return directive

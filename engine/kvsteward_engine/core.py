"""The engine behind a server: one thread steps it, an event loop talks to it.

Tokens cross over once a step: all deltas of a step in one `call_soon_threadsafe`. A consumer that falls behind finds
its deltas merged, so nothing piles up. `Engine`, without threads, is what simulations drive.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

from kvsteward_contract.directive import Directive, EnginePolicy, EngineState, Outcome

from kvsteward_engine.engine import Delta, Engine, Runner
from kvsteward_engine.errors import EngineFailed, InvalidRequest
from kvsteward_engine.sequence import Finish, SamplingParams
from kvsteward_engine.settings import EngineSettings

__all__ = ["Delta", "Engine", "EngineSettings", "EngineThread", "Runner"]

log = logging.getLogger(__name__)

IDLE_SECONDS = 1.0  # between looks at expired pages when there is nothing to do
STALLED_SECONDS = 0.02  # between looks at requests that can't start yet


class _Stream:
    """Where one request's deltas wait for their reader; lives on the reader's event loop."""

    __slots__ = ("_delta", "_reader", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._delta: Delta | None = None
        self._reader: asyncio.Future[None] | None = None

    def push(self, delta: Delta) -> None:
        waiting = self._delta
        if waiting is None:
            self._delta = delta
        else:
            waiting.token_ids += delta.token_ids
            if delta.sampled is not None:
                waiting.sampled = (waiting.sampled or []) + delta.sampled
            waiting.finish, waiting.outcome, waiting.error = delta.finish, delta.outcome, delta.error
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def next(self) -> Delta:
        while self._delta is None:
            self._reader = self.loop.create_future()
            await self._reader
        delta, self._delta = self._delta, None
        return delta


class EngineThread:
    """Runs an engine in a thread of its own. `on_failure` is called once, from that thread, when it can serve no
    more; from then on `failed` says why, and every request ends with `EngineFailed`."""

    def __init__(
        self,
        runner: Runner,
        settings: EngineSettings,
        on_failure: Callable[[str], None] | None = None,
        engine: Engine | None = None,
    ) -> None:
        self.engine = engine or Engine(runner, settings)
        self._on_failure = on_failure
        self._streams: dict[str, _Stream] = {}
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- life

    def start(self) -> None:
        """Start stepping."""
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """End the thread after the step under way; what still runs ends as an error."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    @property
    def failed(self) -> str | None:
        """Why the engine serves no more; None while it does."""
        if self.engine.failed is None and self._thread.ident is not None and not self._thread.is_alive():
            return "the engine's thread has ended"
        return self.engine.failed

    # ---- requests, from an event loop

    async def generate(
        self,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams,
        directive: Directive | None,
        stop: Callable[[int], bool] | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """The request's tokens as they come; the last delta has `finish` and `outcome`. Closing the generator early
        cancels the request within a step. `stop` is as in `Engine.submit`. Raises `InvalidRequest`, `QueueFull`,
        `EngineFailed`."""
        failed = self.failed
        if failed is not None:
            raise EngineFailed(failed)
        if request_id in self._streams:
            raise InvalidRequest(f"request {request_id} is running already; give each request an id of its own")
        stream = _Stream(asyncio.get_running_loop())
        self._streams[request_id] = stream
        over = True
        try:
            self.engine.submit(request_id, prompt, sampling, directive, stop)
            over = False
            self._wake.set()
            while not over:
                delta = await stream.next()
                over = delta.finish is not None
                if delta.finish is Finish.ERROR:
                    raise EngineFailed(delta.error)
                yield delta
        finally:
            del self._streams[request_id]
            if not over:
                self.engine.cancel(request_id)
                self._wake.set()

    # ---- from any thread

    def set_policy(self, policy: EnginePolicy) -> EngineState:
        """See `Engine.set_policy`; waits for the scheduling of a step at most, never for its computation."""
        return self.engine.set_policy(policy)

    def state(self) -> EngineState:
        """See `Engine.state`."""
        return self.engine.state()

    def stats(self) -> dict[str, Any]:
        """See `Engine.stats`."""
        return self.engine.stats()

    def ledger(self, limit: int, cursor: str = "") -> dict[str, Any]:
        """See `Engine.ledger`."""
        return self.engine.ledger(limit, cursor)

    def outcome(self, request_id: str) -> Outcome | None:
        """See `Engine.outcome`."""
        return self.engine.outcome(request_id)

    def in_flight(self, request_id: str) -> bool:
        """See `Engine.in_flight`."""
        return self.engine.in_flight(request_id)

    # ---- the thread

    def _run(self) -> None:
        engine, wake = self.engine, self._wake
        try:
            while not self._stopping and engine.failed is None:
                wake.clear()
                self._dispatch(engine.step())
                if engine.stalled and not self._stopping:
                    wake.wait(STALLED_SECONDS if engine.has_work() else IDLE_SECONDS)
        except BaseException as error:
            log.exception("the engine's thread failed")
            self._abandon(f"the engine's thread failed: {type(error).__name__}: {error}")
        else:
            self._abandon(engine.failed or "the engine is stopping")
        if self._on_failure is not None and not self._stopping:
            self._on_failure(engine.failed or "the engine's thread has ended")

    def _abandon(self, reason: str) -> None:
        self._dispatch(self.engine.abandon(reason))

    def _dispatch(self, deltas: list[Delta]) -> None:
        """Hand a step's deltas to the event loops of their readers: one call a loop, usually one in all."""
        batches: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Delta]]] = {}
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is not None:
                batches.setdefault(stream.loop, []).append((stream, delta))
        for loop, batch in batches.items():
            try:
                loop.call_soon_threadsafe(_deliver, batch)
            except RuntimeError:  # the loop is closed: nobody is left to tell
                for _, delta in batch:
                    self.engine.cancel(delta.request_id)


def _deliver(batch: list[tuple[_Stream, Delta]]) -> None:
    for stream, delta in batch:
        stream.push(delta)

"""One engine process: the real `Engine` with its scheduler and block manager, stepped in simulated time.

What arrives while a step computes is drawn to be taken in the middle of the step, when the engine's lock is free, or
after it, as threads would have it.
"""

from __future__ import annotations

import asyncio
import random
from argparse import Namespace
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import msgspec
from kvsteward_contract import wire
from kvsteward_contract.directive import Directive, EnginePolicy, Outcome, encode
from kvsteward_contract.identity import Identity
from kvsteward_engine.audit import faults
from kvsteward_engine.engine import Engine
from kvsteward_engine.errors import QueueFull
from kvsteward_engine.sequence import Finish, Sampled, SamplingParams, Sequence, Step
from kvsteward_engine.settings import EngineSettings

from .clock import SimulatedLoop
from .model import PagedModel, Use
from .network import Network, Reply, Request, Server
from .trace import Trace

BYTES_PER_TOKEN = 6144  # so that the smallest capacity that is accepted, 1Mi, is 42 pages of 4 tokens
STEP_SECONDS = 0.02
_policy = msgspec.json.Decoder(EnginePolicy)


class EngineGone(Exception):
    """The engine's process ended, or broke the connection."""


@dataclass(frozen=True, slots=True)
class Match:
    """A request began to use pages that it hadn't computed."""

    time: float  # simulated seconds, when the engine decided it
    pod: str
    engine_epoch: int  # then
    sequence: Sequence
    use: Use


@dataclass(slots=True, eq=False)
class Generation:
    """One request in the engine, from its submission to its outcome."""

    deltas: asyncio.Queue[tuple[list[int], Finish | None, Outcome | None] | None] = field(default_factory=asyncio.Queue)


@dataclass(frozen=True, slots=True)
class Hears:
    """Who is told at once of what an engine does."""

    matched: Callable[[Match], None]
    confirmed: Callable[[], None]  # a policy is in force
    violated: Callable[[], None]  # a page of another scope was met


class EngineProcess:
    """`loading` seconds after its start it serves."""

    def __init__(
        self,
        loop: SimulatedLoop,
        network: Network,
        trace: Trace,
        chance: random.Random,
        pod: str,
        asked: Namespace,
        hears: Hears,
        loading: float,
    ) -> None:
        self.loop, self.trace, self.chance, self.pod = loop, trace, chance, pod
        self._hears = hears
        self._violations = 0
        block = asked.block_tokens
        settings = EngineSettings(
            pages=asked.capacity // (block * BYTES_PER_TOKEN),
            block_tokens=block,
            max_tokens=asked.max_tokens,
            identity=Identity(asked.model_revision, asked.tokenizer_revision, "", f"FP32/{block}/simulated", b""),
            max_concurrent=asked.max_concurrent,
            max_waiting=24,
            prefill_chunk=64,
            model=asked.served_model_name,
            build="simulated",
            dtype="FP32",
            bytes_per_token=BYTES_PER_TOKEN,
        )
        self.revision = asked.model_revision
        self._model = PagedModel(asked.model_revision, settings.pages, block, self._used)
        self.engine = Engine(self, settings, loop.time, loop.unix, chance.getrandbits)
        self.vocab_size = self._model.vocab_size
        self.alive = True
        self.ready = False
        self._midway: list[Callable[[], None]] = []
        self._planned = self._finished = (0.0, 0)  # when the engine last planned and finished a step, at which epoch
        self._work = asyncio.Event()
        self._generations: dict[str, Generation] = {}
        self.server = Server(self._handle)
        network.servers[(host_of(pod), wire.ENGINE_PORT)] = self.server
        self._task = loop.create_task(self._run(loading), name=f"engine of {pod}")

    def kill(self) -> None:
        """SIGKILL: nothing is told to anybody, connections break."""
        if self.alive:
            self.alive = self.ready = False
            self._task.cancel()
            self.server.stop()
            for generation in self._generations.values():
                generation.deltas.put_nowait(None)
            self._generations.clear()

    # ---- what the runner's place does: the model, and what others do while it computes

    def run(self, step: Step) -> list[Sampled]:
        midway, self._midway = self._midway, []
        for call in midway:
            call()
        return self._model.run(step)

    def _used(self, sequence: Sequence, use: Use) -> None:
        time, epoch = self._planned if use.admitted else self._finished
        self._hears.matched(Match(time, self.pod, epoch, sequence, use))

    def _soon(self, call: Callable[[], None]) -> None:
        """Now, or in the middle of the next step, if one is to come."""
        if self.engine.has_work() and self.chance.random() < 0.5:
            self._midway.append(call)
            self._work.set()
        else:
            call()

    async def _run(self, loading: float) -> None:
        await asyncio.sleep(loading)
        self.ready = True
        self.trace.note(self.pod, f"engine {self.engine.state().instance[:6]} ready")
        while True:
            if not self.engine.has_work():
                for call in self._midway:
                    call()
                self._midway.clear()
                self._work.clear()
                if not self.engine.has_work():
                    await self._work.wait()
            self._planned = (self.loop.time(), self.engine.state().epoch)
            deltas = self.engine.step()
            self._finished = (self.loop.time(), self.engine.state().epoch)
            if self.engine.residency.scope_violations > self._violations:
                self._violations = self.engine.residency.scope_violations
                self._hears.violated()
            for delta in deltas:
                generation = self._generations.get(delta.request_id)
                if generation is not None:
                    generation.deltas.put_nowait((delta.token_ids, delta.finish, delta.outcome))
                    if delta.finish is not None:
                        del self._generations[delta.request_id]
            await asyncio.sleep(STEP_SECONDS * self.chance.uniform(0.5, 1.5))

    # ---- requests, as the engine's server puts them

    async def generate(
        self, request: str, prompt: list[int], sampling: SamplingParams, directive: Directive | None
    ) -> AsyncGenerator[tuple[list[int], Finish | None, Outcome | None], None]:
        """Tokens as they come; leaving early cancels. Raises QueueFull, and EngineGone when the process ends."""
        if not self.ready:
            raise EngineGone
        generation = Generation()
        self._generations[request] = generation
        try:
            self.engine.submit(request, prompt, sampling, directive)
        except QueueFull:
            del self._generations[request]
            raise
        self._work.set()
        finish = None
        try:
            while finish is None:
                item = await generation.deltas.get()
                if item is None:
                    raise EngineGone
                tokens, finish, outcome = item
                yield tokens, finish, outcome
        finally:
            if finish is None and self.alive:
                self._soon(lambda: self.engine.cancel(request))
                self._work.set()

    # ---- /kv/v1

    async def _handle(self, request: Request) -> Reply:
        if not self.ready:
            return Reply(503)
        if request.path == wire.ENGINE_POLICY_ROUTE:
            if request.method == "GET":
                return Reply(200, encode(self.engine.state()))
            return await self._post_policy(_policy.decode(request.body))
        if request.path == wire.ENGINE_STATS_ROUTE:
            return Reply(200, msgspec.json.encode(self.engine.stats()))
        if request.path.startswith(wire.ENGINE_OUTCOMES_ROUTE):
            number = request.path.rpartition("/")[2]
            if (outcome := self.engine.outcome(number)) is not None:
                return Reply(200, encode(outcome))
            return Reply(202 if self.engine.in_flight(number) else 404)
        return Reply(404)

    async def _post_policy(self, policy: EnginePolicy) -> Reply:
        answered: asyncio.Future[Reply] = self.loop.create_future()

        def take() -> None:
            state = self.engine.set_policy(policy)
            self.trace.note(self.pod, f"engine at epoch {state.epoch}")
            if not answered.done():
                self._hears.confirmed()
                answered.set_result(Reply(409 if state.epoch > policy.epoch else 200, encode(state)))

        self._soon(take)
        return await answered

    # ---- looking on

    def audit(self) -> list[str]:
        """What contradicts itself in the page pool and the shadow index."""
        engine = self.engine
        requests = list(engine._requests.values())
        residency = engine.residency
        return [
            *faults(residency.pages, [request.holding for request in requests]),
            *faults(residency.shadow.pages, [request.shadow for request in requests]),
        ]


def host_of(pod: str) -> str:
    """The engine's address inside its pod's network namespace."""
    return f"loopback-of-{pod}"

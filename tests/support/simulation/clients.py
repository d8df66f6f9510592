"""Clients of several tenants: conversations that share beginnings, also across tenants, so that every prompt that one
tenant sends is one that another could wrongly be served from."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .model import VOCABULARY, cold_tokens
from .nodes import Nodes
from .pod import Asked, Broken, Pod, Refused, World
from .scenario import TENANTS, WORKLOADS

TEXTS = 4
PATIENCE = 60.0  # seconds a client waits for an answer before it counts as hanging


@dataclass(slots=True)
class Answer:
    """How one request went."""

    number: int
    asked: Asked
    pod: Pod
    revision: str  # of the model that answered
    ending: str  # complete, broken, refused, left or hung
    tokens: tuple[int, ...]
    disturbed: bool  # a container that it needed was killed meanwhile

    def fault(self) -> str:
        """What is wrong with it; "" when nothing is."""
        wanted = cold_tokens(self.revision, self.asked.prompt, self.asked.output)
        if self.tokens != wanted[: len(self.tokens)]:
            return f"got {self.tokens}, a cold run gives {wanted}"
        if self.ending == "complete" and len(self.tokens) < self.asked.output:
            return f"ended as complete after {len(self.tokens)} of {self.asked.output} tokens"
        if self.ending == "broken" and not self.disturbed:
            return "was cut although nothing had happened to its pod"
        return "was never answered" if self.ending == "hung" else ""


def key_of(tenant: str) -> str:
    return f"key-of-{tenant}-".ljust(40, "x")


def write_keys(folder: Path, tenants: tuple[str, ...], now: float) -> None:
    """The mounted Secret; its time stamps are simulated ones, so that a change is always seen."""
    for tenant in TENANTS:
        file = folder / tenant
        if tenant in tenants:
            file.write_text(key_of(tenant))
            _stamp(file, now)
        else:
            file.unlink(missing_ok=True)
    _stamp(folder, now)


def _stamp(path: Path, now: float) -> None:
    nanoseconds = int(now * 1e9)
    os.utime(path, ns=(nanoseconds, nanoseconds))


class Clients:
    """Sends requests until told to stop. `answered` hears of each answer."""

    def __init__(self, world: World, nodes: Nodes, chance: random.Random, answered: Callable[[Answer], None]) -> None:
        self._world, self._nodes, self._chance, self._answered = world, nodes, chance, answered
        self.pace = 1.0  # seconds between two requests of a tenant, about
        self.sent = 0
        self._texts = [tuple(chance.randrange(VOCABULARY) for _ in range(48)) for _ in range(TEXTS)]
        self._running: set[asyncio.Task[None]] = set()
        self._senders = [world.loop.create_task(self._send(tenant)) for tenant in TENANTS]

    async def stop(self) -> None:
        """No more requests; waits for those under way."""
        for sender in self._senders:
            sender.cancel()
        while self._running:
            await asyncio.wait(set(self._running))

    def burst(self, count: int) -> None:
        for number in range(count):
            self._start(TENANTS[number % len(TENANTS)])

    async def _send(self, tenant: str) -> None:
        while True:
            await asyncio.sleep(self._chance.expovariate(1.0) * self.pace)
            self._start(tenant)

    def _start(self, tenant: str) -> None:
        endpoints = self._nodes.endpoints()
        if endpoints:
            task = self._world.loop.create_task(self._one(self._asked(tenant), self._chance.choice(endpoints)))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _asked(self, tenant: str) -> Asked:
        chance = self._chance
        text = chance.choice(self._texts)[: chance.choice((9, 16, 25, 40))]
        tail = tuple(chance.randrange(VOCABULARY) for _ in range(chance.choice((0, 0, 3, 8))))
        session = f"{tenant}-{chance.randrange(12)}"
        output = chance.choice((1, 2, 4, 7, 11, 30))
        return Asked(tenant, key_of(tenant), session, chance.choice(WORKLOADS), text + tail, output)

    async def _one(self, asked: Asked, pod: Pod) -> None:
        self.sent += 1
        number, sidecar, engine = self.sent, pod.sidecar, pod.engine
        if sidecar is None or engine is None or not sidecar.alive:
            return  # connection refused
        tokens: list[int] = []
        patience = PATIENCE if self._chance.random() < 0.85 else self._chance.uniform(0.0, 0.3)
        work = self._world.loop.create_task(sidecar.serve(asked, tokens))
        sidecar.requests.add(work)
        await asyncio.wait({work}, timeout=patience)
        ending = "complete"
        if not work.done():
            ending = "left" if patience < PATIENCE else "hung"
            work.cancel()
            await asyncio.wait({work})
        elif work.cancelled():
            ending = "broken"
        elif isinstance(error := work.exception(), Refused):
            ending = "refused"
        elif isinstance(error, Broken):
            ending = "broken"
        elif error is not None:
            raise error
        sidecar.requests.discard(work)
        disturbed = not sidecar.alive or not engine.alive or pod.gone
        self._answered(Answer(number, asked, pod, engine.revision, ending, tuple(tokens), disturbed))

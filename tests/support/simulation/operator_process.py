"""One operator process over the simulated API server. Killed, it leaves only what it had stored."""

from __future__ import annotations

import asyncio
from typing import Any

from kvsteward_operator import errors
from kvsteward_operator.index import Index, Key, policy_of
from kvsteward_operator.kinds import CHILDREN, POLICY, Kind
from kvsteward_operator.objects.naming import SELECTOR
from kvsteward_operator.reconcile import Reconciler
from kvsteward_operator.scrape import TIMEOUT, SidecarScraper
from kvsteward_operator.settings import RESYNC_SECONDS, Settings
from kvsteward_operator.telemetry import Telemetry
from kvsteward_operator.workqueue import WorkQueue

from .api_server import ApiServer
from .network import Session
from .operator_api import NAME, OperatorApi, Watches
from .pod import World

OPERATOR_KEY = b"operator key of the simulation"
SETTINGS = Settings("engine:1", "sidecar:1", OPERATOR_KEY, ("serving",))


class OperatorProcess:
    def __init__(self, world: World, server: ApiServer) -> None:
        self._world = world
        loop, chance = world.loop, world.chance
        self.index = Index()
        self.api = OperatorApi(world.network, server)
        self.queue = WorkQueue(loop.time, chance.random)
        telemetry = Telemetry(loop.time)
        self.scraper = SidecarScraper(OPERATOR_KEY, self._uid_of, self.queue.add, telemetry)
        session: Any = Session(world.network, NAME, timeout=TIMEOUT)
        self.scraper._session = session
        self.reconciler = Reconciler(
            self.api, self.index, self.scraper, SETTINGS, loop.unix, telemetry, chance.randbytes
        )
        kinds = ((POLICY, ""), *((kind, SELECTOR) for kind in CHILDREN))
        self._watches = Watches(world.network, server, kinds, self._handle)
        self._tasks = [loop.create_task(self._work()), loop.create_task(self._resync())]
        world.trace.note(NAME, "started")

    def kill(self) -> None:
        self._world.trace.note(NAME, "killed")
        for task in [*self._watches.tasks, *self._tasks, *self.scraper._tasks.values()]:
            task.cancel()

    @property
    def failures(self) -> list[BaseException]:
        """Tasks that ended by themselves."""
        ended = [task for task in [*self._watches.tasks, *self._tasks] if task.done() and not task.cancelled()]
        return [task.exception() or RuntimeError("ended") for task in ended]

    def _uid_of(self, key: Key) -> str:
        policy = self.index.policy(key)
        return policy["metadata"]["uid"] if policy is not None else ""

    def _handle(self, kind: Kind, type_: str | None, body: dict[str, Any]) -> None:
        changed = self.index.remove(body) if type_ == "DELETED" else self.index.put(body)
        if changed and (key := policy_of(body)) is not None:
            self.queue.add(key)

    async def _work(self) -> None:
        while True:
            key = await self.queue.take()
            try:
                again = await self.reconciler.turn(key)
            except errors.ApiError as error:
                self._world.trace.note(NAME, f"turn failed: {error}")
                self.queue.done(key, failed=True)
            else:
                self.queue.done(key, failed=False, again=again)

    async def _resync(self) -> None:
        while True:
            await asyncio.sleep(RESYNC_SECONDS)
            for kind, selector in ((POLICY, ""), *((kind, SELECTOR) for kind in CHILDREN)):
                before = self.index.versions(kind.name)
                try:
                    listed = await self.api.list(kind, None, selector)
                except errors.ApiError:
                    continue
                for body in self.index.compare(kind.name, listed, before):
                    if (key := policy_of(body)) is not None:
                        self.queue.add(key)

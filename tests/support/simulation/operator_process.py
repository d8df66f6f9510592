"""One operator process over the simulated API server. Killed, it leaves only what it had stored."""

from __future__ import annotations

import asyncio
from typing import Any

from kvsteward_operator import errors
from kvsteward_operator.index import Index, Key
from kvsteward_operator.kinds import CHILDREN, POLICY
from kvsteward_operator.objects.naming import SELECTOR
from kvsteward_operator.reconcile import Reconciler
from kvsteward_operator.resync import Resync
from kvsteward_operator.scrape import TIMEOUT, SidecarScraper
from kvsteward_operator.settings import Settings
from kvsteward_operator.telemetry import Telemetry
from kvsteward_operator.watches import Watches
from kvsteward_operator.workers import HEARTBEAT, WORKERS, work
from kvsteward_operator.workqueue import WorkQueue

from .api_server import ApiServer
from .network import Session
from .operator_api import NAME, KopfWatches, OperatorApi
from .pod import World

OPERATOR_KEY = b"operator key of the simulation"
SETTINGS = Settings("engine:1", "sidecar:1", OPERATOR_KEY, ("serving",))


RESTART_SECONDS = 2.0  # until the kubelet starts a process again that gave up


class OperatorProcess:
    """What `main.operate` wires together, over simulated wires; kopf's watches are simulated too."""

    def __init__(self, world: World, server: ApiServer) -> None:
        self._world, self._server = world, server
        loop, chance = world.loop, world.chance
        self.index = Index()
        self.queue = WorkQueue(loop.time, chance.random)
        self.telemetry = Telemetry(loop.time)
        self.api = api = OperatorApi(world.network, server)
        self.scraper = SidecarScraper(OPERATOR_KEY, self._uid_of, self.queue.add, self.telemetry)
        session: Any = Session(world.network, NAME, timeout=TIMEOUT)
        self.scraper._session = session
        self.reconciler = Reconciler(
            api, self.index, self.scraper, SETTINGS, loop.unix, self.telemetry, chance.randbytes
        )
        self.watches = Watches(self.index, self.queue.add, SETTINGS.namespaces)
        self.resync = Resync(api, self.index, SETTINGS.namespaces, self.queue.add, self._distrust, self.telemetry)
        self._kopf: KopfWatches | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._start = loop.create_task(self._run())
        world.trace.note(NAME, "started")

    async def _run(self) -> None:
        while True:
            try:
                await self.resync.fill()
                break
            except errors.ApiError as error:
                self._world.trace.note(NAME, f"cannot start: {error}")
                await asyncio.sleep(RESTART_SECONDS)
        self.queue.add(HEARTBEAT)
        loop = self._world.loop
        self._tasks = [
            loop.create_task(work(self.queue, self.reconciler, self.telemetry), name=f"worker {number}")
            for number in range(WORKERS)
        ]
        self._tasks.append(loop.create_task(self.resync.run(), name="resync"))
        self._watch()

    def _watch(self) -> None:
        kinds = ((POLICY, ""), *((kind, SELECTOR) for kind in CHILDREN))
        self._kopf = KopfWatches(self._world.network, self._server, kinds, self.watches.see)

    def _distrust(self) -> None:
        """In place of `Watches.restart`, which would restart kopf."""
        self._world.trace.note(NAME, "starts its watches anew")
        if self._kopf is not None:
            self._kopf.stop()
        self._watch()

    def kill(self) -> None:
        """SIGKILL."""
        self._world.trace.note(NAME, "killed")
        self._start.cancel()
        if self._kopf is not None:
            self._kopf.stop()
        for task in [*self._tasks, *self.scraper._tasks.values()]:
            task.cancel()

    @property
    def failures(self) -> list[BaseException]:
        """Tasks that ended by themselves."""
        tasks = [*self._tasks, *(self._kopf.tasks if self._kopf is not None else ()), *self.scraper._tasks.values()]
        ended = [task for task in tasks if task.done() and not task.cancelled()]
        return [task.exception() or RuntimeError("ended") for task in ended]

    def _uid_of(self, key: Key) -> str:
        policy = self.index.policy(key)
        return str(policy["metadata"]["uid"]) if policy is not None else ""

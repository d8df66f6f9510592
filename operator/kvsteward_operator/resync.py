"""Lists everything now and then and compares it with the index: a watch that died without a word is found so."""

import asyncio
import logging
import random
from collections.abc import Callable

from . import errors
from .api import Api, Object
from .index import Index, Key, place_of, policy_of
from .kinds import CHILDREN, POLICY, Kind
from .objects.naming import SELECTOR
from .settings import RESYNC_SECONDS
from .telemetry import Telemetry

log = logging.getLogger(__name__)

GRACE_SECONDS = 5.0  # by how much a watch may be slower than a list


class Resync:
    """`enqueue(key, delay)` plans a turn; `distrust()` is called when the watches have missed something."""

    def __init__(
        self,
        api: Api,
        index: Index,
        namespaces: tuple[str, ...],
        enqueue: Callable[[Key, float], None],
        distrust: Callable[[], None],
        telemetry: Telemetry,
        random: Callable[[], float] = random.random,
    ) -> None:
        self._random = random
        self._api, self._index, self._telemetry = api, index, telemetry
        self._namespaces: tuple[str | None, ...] = namespaces or (None,)
        self._enqueue, self._distrust = enqueue, distrust

    async def fill(self) -> None:
        """The first picture: no decision is made before it is complete. Raises ApiError."""
        for kind in (*CHILDREN, POLICY):
            for body in await self._list(kind):
                self._index.put(body)
        keys = self._index.keys()
        self._telemetry.policies.set(len(keys))
        for key in keys:
            self._enqueue(key, 0.0)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(RESYNC_SECONDS * (0.9 + 0.2 * self._random()))
            try:
                await self.compare(GRACE_SECONDS)
            except errors.ApiError as error:
                log.warning("resync: %s", error)

    async def compare(self, grace: float) -> int:
        """One comparison, `grace` seconds after the lists. Returns how many objects the index had wrong, after putting
        them right. Raises ApiError."""
        listed, before = {}, {}
        for kind in (*CHILDREN, POLICY):
            before[kind] = self._index.versions(kind.name)
            listed[kind] = await self._list(kind)
        await asyncio.sleep(grace)
        count = 0
        for kind, bodies in listed.items():
            wrong = self._index.compare(kind.name, bodies, before[kind])
            for body in wrong:
                log.warning("the watches had missed a change of %s", "/".join(place_of(body)))
                if (key := policy_of(body)) is not None:
                    self._enqueue(key, 0.0)
            if wrong:
                self._telemetry.disagreed(kind.name, len(wrong))
            count += len(wrong)
        keys = self._index.keys()
        self._telemetry.policies.set(len(keys))
        for key in keys:
            self._enqueue(key, RESYNC_SECONDS * self._random())
        if count:
            self._distrust()
        return count

    async def _list(self, kind: Kind) -> list[Object]:
        selector = "" if kind is POLICY else SELECTOR
        return [body for namespace in self._namespaces for body in await self._api.list(kind, namespace, selector)]

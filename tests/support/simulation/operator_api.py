"""The operator's seam to the API server: `Api` over the simulated network, and the watches that kopf keeps for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, TypeVar

import msgspec
from kvsteward_operator import errors
from kvsteward_operator.api import FIELD_MANAGER
from kvsteward_operator.kinds import POLICY, Kind
from kvsteward_operator.watches import INACTIVITY_SECONDS, SERVER_SECONDS

from .api_server import HOST, ApiRefusal, ApiServer
from .network import Network, Stream

NAME = "operator"
Object = dict[str, Any]
Result = TypeVar("Result")

CALL_SECONDS = 20.0  # the operator's own limit on a call
BOOKMARK_SECONDS = 60.0  # the API server's


class OperatorApi:
    """Each call takes its way to the server and back; either may be cut, and a crash may come in between."""

    def __init__(self, network: Network, server: ApiServer) -> None:
        self._network, self._server = network, server
        self.last_writes = 0  # after so many more writes `crash` is called; 0 = never
        self.crash: Callable[[], None] = lambda: None

    async def get(self, kind: Kind, namespace: str, name: str) -> Object:
        def read() -> Object:
            if (found := self._server.find(kind.name, name, namespace)) is None:
                raise ApiRefusal(404, "NotFound", f"{kind.name} {name} not found")
            return found

        return await self._call(read)

    async def list(self, kind: Kind, namespace: str | None, selector: str = "") -> list[Object]:
        return await self._call(lambda: [body for body in self._server.all(kind.name) if selected(body, selector)])

    async def apply(self, kind: Kind, body: Object, *, force: bool, dry_run: bool = False) -> Object:
        return await self._call(lambda: self._server.apply(body, FIELD_MANAGER, force, dry_run), writes=not dry_run)

    async def create(self, kind: Kind, body: Object) -> None:
        await self._call(lambda: self._server.create(body, FIELD_MANAGER), writes=True)

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        try:
            await self._call(lambda: self._server.delete(kind.name, name, namespace, uid), writes=True)
        except (errors.NotFound, errors.Conflict):
            return

    async def replace_status(self, namespace: str, name: str, resource_version: str, status: Object) -> Object:
        plain = msgspec.json.decode(msgspec.json.encode(status))
        return await self._call(
            lambda: self._server.replace_status(POLICY.name, name, namespace, resource_version, plain), writes=True
        )

    async def replace(self, live: Object, fields: Mapping[str, Any]) -> Object:
        metadata = live["metadata"]

        def change(body: Object) -> None:
            if body["metadata"]["resourceVersion"] != metadata["resourceVersion"]:
                raise ApiRefusal(409, "Conflict", f"{live['kind']} {metadata['name']} has changed")
            for pointer, value in fields.items():
                *parents, last = pointer.strip("/").split("/")
                reduce(lambda part, name: part[name], parents, body)[last] = value

        return await self._call(
            lambda: self._server.edit(live["kind"], metadata["name"], metadata["namespace"], change), writes=True
        )

    async def schema(self, group_version: str) -> Object:
        raise errors.NotFound(404, "the simulation serves no schemas")

    async def _call(self, work: Callable[[], Result], writes: bool = False) -> Result:
        await self._pass()
        try:
            done = work()
            if writes and self.last_writes:
                self.last_writes -= 1
                if not self.last_writes:
                    self.crash()
        except ApiRefusal as refusal:
            await self._pass()
            raise errors.api_error(refusal.status, refusal.reason, str(refusal)) from None
        await self._pass()
        return done

    async def _pass(self) -> None:
        link = self._network.link(NAME, HOST)
        if not link.cut:
            await asyncio.sleep(self._network.latency(NAME, HOST))
        if self._network.link(NAME, HOST).cut:
            await asyncio.sleep(CALL_SECONDS / 2)
            raise errors.Unavailable(0, "the API server did not answer in time")


def selected(body: Object, selector: str) -> bool:
    """A label selector of the form `name=value`, or none."""
    name, _, value = selector.partition("=")
    return not selector or (body["metadata"].get("labels") or {}).get(name) == value


class KopfWatches:
    """What kopf does: list, then watch from there, again after a clean end, from the start after 410, and anew after
    a long silence. A list says what is there, never what has gone."""

    def __init__(
        self,
        network: Network,
        server: ApiServer,
        kinds: tuple[tuple[Kind, str], ...],
        handle: Callable[[Kind, str | None, Object], None],
    ) -> None:
        self._network, self._server, self._handle = network, server, handle
        self.tasks = [asyncio.get_running_loop().create_task(self._follow(*one)) for one in kinds]

    def stop(self) -> None:
        for task in self.tasks:
            task.cancel()

    async def _follow(self, kind: Kind, selector: str) -> None:
        api = OperatorApi(self._network, self._server)
        while True:
            try:
                listed, version = await api._call(lambda: self._server.list(kind.name))
                for body in listed:
                    if selected(body, selector):
                        self._handle(kind, None, body)
                while True:
                    version = await self._watch(api, kind, selector, version)
            except errors.ApiError:
                await asyncio.sleep(self._network.chance.uniform(0.5, 1.5))

    async def _watch(self, api: OperatorApi, kind: Kind, selector: str, version: int) -> int:
        """Until the server ends the watch, or it is silent for too long. Raises ApiError for 410."""
        stream = Stream(NAME, kind.plural)
        loop = self._network.loop

        def start() -> None:
            self._server.watch(kind.name, "", version, stream)
            loop.call_later(SERVER_SECONDS, stream.close)
            loop.call_later(BOOKMARK_SECONDS, bookmark)

        def bookmark() -> None:
            if not stream.closed:
                self._server.bookmark(stream)
                loop.call_later(BOOKMARK_SECONDS, bookmark)

        await api._call(start)
        self._network.streams.append((NAME, HOST, stream))
        arrived: asyncio.Queue[Any] = asyncio.Queue()
        arrival = 0.0

        def receive(chunk: Any) -> None:
            nonlocal arrival
            arrival = max(arrival + 1e-6, loop.time() + self._network.latency(NAME, HOST))
            loop.call_at(arrival, lambda: None if stream.lost else arrived.put_nowait(chunk))

        stream.attach(receive)
        try:
            while True:
                try:
                    async with asyncio.timeout(INACTIVITY_SECONDS):
                        chunk = await arrived.get()
                except TimeoutError:
                    return version
                if chunk is None or isinstance(chunk, Exception):
                    return version
                event = msgspec.json.decode(chunk)
                body = event["object"]
                if event["type"] == "ERROR":
                    raise errors.Unavailable(410, "too old resource version")
                version = int(body["metadata"]["resourceVersion"])
                if event["type"] == "BOOKMARK":
                    continue
                if selected(body, selector):
                    self._handle(kind, event["type"], body)
        finally:
            stream.closed = True

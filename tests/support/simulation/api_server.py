"""An API server with its storage: objects with versions, list, watch, create, server-side apply, status, deletion.

Objects are kept as JSON bytes, so nobody can change what another one holds. It answers over the simulated network (what
sidecars speak) and, through `OperatorApi`, at the operator's own seam.
"""

from __future__ import annotations

import hashlib
import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
from kvsteward_contract import wire
from kvsteward_contract.policy import InvalidPolicy, decode_spec
from kvsteward_operator.index import Place, place_of
from kvsteward_operator.kinds import BY_NAME, Kind

from .clock import SimulatedLoop
from .network import Reply, Request, Stream

HOST, PORT = "kubernetes", 443
Object = dict[str, Any]

_decode = msgspec.json.Decoder(dict).decode
_encode = msgspec.json.Encoder(order="sorted").encode


class ApiRefusal(Exception):
    """A request that the API server answers with an error."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


@dataclass(frozen=True, slots=True)
class Change:
    version: int
    type: str  # ADDED, MODIFIED or DELETED
    kind: str
    data: bytes  # the object, at this version


@dataclass(slots=True, eq=False)
class Watch:
    kind: str
    name: str  # "" = all
    stream: Stream
    sent: int  # the version up to which the watcher is told


@dataclass(slots=True)
class Stored:
    data: bytes
    applied: dict[str, Object] = field(default_factory=dict)  # manager -> what it last applied

    @property
    def object(self) -> Object:
        return _decode(self.data)


class ApiServer:
    """`changed` hears of every change, at once: for those who look on from outside, not for parts of the system."""

    def __init__(self, loop: SimulatedLoop, chance: random.Random) -> None:
        self.loop, self.chance = loop, chance
        self.version = 100
        self.listeners: list[Callable[[Change], None]] = []
        self._objects: dict[Place, Stored] = {}
        self._made: dict[Place, int] = {}
        self._log: list[Change] = []
        self._compacted = 100  # watches can't start before this version
        self._watches: list[Watch] = []

    # ---- reading, from outside the system

    def find(self, kind: str, name: str, namespace: str) -> Object | None:
        stored = self._objects.get(Place(kind, namespace, name))
        return stored.object if stored is not None else None

    def all(self, kind: str) -> list[Object]:
        return [stored.object for place, stored in sorted(self._objects.items()) if place.kind == kind]

    def places(self) -> Iterator[Place]:
        return iter(sorted(self._objects))

    # ---- storage

    def _commit(self, type_: str, place: Place, body: Object, applied: dict[str, Object] | None = None) -> Object:
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        data = _encode(body)
        if type_ == "DELETED":
            del self._objects[place]
        else:
            known = self._objects.get(place)
            self._objects[place] = Stored(data, applied if applied is not None else known.applied if known else {})
        change = Change(self.version, type_, place.kind, data)
        self._log.append(change)
        for watch in list(self._watches):
            if watch.stream.closed:
                self._watches.remove(watch)
            elif watch.kind == place.kind and watch.name in ("", place.name):
                watch.sent = change.version
                watch.stream.send(_event(change))
        for listener in self.listeners:
            listener(change)
        return _decode(data)

    def _write(self, place: Place, body: Object, applied: dict[str, Object] | None = None) -> Object:
        """Stores a changed object, or nothing when it isn't changed."""
        known = self._objects[place]
        before = known.object
        body["metadata"] = {**body["metadata"], "resourceVersion": before["metadata"]["resourceVersion"]}
        if body == before:
            if applied is not None:
                known.applied = applied
            return before
        if body.get("spec") != before.get("spec"):
            body["metadata"]["generation"] = before["metadata"].get("generation", 1) + 1
        return self._commit("MODIFIED", place, body, applied)

    def create(self, body: Object, manager: str = "kubectl") -> Object:
        place = place_of(body)
        if place in self._objects:
            raise ApiRefusal(409, "AlreadyExists", f"{place.kind} {place.name} already exists")
        self._admit(body)
        body = _decode(_encode(body))
        body["metadata"] |= {
            "uid": self._uid(place),
            "generation": 1,
            "creationTimestamp": _time(self.loop.unix()),
        }
        return self._commit("ADDED", place, body)

    def _uid(self, place: Place) -> str:
        """The same in every run, so that ends can be compared; another one for each object that has the name."""
        self._made[place] = self._made.get(place, 0) + 1
        digest = hashlib.sha256(f"{'/'.join(place)} {self._made[place]}".encode()).hexdigest()
        return str(uuid.UUID(digest[:32]))

    def apply(self, body: Object, manager: str, force: bool = True, dry_run: bool = False) -> Object:
        """Server-side apply. Lists are taken as a whole; `force` False conflicts with other appliers only."""
        place = place_of(body)
        known = self._objects.get(place)
        if known is None:
            self._admit(body)
            if dry_run:
                return _decode(_encode(body))
            created = self.create(body, manager)
            self._objects[place].applied = {manager: _decode(_encode(body))}
            return created
        if (wanted := body["metadata"].get("uid")) and wanted != known.object["metadata"]["uid"]:
            raise ApiRefusal(409, "Conflict", f"{place.kind} {place.name} has another uid")
        merged: Object = _merge(_prune(known.object, known.applied.get(manager, {}), body), body)
        self._admit(merged)
        if dry_run:
            return merged
        return self._write(place, merged, {**known.applied, manager: _decode(_encode(body))})

    def edit(self, kind: str, name: str, namespace: str, change: Callable[[Object], None]) -> Object:
        """What `kubectl edit` or a controller does: read, change, replace. The status of a policy stays as it is."""
        place = Place(kind, namespace, name)
        if (known := self._objects.get(place)) is None:
            raise ApiRefusal(404, "NotFound", f"{kind} {name} not found")
        body = known.object
        change(body)
        self._admit(body)
        return self._write(place, body)

    def replace_status(self, kind: str, name: str, namespace: str, version: str, status: Object) -> Object:
        place = Place(kind, namespace, name)
        if (known := self._objects.get(place)) is None:
            raise ApiRefusal(404, "NotFound", f"{kind} {name} not found")
        body = known.object
        if body["metadata"]["resourceVersion"] != version:
            raise ApiRefusal(409, "Conflict", f"{kind} {name} has changed")
        body["status"] = status
        return self._write(place, body)

    def delete(self, kind: str, name: str, namespace: str, uid: str = "") -> None:
        """At once, dependents too: collecting garbage takes no time here."""
        place = Place(kind, namespace, name)
        if (known := self._objects.get(place)) is None:
            raise ApiRefusal(404, "NotFound", f"{kind} {name} not found")
        body = known.object
        if uid and body["metadata"]["uid"] != uid:
            raise ApiRefusal(409, "Conflict", f"{kind} {name} has another uid")
        self._commit("DELETED", place, body)
        gone = body["metadata"]["uid"]
        for other in list(self._objects):
            stored = self._objects.get(other)
            if stored is None:
                continue
            owners = stored.object["metadata"].get("ownerReferences") or []
            if any(owner["uid"] == gone for owner in owners):
                self.delete(other.kind, other.name, other.namespace)

    def list(self, kind: str, name: str = "") -> tuple[list[Object], int]:
        return [item for item in self.all(kind) if name in ("", item["metadata"]["name"])], self.version

    def watch(self, kind: str, name: str, version: int, stream: Stream) -> None:
        """Sends what happened since `version`, then what happens. 410 when that is too long ago."""
        if version < self._compacted:
            raise ApiRefusal(410, "Expired", "too old resource version")
        watch = Watch(kind, name, stream, version)
        self._watches.append(watch)
        for change in self._log:
            if change.version <= version or change.kind != kind:
                continue
            if name in ("", _decode(change.data)["metadata"]["name"]):
                watch.sent = change.version
                stream.send(_event(change))

    # ---- what can go wrong

    def compact(self) -> None:
        """Forgets history: watches that start again from before now get 410."""
        self._compacted = self.version
        self._log.clear()

    def end_watches(self, expired: bool) -> None:
        """Ends every watch, cleanly, or with an ERROR event 410."""
        for watch in self._watches:
            if expired:
                watch.stream.send(_line("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"}))
            watch.stream.close()
        self._watches.clear()

    # ---- over the network

    async def handle(self, request: Request) -> Reply:
        parts = request.path.strip("/").split("/")
        try:
            kind = _kind_of(request.path)
            place = parts[parts.index(kind.plural) + 1 :]
            if request.method != "GET" or place:
                raise ApiRefusal(405, "MethodNotAllowed", f"{request.method} {request.path}")
            selector = request.query.get("fieldSelector", "").replace("%3D", "=")
            name = selector.removeprefix("metadata.name=") if selector else ""
            if request.query.get("watch"):
                return self._start_watch(kind, name, request)
            items, version = self.list(kind.name, name)
            return Reply(200, _encode({"items": items, "metadata": {"resourceVersion": str(version)}}))
        except ApiRefusal as refusal:
            body = {"kind": "Status", "code": refusal.status, "reason": refusal.reason, "message": str(refusal)}
            return Reply(refusal.status, _encode(body))

    def _start_watch(self, kind: Kind, name: str, request: Request) -> Reply:
        stream = Stream(request.source, f"{kind.plural}/{name}")
        version = int(request.query.get("resourceVersion") or 0) or self.version
        self.watch(kind.name, name, version, stream)
        if seconds := request.query.get("timeoutSeconds"):
            self.loop.call_later(int(seconds), self._finish_watch, stream)
        return Reply(200, stream=stream)

    def bookmark(self, stream: Stream) -> None:
        """Tells a watcher that it has missed nothing."""
        for watch in self._watches:
            if watch.stream is stream:
                stream.send(_line("BOOKMARK", {"kind": watch.kind, "metadata": {"resourceVersion": str(self.version)}}))

    def _finish_watch(self, stream: Stream) -> None:
        self.bookmark(stream)
        self._watches = [watch for watch in self._watches if watch.stream is not stream]
        stream.close()

    def _admit(self, body: Object) -> None:
        """The CRD's schema and CEL rules stand in the contract's types; other kinds are not checked."""
        if body["kind"] == wire.KIND:
            try:
                decode_spec(body["spec"])
            except InvalidPolicy as error:
                raise ApiRefusal(422, "Invalid", str(error)) from None


def _kind_of(path: str) -> Kind:
    plurals = set(path.split("/"))
    for kind in BY_NAME.values():
        if kind.plural in plurals:
            return kind
    raise ApiRefusal(404, "NotFound", path)


def _line(type_: str, body: Object) -> bytes:
    return _encode({"type": type_, "object": body}) + b"\n"


def _event(change: Change) -> bytes:
    return b'{"type":"%b","object":%b}\n' % (change.type.encode(), change.data)


def _time(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _merge(live: Any, applied: Any) -> Any:
    if isinstance(live, dict) and isinstance(applied, dict):
        return {**live, **{name: _merge(live.get(name), value) for name, value in applied.items()}}
    return applied


def _prune(live: Any, before: Any, now: Any) -> Any:
    """`live` without what its manager applied before and doesn't any more."""
    if not (isinstance(live, dict) and isinstance(before, dict)):
        return live
    now = now if isinstance(now, dict) else {}
    return {
        name: _prune(value, before.get(name), now.get(name))
        for name, value in live.items()
        if name not in before or name in now
    }

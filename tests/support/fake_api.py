"""An API server in memory, as far as the operator can tell: versions, uids, server-side apply, status, deletion.

`watchers` get every change as (type, object); `fail` may raise in place of any call; `calls` is what was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from kvsteward_operator import errors
from kvsteward_operator.api import Object
from kvsteward_operator.index import Place, place_of
from kvsteward_operator.kinds import POLICY, Kind

Watcher = Callable[[str, Object], None]


@dataclass
class FakeApi:
    clock: Callable[[], float] = lambda: 0.0
    objects: dict[Place, Object] = field(default_factory=dict)
    watchers: list[Watcher] = field(default_factory=list)
    calls: list[tuple[str, str, str]] = field(default_factory=list)  # verb, kind, name
    fail: Callable[[str, str, str], None] = lambda verb, kind, name: None
    refuse: Callable[[Object], str | None] = lambda body: None  # validation: why an applied object is not taken
    _applied: dict[str, Object] = field(default_factory=dict)  # by uid: what the operator last applied
    _version: int = 100
    _uids: int = 0

    @property
    def writes(self) -> list[tuple[str, str, str]]:
        return [call for call in self.calls if call[0] not in ("get", "list")]

    # What the operator asks for: the `Api` protocol.
    async def get(self, kind: Kind, namespace: str, name: str) -> Object:
        self._called("get", kind.name, name)
        return deepcopy(self._there(Place(kind.name, namespace, name)))

    async def list(self, kind: Kind, namespace: str | None, selector: str = "") -> list[Object]:
        self._called("list", kind.name, "")
        wanted = dict(term.split("=", 1) for term in selector.split(",") if term)
        return [
            deepcopy(body)
            for place, body in sorted(self.objects.items())
            if place.kind == kind.name
            and namespace in (None, place.namespace)
            and wanted.items() <= (body["metadata"].get("labels") or {}).items()
        ]

    async def apply(self, kind: Kind, body: Object, *, force: bool, dry_run: bool = False) -> Object:
        place = place_of(body)
        self._called("dry-run" if dry_run else "apply", kind.name, place.name)
        if why := self.refuse(body):
            raise errors.Refused(422, f"{place.name} is invalid: {why}")
        live = self.objects.get(place)
        asked = body["metadata"].get("uid")
        if asked is not None and (live is None or live["metadata"]["uid"] != asked):
            raise errors.Conflict(409, f"{place.name}: uid mismatch")
        if live is None:
            return deepcopy(body) if dry_run else self.put(deepcopy(body), applied=True)
        before = self._applied.get(live["metadata"]["uid"])
        if before is None and not force and _conflicts(body, live):
            raise errors.Conflict(409, f"{place.name}: conflicts with another manager")
        merged = _merge(_without(deepcopy(live), before or {}, body), deepcopy(body))
        return merged if dry_run else self.put(merged, applied=True, desired=body)

    async def create(self, kind: Kind, body: Object) -> None:
        self._called("create", kind.name, body["metadata"]["name"])
        if place_of(body) in self.objects:
            raise errors.AlreadyExists(409, f"{body['metadata']['name']} already exists")
        self.put(deepcopy(body))

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        self._called("delete", kind.name, name)
        live = self.objects.get(Place(kind.name, namespace, name))
        if live is not None and live["metadata"]["uid"] == uid:
            self.remove(live)

    async def replace_status(self, namespace: str, name: str, resource_version: str, status: Object) -> Object:
        self._called("status", POLICY.name, name)
        live = self._there(Place(POLICY.name, namespace, name))
        if live["metadata"]["resourceVersion"] != resource_version:
            raise errors.Conflict(409, f"{name}: resourceVersion is another one by now")
        return self.put({**deepcopy(live), "status": deepcopy(status)})

    async def replace(self, live: Object, fields: Mapping[str, Any]) -> Object:
        place = place_of(live)
        self._called("replace", place.kind, place.name)
        body = deepcopy(self._there(place))
        if body["metadata"]["resourceVersion"] != live["metadata"]["resourceVersion"]:
            raise errors.Conflict(409, f"{place.name}: resourceVersion is another one by now")
        for path, value in fields.items():
            *parents, last = path[1:].split("/")
            holder = body
            for name in parents:
                holder = holder[name]
            holder[last] = deepcopy(value)
        return self.put(body)

    async def schema(self, group_version: str) -> Object:
        raise errors.NotFound(404, group_version)

    # What everybody else does.
    def put(self, body: Object, *, applied: bool = False, desired: Object | None = None) -> Object:
        """Creates or replaces an object, as a user or a controller would. Returns what is stored."""
        place = place_of(body)
        live = self.objects.get(place)
        metadata = body["metadata"]
        if live is None:
            self._uids += 1
            metadata["uid"] = metadata.get("uid") or f"uid-{self._uids}"
            metadata["generation"] = 1
        else:
            metadata["uid"] = live["metadata"]["uid"]
            changed = live.get("spec") != body.get("spec")
            metadata["generation"] = live["metadata"].get("generation", 1) + changed
        if applied:
            self._applied[metadata["uid"]] = deepcopy(desired if desired is not None else body)
        if live is not None and _bare(live) == _bare(body):
            return deepcopy(live)  # nothing changed: no new version, no watch event
        self._version += 1
        metadata["resourceVersion"] = str(self._version)
        self.objects[place] = body
        self._tell("MODIFIED" if live is not None else "ADDED", body)
        return deepcopy(body)

    def remove(self, body: Object) -> None:
        self._version += 1
        gone = deepcopy(self.objects.pop(place_of(body)))
        gone["metadata"]["resourceVersion"] = str(self._version)
        self._tell("DELETED", gone)

    def find(self, kind: str, name: str, namespace: str = "serving") -> Object | None:
        found = self.objects.get(Place(kind, namespace, name))
        return deepcopy(found) if found is not None else None

    def of_kind(self, kind: str) -> list[Object]:
        return [deepcopy(body) for place, body in sorted(self.objects.items()) if place.kind == kind]

    def collect_garbage(self) -> None:
        """Deletes what belongs to an owner that has gone, as the garbage collector does, in any number of steps."""
        while orphans := [body for body in self.objects.values() if self._orphaned(body)]:
            for body in orphans:
                self.remove(body)

    def _orphaned(self, body: Object) -> bool:
        owners = body["metadata"].get("ownerReferences") or []
        uids = {other["metadata"]["uid"] for other in self.objects.values()}
        return bool(owners) and not any(owner["uid"] in uids for owner in owners)

    def _there(self, place: Place) -> Object:
        if place not in self.objects:
            raise errors.NotFound(404, f"{place.kind} {place.name} not found")
        return self.objects[place]

    def _called(self, verb: str, kind: str, name: str) -> None:
        self.calls.append((verb, kind, name))
        self.fail(verb, kind, name)

    def _tell(self, change: str, body: Object) -> None:
        for watcher in list(self.watchers):
            watcher(change, deepcopy(body))


def _bare(body: Object) -> Object:
    metadata = {name: value for name, value in body["metadata"].items() if name != "resourceVersion"}
    return {**body, "metadata": metadata}


def _named(items: Any) -> bool:
    return bool(items) and isinstance(items, list) and all(isinstance(item, dict) and "name" in item for item in items)


def _merge(live: Any, desired: Any) -> Any:
    """What an apply sets, set; lists of named items are merged by name, other lists replaced."""
    if isinstance(live, dict) and isinstance(desired, dict):
        return {**live, **{name: _merge(live.get(name), value) for name, value in desired.items()}}
    if _named(live) and _named(desired):
        by_name = {item["name"]: item for item in live}
        mine = {item["name"] for item in desired}
        merged = [_merge(by_name.get(item["name"]), item) for item in desired]
        return merged + [item for item in live if item["name"] not in mine]
    return desired


def _without(live: Any, before: Any, desired: Any) -> Any:
    """`live` without what was applied before and is applied no more."""
    if isinstance(live, dict) and isinstance(before, dict) and isinstance(desired, dict):
        return {
            name: _without(value, before.get(name), desired.get(name))
            for name, value in live.items()
            if name not in before or name in desired
        }
    if _named(live) and _named(before) and _named(desired):
        then, now = ({item["name"]: item for item in items} for items in (before, desired))
        return [
            _without(item, then.get(item["name"]), now.get(item["name"]))
            for item in live
            if item["name"] not in then or item["name"] in now
        ]
    return live


def _conflicts(desired: Any, live: Any) -> bool:
    """Whether both set a field, to different values."""
    if isinstance(desired, dict) and isinstance(live, dict):
        return any(name in live and _conflicts(value, live[name]) for name, value in desired.items())
    return bool(desired != live)

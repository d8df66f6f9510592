"""The operator's picture of the cluster: the policies and their objects as last seen.

Fed by watch events, by lists and by the answers to the operator's own writes; whichever is newest wins.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from kvsteward_contract import wire

from .api import Object
from .kinds import POLICY

REMEMBERED = 4096  # deletions


class Key(NamedTuple):
    """One policy."""

    namespace: str
    name: str


class Place(NamedTuple):
    """Where an object is. At most one object is in a place at a time."""

    kind: str
    namespace: str
    name: str


def place_of(body: Object) -> Place:
    metadata = body["metadata"]
    return Place(body["kind"], metadata["namespace"], metadata["name"])


def policy_of(body: Object) -> Key | None:
    """The policy that an object belongs to, by its label; a policy belongs to itself."""
    metadata = body["metadata"]
    if body["kind"] == POLICY.name:
        return Key(metadata["namespace"], metadata["name"])
    name = (metadata.get("labels") or {}).get(wire.POLICY_LABEL)
    return Key(metadata["namespace"], name) if name else None


def version_of(body: Object) -> int:
    """A resourceVersion is a number that grows with every change (KEP-5504)."""
    return int(body["metadata"].get("resourceVersion") or 0)


class Index:
    """Objects by place, and the places of each policy."""

    def __init__(self) -> None:
        self._objects: dict[Place, Object] = {}
        self._places: dict[Key, set[Place]] = {}
        self._gone: dict[str, None] = {}  # uids of what was deleted, newest last: none of them ever comes back

    def put(self, body: Object) -> bool:
        """Takes an object in, unless what is there is as new or it was deleted since (an answer or a list may be
        overtaken by the watch). True if the picture changed."""
        if body["metadata"].get("uid") in self._gone:
            return False
        key, place = policy_of(body), place_of(body)
        known = self._objects.get(place)
        if known is not None and version_of(known) >= version_of(body):
            return False
        if known is not None and (before := policy_of(known)) is not None and before != key:
            self._places[before].discard(place)
        if key is None:  # the label was taken off: it isn't one of ours any more
            self._objects.pop(place, None)
            return known is not None
        self._objects[place] = body
        self._places.setdefault(key, set()).add(place)
        return True

    def remove(self, body: Object) -> bool:
        """Forgets an object that was deleted. True if it was there and not already replaced by another one."""
        place = place_of(body)
        known = self._objects.get(place)
        self._bury(body["metadata"].get("uid") or "")
        if known is None or known["metadata"].get("uid") != body["metadata"].get("uid"):
            return False
        del self._objects[place]
        if (key := policy_of(known)) is not None and (places := self._places.get(key)) is not None:
            places.discard(place)
            if not places:
                del self._places[key]
        return True

    def _bury(self, uid: str) -> None:
        self._gone[uid] = None
        while len(self._gone) > REMEMBERED:
            del self._gone[next(iter(self._gone))]

    def get(self, place: Place) -> Object | None:
        return self._objects.get(place)

    def policy(self, key: Key) -> Object | None:
        return self._objects.get(Place(POLICY.name, key.namespace, key.name))

    def children(self, key: Key) -> list[Object]:
        """What carries the policy's label, in a fixed order."""
        return [self._objects[place] for place in sorted(self._places.get(key, ())) if place.kind != POLICY.name]

    def keys(self) -> list[Key]:
        """Every policy."""
        return [Key(place.namespace, place.name) for place in self._objects if place.kind == POLICY.name]

    def objects(self, kind: str) -> Iterator[Object]:
        return (body for place, body in list(self._objects.items()) if place.kind == kind)

    def compare(self, kind: str, listed: Iterable[Object], seen_before: Mapping[Place, int]) -> list[Object]:
        """Puts the picture right from a list of one kind; returns what it had wrong.

        Call it a few seconds after the list was made, so that a watch that is merely slower than the list has caught
        up. `seen_before`: what the index held when the list was asked for.
        """
        there = {place_of(body): body for body in listed}
        wrong = [body for body in there.values() if self.put(body)]
        for place in [place for place in self._objects if place.kind == kind and place not in there]:
            body = self._objects[place]
            if seen_before.get(place) == version_of(body) and self.remove(body):
                wrong.append(body)
        return wrong

    def versions(self, kind: str) -> dict[Place, int]:
        return {place: version_of(body) for place, body in self._objects.items() if place.kind == kind}

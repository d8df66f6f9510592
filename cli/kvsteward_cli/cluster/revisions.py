"""Specs accepted earlier, from the ControllerRevisions that the operator keeps, and what going back would change. Pure.

What a rollback leaves alone is what other hands hold: replicas belong to autoscalers; kill switch, pause and attempt to
the person on call, who must not release a switch by going back to a spec from before it was pulled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from kvsteward_contract.policy import Stage

Object = dict[str, Any]
KEPT = (("engine", "replicas"), ("rollout", "killSwitch"), ("rollout", "progress"), ("rollout", "attempt"))
# What pods are made from: a change below these replaces them.
POD_FIELDS = ("engine.", "cache.", "scopes.identity.secret", "scopes.identity.gatewaySecret", "rollover.drainSeconds")


@dataclass(frozen=True, slots=True)
class Revision:
    """One accepted spec, without the fields at their defaults."""

    number: int
    spec: Object
    created: str  # when it was first accepted
    image: str


@dataclass(frozen=True, slots=True)
class Change:
    """A field of the spec by its path; None for absent."""

    field: str
    before: Any
    after: Any

    @property
    def text(self) -> str:
        return f"{self.field}: {worded(self.before)} -> {worded(self.after)}"


def revisions_of(policy: Object, bodies: Sequence[Object]) -> list[Revision]:
    """Newest first; of this very policy, not of an earlier one of its name."""
    uid = policy["metadata"]["uid"]
    found = []
    for body in bodies:
        owners = body["metadata"].get("ownerReferences") or ()
        data = body.get("data")
        if isinstance(data, dict) and isinstance(data.get("spec"), dict) and any(o["uid"] == uid for o in owners):
            created = body["metadata"].get("creationTimestamp") or ""
            found.append(Revision(int(body.get("revision") or 0), data["spec"], created, data.get("engineImage", "")))
    return sorted(found, key=lambda one: one.number, reverse=True)


def proposed(live: Object, revision: Revision) -> Object:
    """The spec to send for a return to `revision`."""
    spec = deepcopy(revision.spec)
    for part, name in KEPT:
        inner = spec.setdefault(part, {})
        inner.pop(name, None)
        if name in (live.get(part) or {}):
            inner[name] = live[part][name]
    return spec


def differences(before: Any, after: Any, path: str = "") -> Iterator[Change]:
    """Leaf by leaf; a list is a leaf. Both with their defaults filled in, as the API server gives them."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            yield from differences(before.get(name), after.get(name), f"{path}.{name}" if path else name)
    elif before != after:
        yield Change(path, before, after)


def notes(changes: Sequence[Change]) -> list[str]:
    """What the changes mean for those who wait for them."""
    found = []
    if any(change.field.startswith(POD_FIELDS) for change in changes):
        found.append("pods are replaced for this, one after the other; their cache begins empty")
    stages = Stage._value2member_map_
    for change in changes:
        raised = change.field == "rollout.stage" and change.before in stages and change.after in stages
        if raised and Stage(change.after).rank > Stage(change.before).rank:
            found.append(f"this raises the stage, from {change.before} to {change.after}")
    return found


def worded(value: Any) -> str:
    """A value of the spec in a table."""
    if value is None:
        return "(none)"
    return value if isinstance(value, str) and value else json.dumps(value, separators=(",", ":"))

"""ControllerRevisions: the specs that were accepted, with what was decided for each then.

The newest one is what holds while the resource's own spec is rejected. It keeps the rendered pod template too, so that
an operator that renders differently restarts nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from kvsteward_contract.policy import InvalidPolicy, PolicySpec, decode_spec

from .naming import Owner

KEPT = 10


class RevisionData(msgspec.Struct, frozen=True, rename="camel"):
    """`data` of a ControllerRevision; can't be changed once stored."""

    spec: dict[str, Any]
    spec_digest: str
    cohort_digest: str
    template_digest: str
    generation: str
    engine_image: str
    template: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Revision:
    """One accepted spec. `number` grows with each acceptance, also when an earlier spec is accepted again."""

    name: str
    number: int
    data: RevisionData
    spec: PolicySpec


def revision_name(owner: Owner, digest: str) -> str:
    return f"{owner.name}-{digest[:10]}"


def revision(owner: Owner, data: RevisionData, number: int) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": owner.metadata(revision_name(owner, data.spec_digest)),
        "revision": number,
        "data": msgspec.to_builtins(data),
    }


def read_revisions(bodies: Iterable[dict[str, Any]]) -> list[Revision]:
    """Oldest first. One that can't be read, by a much older or newer operator, is passed over."""
    found = []
    for body in bodies:
        try:
            data = msgspec.convert(body.get("data"), RevisionData)
            spec = decode_spec(data.spec)
        except (msgspec.ValidationError, InvalidPolicy):
            continue
        found.append(Revision(body["metadata"]["name"], int(body.get("revision") or 0), data, spec))
    return sorted(found, key=lambda one: one.number)

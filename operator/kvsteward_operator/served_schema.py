"""Whether the CRD in the cluster is the one this operator was made for.

Fields that only the CRD knows would be accepted and then ignored; fields that only the operator knows would be dropped,
in the status too, where its memory is. So it refuses to start on either. Read from the API server's OpenAPI document,
which every client may read: no right on CustomResourceDefinitions is needed.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from kvsteward_contract import wire
from kvsteward_contract.crd import crd

from . import errors
from .api import Api


class UnknownSchema(Exception):
    """The operator can't start on what is served; the text says what to do."""


async def check_schema(api: Api) -> None:
    """Raises UnknownSchema, or ApiError when the API server can't be asked."""
    try:
        served = await api.schema(wire.API_VERSION)
    except errors.NotFound:
        raise UnknownSchema(
            f"the cluster has no {wire.KIND} in {wire.API_VERSION}: kubectl apply -f crds/ of this version first"
        ) from None
    known = fields(crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    there = fields(served_kind(served))
    if newer := sorted(there - known):
        raise UnknownSchema(
            f"the CRD in the cluster has fields that this operator doesn't know ({newer[0]}): upgrade the operator"
        )
    if older := sorted(known - there):
        raise UnknownSchema(
            f"the CRD in the cluster lacks fields of this operator ({older[0]}): kubectl apply -f crds/ of its version"
        )


def served_kind(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of the policy in an OpenAPI v3 document. Raises UnknownSchema."""
    for schema in document.get("components", {}).get("schemas", {}).values():
        kinds = schema.get("x-kubernetes-group-version-kind") or ()
        if any(kind.get("kind") == wire.KIND for kind in kinds):
            return dict(schema)
    raise UnknownSchema(f"the API server does not say what {wire.KIND} looks like yet: try again in a few seconds")


def fields(schema: Mapping[str, Any]) -> set[str]:
    """Paths of all fields of spec and status."""
    properties = schema.get("properties", {})
    return {path for part in ("spec", "status") for path in _paths(properties.get(part, {}), part)}


def _paths(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    yield path
    for name, inner in schema.get("properties", {}).items():
        yield from _paths(inner, f"{path}.{name}")
    for inner in (schema.get("items"), schema.get("additionalProperties")):
        if isinstance(inner, Mapping):
            yield from _paths(inner, f"{path}[]")

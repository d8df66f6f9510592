"""Where a run has come to, without what must differ between two runs: versions, times, names of pods, counts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvsteward_contract import wire

from .api_server import ApiServer
from .nodes import Nodes

_PASSING = ("Event", "Pod", "ReplicaSet", "ControllerRevision", "Secret")
_COUNTED = ("uid", "resourceVersion", "generation", "creationTimestamp")


@dataclass(frozen=True, slots=True)
class EndState:
    """One line for each value: where it stands, and what it is. The lines of pods are counted, not numbered."""

    lines: tuple[str, ...]

    def difference(self, expected: EndState) -> str:
        """What is here and not expected (+), and the other way round (-)."""
        here, there = Counter(self.lines), Counter(expected.lines)
        missing = [f"- {line}" for line in sorted((there - here).elements())]
        return "\n" + "\n".join(missing + [f"+ {line}" for line in sorted((here - there).elements())])


def end_state(api: ApiServer, nodes: Nodes) -> EndState:
    lines: list[str] = []
    for place in api.places():
        if place.kind in _PASSING:
            continue
        body = api.find(place.kind, place.name, place.namespace)
        if body is not None:
            plain = _policy(body) if place.kind == wire.KIND else _plain(body)
            lines += _flat(plain, f"{place.kind}/{place.name}")
    revisions = sorted(api.all("ControllerRevision"), key=lambda body: body["revision"])
    lines += [f"newest revision: {body['metadata']['name']}" for body in revisions[-1:]]
    for pod in _pods(nodes):
        lines += _flat(pod, "a pod")
    return EndState(tuple(sorted(lines)))


def _flat(value: Any, where: str) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from _flat(part, f"{where}.{name}")
    elif isinstance(value, (list, tuple)) and value:
        for number, part in enumerate(value):
            yield from _flat(part, f"{where}[{number}]")
    elif isinstance(value, str) and value.startswith("{"):
        yield from _flat(json.loads(value), where)
    else:
        yield f"{where}: {value!r}"


def _plain(body: dict[str, Any]) -> dict[str, Any]:
    metadata = {name: value for name, value in body["metadata"].items() if name not in _COUNTED}
    status = {} if body["kind"] != "Deployment" else {"status": body.get("status")}
    plain = {name: value for name, value in body.items() if name not in ("metadata", "status")}
    if (observed := status.get("status")) is not None:
        status = {"status": {name: value for name, value in observed.items() if name != "observedGeneration"}}
    return plain | {"metadata": metadata} | status


def _policy(body: dict[str, Any]) -> dict[str, Any]:
    status = body.get("status") or {}
    generations = [
        {name: one.get(name) for name in ("name", "policyVersion", "state", "stage", "canaryPercent", "replicas",
                                          "acknowledgedReplicas", "image", "modelRevision")}
        for one in status.get("generations") or []
    ]  # fmt: skip
    conditions = {
        one["type"]: one["status"] if one["type"] == "ColdPath" else f"{one['status']} {one['reason']}"
        for one in status.get("conditions") or []
    }
    kept = {name: status.get(name) for name in ("endpoint", "selector", "stage", "canaryPercent", "replicas", "image")}
    return {
        "spec": body["spec"],
        "status": kept | {"generations": generations, "conditions": conditions, "capacity": status.get("capacity")},
        "observed": status.get("observedGeneration") == body["metadata"]["generation"],
    }


def _pods(nodes: Nodes) -> Iterator[dict[str, Any]]:
    for pod in nodes.pods.values():
        if pod.sidecar is None or pod.engine is None:
            yield {"lacks": "a container"}
            continue
        control = pod.sidecar.control
        permission = control.permission
        engine = pod.engine.engine.residency.policy
        yield {
            "ready": pod.ready,
            "going": pod.name in nodes.going,
            "revision": pod.engine.revision,
            "version": permission.version,
            "stage": permission.stage.value,
            "stopped": permission.stopped,
            "latch": permission.latch,
            "canary": permission.canary_percent,
            "problems": control.problems(),
            "acknowledged": control.link.acknowledged,
            "engine follows": engine.epoch == permission.epoch and engine.version == permission.version,
            "retention": sorted(repr(limits) for limits in engine.retention.values()),
        }

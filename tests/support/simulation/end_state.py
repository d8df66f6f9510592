"""Where a run has come to, without what must differ between two runs: versions, times, names of pods, counts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec
from kvsteward_contract import wire

from .api_server import ApiServer
from .nodes import Nodes

_PASSING = ("Event", "Pod", "ReplicaSet", "ControllerRevision", "Secret")
_COUNTED = ("uid", "resourceVersion", "generation", "creationTimestamp")


@dataclass(frozen=True, slots=True)
class EndState:
    """`objects`: by kind and name, as JSON; `pods`: one line each, sorted."""

    objects: tuple[tuple[str, str], ...]
    pods: tuple[str, ...]

    def difference(self, expected: EndState) -> str:
        """What is here and not expected (+), and the other way round (-)."""
        here = {*(" ".join(one) for one in self.objects), *self.pods}
        there = {*(" ".join(one) for one in expected.objects), *expected.pods}
        lines = [f"- {line}" for line in sorted(there - here)] + [f"+ {line}" for line in sorted(here - there)]
        return "\n" + "\n".join(lines) if lines else "other counts of equal pods"


def end_state(api: ApiServer, nodes: Nodes) -> EndState:
    objects = []
    for place in api.places():
        if place.kind in _PASSING:
            continue
        body = api.find(place.kind, place.name, place.namespace)
        if body is not None:
            plain = _policy(body) if place.kind == wire.KIND else _plain(body)
            objects.append((f"{place.kind}/{place.name}", json.dumps(plain, sort_keys=True)))
    revisions = sorted(api.all("ControllerRevision"), key=lambda body: body["revision"])
    if revisions:
        objects.append(("newest revision", revisions[-1]["metadata"]["name"]))
    return EndState(tuple(objects), tuple(sorted(_pods(nodes))))


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


def _pods(nodes: Nodes) -> list[str]:
    found = []
    for pod in nodes.pods.values():
        if pod.sidecar is None or pod.engine is None:
            found.append("a pod without a sidecar or an engine")
            continue
        control = pod.sidecar.control
        permission = control.permission
        engine = pod.engine.engine.residency.policy
        state = {
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
            "retention": msgspec.to_builtins(dict(engine.retention)),
        }
        found.append(json.dumps(state, sort_keys=True))
    return found

"""Deployments come true: what the controllers and the kubelet would make of them, without processes.

`step` does one round: a ReplicaSet a template, pods up to the wanted number, one surge or one drain at a time.
`FakeSidecars` stands in for the pods' sidecars, and for the scraper that asks them.
"""

import hashlib
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import msgspec
from kvsteward_contract import wire
from kvsteward_contract.observation import OBSERVATION_VERSION, Observation
from kvsteward_contract.policy import KillSwitch, Stage
from kvsteward_operator.api import Object
from kvsteward_operator.decide import Scrape
from kvsteward_operator.index import Key
from kvsteward_operator.objects.documents import read_config_map
from kvsteward_operator.world import Report

from .fake_api import FakeApi


@dataclass
class FakeWorkloads:
    """`ready` says which pods become ready; `drain` which terminating pods have gone."""

    api: FakeApi
    ready: Callable[[Object], bool] = lambda pod: True
    drained: Callable[[Object], bool] = lambda pod: True
    _pods: int = 0

    def step(self) -> None:
        for deployment in self.api.of_kind("Deployment"):
            self._roll(deployment)

    def settle(self, rounds: int = 20) -> None:
        for _ in range(rounds):
            self.step()

    def _roll(self, deployment: Object) -> None:
        template, wanted = deployment["spec"]["template"], deployment["spec"]["replicas"]
        current = f"{deployment['metadata']['name']}-{_hash(template)}"
        sets = [body for body in self.api.of_kind("ReplicaSet") if _owned(body, deployment)]
        if current not in {body["metadata"]["name"] for body in sets}:
            sets.append(self._replica_set(deployment, current))
        for pod in self.api.of_kind("Pod"):
            self._progress(pod)
        update = deployment["spec"]["strategy"]["rollingUpdate"]
        pods = {body["metadata"]["name"]: self._pods_of(body) for body in sets}
        alive = [pod for found in pods.values() for pod in found if "deletionTimestamp" not in pod["metadata"]]
        available = sum(is_ready(pod) for pod in alive)
        mine = [pod for pod in alive if _owned_by_name(pod, current)]
        others = [pod for pod in alive if pod not in mine]
        unhealthy = [pod for pod in others if not is_ready(pod)]
        if len(mine) < wanted and len(alive) < wanted + update["maxSurge"]:
            self._pod(next(body for body in sets if body["metadata"]["name"] == current), template)
        elif unhealthy and len(alive) - sum(not is_ready(pod) for pod in mine) > wanted - update["maxUnavailable"]:
            self._delete(unhealthy[0])
        elif others and available > wanted - update["maxUnavailable"]:
            self._delete(others[0])
        elif len(mine) > wanted:
            self._delete(mine[-1])
        for body in sets:
            replicas = (
                wanted
                if body["metadata"]["name"] == current
                else len([pod for pod in self._pods_of(body) if "deletionTimestamp" not in pod["metadata"]])
            )
            self.api.put({**body, "spec": {**body["spec"], "replicas": replicas}})

    def _replica_set(self, deployment: Object, name: str) -> Object:
        return self.api.put(
            {
                "apiVersion": "apps/v1",
                "kind": "ReplicaSet",
                "metadata": {
                    "name": name,
                    "namespace": deployment["metadata"]["namespace"],
                    "labels": dict(deployment["spec"]["template"]["metadata"]["labels"]),
                    "ownerReferences": [_reference(deployment)],
                },
                "spec": {"replicas": deployment["spec"]["replicas"]},
            }
        )

    def _pod(self, owner: Object, template: Object) -> None:
        self._pods += 1
        self.api.put(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": f"{owner['metadata']['name']}-{self._pods}",
                    "namespace": owner["metadata"]["namespace"],
                    "labels": dict(template["metadata"]["labels"]),
                    "ownerReferences": [_reference(owner)],
                },
                "spec": deepcopy(template["spec"]),
                "status": {"phase": "Pending"},
            }
        )

    def _progress(self, pod: Object) -> None:
        if "deletionTimestamp" in pod["metadata"]:
            if self.drained(pod):
                self.api.remove(pod)
            return
        status: dict[str, Any] = {
            "phase": "Running",
            "podIP": f"10.0.0.{int(pod['metadata']['name'].rsplit('-', 1)[1])}",
            "containerStatuses": [{"name": "engine", "state": {"running": {}}}],
            "conditions": [{"type": "Ready", "status": "True" if self.ready(pod) else "False"}],
        }
        self.api.put({**pod, "status": status})

    def _delete(self, pod: Object) -> None:
        self.api.put({**pod, "metadata": {**pod["metadata"], "deletionTimestamp": "2025-01-01T00:00:00Z"}})

    def _pods_of(self, replica_set: Object) -> list[Object]:
        return [pod for pod in self.api.of_kind("Pod") if _owned(pod, replica_set)]


def is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _hash(template: Object) -> str:
    return hashlib.sha256(msgspec.json.encode(template, order="sorted")).hexdigest()[:8]


def _reference(owner: Object) -> dict[str, Any]:
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
    }


def _owned(body: Object, owner: Object) -> bool:
    references = body["metadata"].get("ownerReferences") or []
    return any(reference["uid"] == owner["metadata"]["uid"] for reference in references)


def _owned_by_name(body: Object, name: str) -> bool:
    return any(reference["name"] == name for reference in body["metadata"]["ownerReferences"])


@dataclass
class FakeSidecars:
    """Each pod's sidecar follows its document and the resource at once, unless it is in `deaf` (by pod name)."""

    api: FakeApi
    clock: Callable[[], float] = lambda: 0.0
    deaf: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)  # do not answer scrapes
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)  # fields of the observation, by pod name
    followed: dict[Key, Scrape] = field(default_factory=dict)
    _reports: dict[str, Report] = field(default_factory=dict)

    def follow(self, key: Key, scrape: Scrape) -> None:
        self.followed[key] = scrape

    def reports(self, key: Key) -> Mapping[str, Report]:
        return dict(self._reports)

    def scrape(self) -> None:
        """One round over every pod that is followed."""
        pods = {pod["metadata"]["uid"]: pod for pod in self.api.of_kind("Pod")}
        for key, scrape in self.followed.items():
            for followed in scrape.pods:
                pod = pods.get(followed.uid)
                before = self._reports.get(followed.uid, Report())
                if pod is None or followed.name in self.silent:
                    self._reports[followed.uid] = Report(
                        before.observation, before.failures + 1, "ConnectionRefusedError"
                    )
                elif followed.name not in self.deaf:
                    self._reports[followed.uid] = Report(self._observe(key, pod))

    def _observe(self, key: Key, pod: Object) -> Observation:
        generation = pod["metadata"]["labels"][wire.GENERATION_LABEL]
        document, version = read_config_map(self.api.find("ConfigMap", generation, key.namespace))
        resource = self.api.find(wire.KIND, key.name, key.namespace) or {"spec": {}}
        rollout = resource["spec"].get("rollout", {})
        cold = rollout.get("killSwitch") == KillSwitch.ENGAGED.value
        observation = Observation(
            api_version=OBSERVATION_VERSION,
            start_time=0.0,
            time=self.clock(),
            generation=document.generation if document else "",
            policy_version=version,
            acknowledged_version=version,
            stage=document.rollout.stage if document else Stage.COLD,
            canary_percent=document.rollout.canary.percent if document else 0,
            attempt=1,
            cold_requested=cold,
            cold_confirmed=cold,
            epoch=1,
            engine_epoch=1,
            engine_instance="engine",
            last_match_seconds=0.0,
            in_flight=0,
            resident_pages=0,
            bytes_per_token=11520,
            pool_tokens=65536,
            policy_age_seconds=0.0,
        )
        return msgspec.structs.replace(observation, **self.changes.get(pod["metadata"]["name"], {}))

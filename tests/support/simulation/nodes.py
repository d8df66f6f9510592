"""The rest of a cluster: the Deployment controller, the kubelet and the endpoints, as far as the product can tell.

Rolling updates keep to maxSurge and maxUnavailable; a pod that goes drains by its sidecar first, and is found in the
endpoints for a moment longer, as in real clusters.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from functools import partial
from typing import Any

from kvsteward_sidecar.ticket import Ticket

from .api_server import ApiRefusal, ApiServer, Change
from .pod import Asked, Pod, World

Object = dict[str, Any]
CONTROLLER_SECONDS = 0.05
ENDPOINT_LAG = 1.0  # seconds for which a pod that goes is still sent requests
LOADING = (0.3, 1.5)  # seconds until an engine serves
RESTART_SECONDS = (0.2, 3.0)  # until a killed container is there again


class Nodes:
    """All pods of all Deployments, running or going."""

    def __init__(
        self, world: World, api: ApiServer, admitted: Callable[[Pod, Ticket, Asked], None], namespace: str
    ) -> None:
        self._world, self._api, self._admitted, self._namespace = world, api, admitted, namespace
        self.pods: dict[str, Pod] = {}
        self.going: set[str] = set()
        self.audited: Callable[[Pod], None] = lambda pod: None  # hears of a pod just before it is removed
        self._endpoints: dict[str, Pod] = {}
        self._reported: dict[str, tuple[bool, bool]] = {}
        self._count = 0
        self._due = False
        self._tasks: set[asyncio.Task[None]] = set()
        api.listeners.append(self._changed)
        self._start(self._watch_readiness())

    def endpoints(self) -> list[Pod]:
        """The pods that the Service sends requests to."""
        return list(self._endpoints.values())

    # ---- containers that die

    def restart_sidecar(self, pod: Pod, after: float) -> None:
        pod.kill_sidecar()

        async def again() -> None:
            await asyncio.sleep(after)
            if not pod.gone and pod.sidecar is None:
                pod.start_sidecar()

        self._start(again())

    def restart_engine(self, pod: Pod, after: float) -> None:
        pod.kill_engine()

        async def again() -> None:
            await asyncio.sleep(after)
            if not pod.gone and pod.engine is None:
                pod.start_engine(self._world.chance.uniform(*LOADING))

        self._start(again())

    def delete_pod(self, pod: Pod) -> None:
        """kubectl delete pod."""
        if pod.name not in self.going:
            self._terminate(pod)

    # ---- the Deployment controller

    def _changed(self, change: Change) -> None:
        if change.kind in ("Deployment", "ReplicaSet", "Pod") and not self._due:
            self._due = True
            self._world.loop.call_later(CONTROLLER_SECONDS, self._control)

    def _control(self) -> None:
        self._due = False
        deployments = {body["metadata"]["uid"]: body for body in self._api.all("Deployment")}
        sets = self._api.all("ReplicaSet")
        for body in deployments.values():
            self._control_one(body, [one for one in sets if _owner(one) == body["metadata"]["uid"]])
        wanted = {one["metadata"]["uid"] for one in sets if _owner(one) in deployments}
        for body in self._api.all("Pod"):
            if _owner(body) not in wanted and (pod := self.pods.get(body["metadata"]["name"])) is not None:
                self.delete_pod(pod)
        for pod in list(self.pods.values()):  # collected with its owners
            if pod.name not in self.going and self._api.find("Pod", pod.name, self._namespace) is None:
                self._terminate(pod)

    def _control_one(self, deployment: Object, sets: list[Object]) -> None:
        spec = deployment["spec"]
        template = spec["template"]
        digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:8]
        name = f"{deployment['metadata']['name']}-{digest}"
        if all(one["metadata"]["name"] != name for one in sets):
            self._api.create(_replica_set(deployment, name), "controller")
            return  # comes again for the set just made
        pods = {one["metadata"]["name"]: self._pods_of(one) for one in sets}
        new = pods.pop(name)
        old = [pod for others in pods.values() for pod in others]
        rolling = spec["strategy"]["rollingUpdate"]
        replicas, surge, lacking = spec["replicas"], rolling["maxSurge"], rolling["maxUnavailable"]
        owner = next(one for one in sets if one["metadata"]["name"] == name)
        for pod in new[replicas:]:
            self._terminate(pod)
        new = new[:replicas]
        while len(new) < replicas and len(new) + len(old) < replicas + surge:
            new.append(self._create(owner, template))
        for pod in sorted(old, key=lambda pod: pod.ready):
            available = sum(one.ready for one in [*new, *old])
            if not pod.ready or available - 1 >= replicas - lacking:
                self._terminate(pod)
                old.remove(pod)
        for one in sets:
            count = len(new) if one is owner else len([pod for pod in pods[one["metadata"]["name"]] if pod in old])
            self._edit("ReplicaSet", one["metadata"]["name"], partial(_set_replicas, count))
        self._edit("Deployment", deployment["metadata"]["name"], lambda body: _set_status(body, new, old))

    def _pods_of(self, replica_set: Object) -> list[Pod]:
        """Oldest first, without those that are going."""
        uid = replica_set["metadata"]["uid"]
        named = [body["metadata"]["name"] for body in self._api.all("Pod") if _owner(body) == uid]
        return [self.pods[name] for name in sorted(named) if name in self.pods and name not in self.going]

    def _edit(self, kind: str, name: str, change: Callable[[Object], None]) -> None:
        try:
            self._api.edit(kind, name, self._namespace, change)
        except ApiRefusal:
            return  # deleted meanwhile

    # ---- the kubelet

    def _create(self, replica_set: Object, template: Object) -> Pod:
        self._count += 1
        name = f"{replica_set['metadata']['name']}-{self._count:03d}"
        reference = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": replica_set["metadata"]["name"]}
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": self._namespace,
                "labels": dict(template["metadata"]["labels"]),
                "ownerReferences": [reference | {"uid": replica_set["metadata"]["uid"], "controller": True}],
            },
            "spec": template["spec"],
            "status": {"phase": "Pending"},
        }
        self._api.create(body, "controller")
        pod = Pod(self._world, name, f"10.0.0.{self._count}", template, self._admitted)
        self.pods[name] = pod
        self._world.trace.note(name, "created")
        volumes = template["spec"]["volumes"]
        self._start(self._run(pod, next(one["secret"]["secretName"] for one in volumes if one["name"] == "secret")))
        return pod

    async def _run(self, pod: Pod, secret_name: str) -> None:
        chance = self._world.chance
        await asyncio.sleep(chance.uniform(0.1, 0.5))
        while (secret := self._api.find("Secret", secret_name, self._namespace)) is None:
            await asyncio.sleep(1.0)
        if pod.name in self.going or pod.gone:
            return
        pod.mount(secret)
        pod.start_sidecar()
        await asyncio.sleep(chance.uniform(0.0, 0.5))
        if pod.name not in self.going and pod.engine is None:
            pod.start_engine(chance.uniform(*LOADING))

    async def _watch_readiness(self) -> None:
        """The kubelet's probes, and the endpoints that follow from them."""
        while True:
            for pod in list(self.pods.values()):
                ready = pod.ready
                if pod.name not in self.going:
                    if ready:
                        self._endpoints[pod.name] = pod
                    else:
                        self._endpoints.pop(pod.name, None)
                seen = (ready, pod.engine is not None)
                if self._reported.get(pod.name) != seen:
                    self._reported[pod.name] = seen
                    self._edit("Pod", pod.name, partial(_set_pod_status, pod, ready))
            await asyncio.sleep(0.5)

    def _terminate(self, pod: Pod) -> None:
        self.going.add(pod.name)
        self._world.trace.note(pod.name, "terminating")
        self._edit("Pod", pod.name, _mark_deleted)
        self._start(self._drain(pod))

    async def _drain(self, pod: Pod) -> None:
        """preStop asks the sidecar to drain; then the containers end."""
        sidecar = pod.sidecar
        self._world.loop.call_later(ENDPOINT_LAG, self._endpoints.pop, pod.name, None)
        if sidecar is not None:
            await sidecar.control.drain.run(sidecar.started.drain_seconds)
        self._endpoints.pop(pod.name, None)
        self.audited(pod)
        pod.remove()
        del self.pods[pod.name]
        self.going.discard(pod.name)
        self._world.trace.note(pod.name, "gone")
        try:
            self._api.delete("Pod", pod.name, self._namespace)
        except ApiRefusal:
            pass  # collected already
        self._changed(Change(0, "DELETED", "Pod", b""))

    def _start(self, work: Any) -> None:
        task = self._world.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _owner(body: Object) -> str:
    return next((owner["uid"] for owner in body["metadata"].get("ownerReferences") or []), "")


def _replica_set(deployment: Object, name: str) -> Object:
    metadata, template = deployment["metadata"], deployment["spec"]["template"]
    reference = {"apiVersion": "apps/v1", "kind": "Deployment", "name": metadata["name"], "uid": metadata["uid"]}
    return {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {
            "name": name,
            "namespace": metadata["namespace"],
            "labels": dict(template["metadata"]["labels"]),
            "ownerReferences": [reference | {"controller": True}],
        },
        "spec": {"replicas": 0, "template": template},
    }


def _set_replicas(count: int, body: Object) -> None:
    body["spec"]["replicas"] = count


def _set_status(body: Object, new: list[Pod], old: list[Pod]) -> None:
    ready = sum(pod.ready for pod in [*new, *old])
    body["status"] = {
        "observedGeneration": body["metadata"]["generation"],
        "replicas": len(new) + len(old),
        "updatedReplicas": len(new),
        "readyReplicas": ready,
        "availableReplicas": ready,
        "conditions": [{"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}],
    }


def _set_pod_status(pod: Pod, ready: bool, body: Object) -> None:
    engine = pod.engine is not None
    body["status"] = {
        "phase": "Running" if engine else "Pending",
        "podIP": pod.ip,
        "conditions": [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": "True" if ready else "False"},
        ],
        "containerStatuses": [{"name": "engine", "state": {"running": {}} if engine else {"waiting": {}}}],
    }


def _mark_deleted(body: Object) -> None:
    body["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:00Z"

"""The operator against a real API server: server-side apply, watches, events, status, garbage collection.

It runs from this Python, with the cluster's own controllers at work. Its pods stay without a node (there is no volume
for the model), so what needs running pods is in tests/e2e.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvsteward_contract import wire
from kvsteward_contract.crd import crd
from kvsteward_operator import errors
from kvsteward_operator.api import FIELD_MANAGER, KubernetesApi
from kvsteward_operator.index import Index, Key
from kvsteward_operator.kinds import CONFIG_MAP, POLICY
from kvsteward_operator.login import find_login
from kvsteward_operator.main import make_key
from kvsteward_operator.served_schema import check_schema
from kvsteward_operator.watches import Watches
from support.kube import Kube, until
from support.operating import policy_resource

pytestmark = pytest.mark.cluster
CHILDREN = "configmaps,controllerrevisions,deployments,networkpolicies,pdb,roles,rolebindings,services,serviceaccounts"
SELECTOR = f"{wire.POLICY_LABEL}=chat"


class Operator:
    """One operator process, watching one namespace."""

    def __init__(self, folder: Path, namespace: str) -> None:
        self.folder, self.namespace = folder, namespace
        self.key = folder / "key"
        self.key.write_bytes(bytes(32))
        self.log = folder / f"log-{time.monotonic_ns()}"
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("wb") as log:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "kvsteward_operator.main", "run", f"--namespace={self.namespace}"),
                    *("--engine-image=localhost/none:1", "--sidecar-image=localhost/none:1"),
                    *(f"--operator-key-file={self.key}", "--liveness-port=0", "--metrics-port=0"),
                ],
                stderr=log,
            )

    def ports(self) -> tuple[int, int]:
        """Liveness and metrics, once it watches."""

        def look() -> tuple[int, int] | None:
            found = re.search(r"liveness on port (\d+), metrics on port (\d+)", self.log.read_text())
            return (int(found[1]), int(found[2])) if found else None

        ports: tuple[int, int] = until("the operator watches", look, 30)
        return ports

    def applies(self) -> float:
        """How many objects it has created or changed."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports()[1]}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        counted = [line for line in lines if line.startswith("kvsteward_operator_applies_total")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in counted)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)

    def restart(self, number: int = signal.SIGTERM) -> None:
        self.stop(number)
        self.log = self.folder / f"log-{time.monotonic_ns()}"
        self.process = self._start()
        self.ports()


@pytest.fixture(scope="module")
def kube() -> Iterator[Kube]:
    subprocess.run(["kubectl", "apply", "-f", str(Path(__file__).parents[2] / "crds")], check=True)
    subprocess.run(["kubectl", "wait", "--for=condition=Established", f"crd/{wire.PLURAL}.{wire.GROUP}"], check=True)
    there = Kube(f"operator-{os.getpid()}")
    namespace = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": there.namespace,
            "labels": {"pod-security.kubernetes.io/enforce": "restricted"},
        },
    }
    there.apply(namespace)
    yield there
    there.delete("namespace", there.namespace, wait=False)


@pytest.fixture
def operator(kube: Kube, tmp_path: Path) -> Iterator[Operator]:
    """An operator that watches, and a policy `chat` whose objects are there."""
    running = Operator(tmp_path, kube.namespace)
    running.ports()
    resource = policy_resource(engine={"replicas": 1, "resources": {"limits": {"cpu": "1000m", "memory": "2048Mi"}}})
    kube.apply({**resource, "metadata": {"name": "chat", "namespace": kube.namespace}})
    until("the Deployment is there", lambda: kube.exists("deployment", "chat"), 20)
    until("the pod is there", lambda: kube.pods("chat"), 20)
    settle(kube)
    yield running
    if running.process.poll() is None:
        running.stop()
    kube.delete("kvcp", "chat")
    until("everything is collected", lambda: not objects(kube) and not kube.pods("chat", leaving=True), 60)


def objects(kube: Kube) -> dict[str, str]:
    """resourceVersion of each object, by kind and name."""
    return {
        f"{body['kind']}/{body['metadata']['name']}": body["metadata"]["resourceVersion"]
        for body in kube.items(CHILDREN, SELECTOR)
    }


def settle(kube: Kube, seconds: float = 1.5) -> dict[str, str]:
    """Waits until nothing has changed for that long."""
    last, since = objects(kube) | {"policy": version(kube)}, time.monotonic()
    while time.monotonic() - since < seconds:
        time.sleep(0.2)
        now = objects(kube) | {"policy": version(kube)}
        if now != last:
            last, since = now, time.monotonic()
    return last


def version(kube: Kube) -> str:
    return str(kube.policy("chat")["metadata"]["resourceVersion"])


def events(kube: Kube) -> list[str]:
    """Reasons of what was told about the policy as it is now, oldest first."""
    uid = kube.policy("chat")["metadata"]["uid"]
    found = [body for body in kube.items("events") if body["involvedObject"].get("uid") == uid]
    return [body["reason"] for body in sorted(found, key=lambda body: int(body["metadata"]["resourceVersion"]))]


def document(kube: Kube) -> dict[str, Any]:
    found = kube.items("configmaps", SELECTOR)
    return dict(json.loads(found[-1]["data"]["document"]))


def within(what: str, look: Callable[[], Any], seconds: float) -> float:
    """Seconds until look() is true; at most `seconds`."""
    began = time.monotonic()
    until(what, look, seconds, pause=0.02)
    return time.monotonic() - began


def test_a_policy_becomes_objects_that_it_owns_applied_by_one_manager(kube: Kube, operator: Operator) -> None:
    policy = kube.policy("chat")
    bodies = json.loads(kube.kubectl("get", CHILDREN, "-l", SELECTOR, "-o", "json", "--show-managed-fields"))["items"]
    assert {body["kind"] for body in bodies} == {
        "ConfigMap", "ControllerRevision", "Deployment", "NetworkPolicy", "PodDisruptionBudget", "Role", "RoleBinding",
        "Service", "ServiceAccount",
    }  # fmt: skip
    for body in bodies:
        owners = body["metadata"]["ownerReferences"]
        assert [(owner["uid"], owner["blockOwnerDeletion"]) for owner in owners] == [(policy["metadata"]["uid"], False)]
        mine = [entry for entry in body["metadata"]["managedFields"] if entry["manager"] == FIELD_MANAGER]
        assert [entry["operation"] for entry in mine] == ["Apply"]
    assert kube.exists("secret", "chat-kvsteward")
    assert events(kube) == ["PolicyAccepted", "PodsCreated"]
    assert "finalizers" not in policy["metadata"]
    assert set(policy["metadata"].get("annotations", {})) == {"kubectl.kubernetes.io/last-applied-configuration"}
    # The namespace enforces Pod Security `restricted`, and the pod is there.
    assert kube.pods("chat")[0]["spec"]["automountServiceAccountToken"] is False
    assert kube.condition("chat", "Progressing")["reason"] == "Unschedulable"


def test_nothing_is_written_while_nothing_changes(kube: Kube, operator: Operator) -> None:
    before, applies = settle(kube), operator.applies()
    time.sleep(12)
    assert objects(kube) | {"policy": version(kube)} == before
    assert operator.applies() == applies


def test_a_restarted_operator_changes_nothing_and_tells_nothing_twice(kube: Kube, operator: Operator) -> None:
    before, told = settle(kube), events(kube)
    for number in (signal.SIGTERM, signal.SIGKILL):
        operator.restart(number)
        time.sleep(3)
        assert objects(kube) | {"policy": version(kube)} == before
        assert events(kube) == told
        assert operator.applies() == 0


def test_deleted_objects_are_put_back_within_seconds(kube: Kube, operator: Operator) -> None:
    gone = [
        ("deployment", "chat"), ("service", "chat"), ("role", "chat-kvsteward"), ("rolebinding", "chat-kvsteward"),
        ("serviceaccount", "chat-kvsteward"), ("networkpolicy", "chat"), ("pdb", "chat"),
        ("configmap", kube.items("configmaps", SELECTOR)[0]["metadata"]["name"]),
    ]  # fmt: skip
    for kind, name in gone:
        uid = kube.get(kind, name)["metadata"]["uid"]
        kube.delete(kind, name)
        within(
            f"{kind} is back",
            lambda kind=kind, name=name, uid=uid: kube.get(kind, name)["metadata"]["uid"] != uid,
            10,
        )


def test_changed_objects_are_put_back_within_seconds(kube: Kube, operator: Operator) -> None:
    for kind, name, change in (
        ("deployment", "chat", {"spec": {"replicas": 4}}),
        ("service", "chat", {"spec": {"ports": [{"name": "http", "port": 81}]}}),
        ("role", "chat-kvsteward", {"rules": []}),
        ("networkpolicy", "chat", {"spec": {"ingress": [{}]}}),
    ):
        field = next(iter(change))
        before = kube.get(kind, name)[field]
        kube.patch(kind, name, change)
        within(
            f"{kind} is as it was",
            lambda kind=kind, name=name, field=field, before=before: kube.get(kind, name)[field] == before,
            10,
        )
    settle(kube)


def test_a_stage_edit_reaches_the_document_and_touches_no_pod(kube: Kube, operator: Operator) -> None:
    template = kube.get("deployment", "chat")["spec"]["template"]
    took = []
    for stage in ("Canary", "Full", "Cold", "Shadow") * 3:
        kube.rollout("chat", stage=stage, canary={"percent": 5})
        took.append(within(stage, lambda stage=stage: document(kube)["rollout"]["stage"] == stage, 5))
    print("edit to document, seconds:", sorted(round(value, 2) for value in took))
    assert max(took) < 2
    assert kube.get("deployment", "chat")["spec"]["template"] == template
    assert kube.policy("chat")["status"]["generations"][0]["stage"] == "Shadow"


def test_a_rejected_spec_leaves_the_objects_alone_over_a_restart_too(kube: Kube, operator: Operator) -> None:
    before = objects(kube)
    kube.patch("kvcp", "chat", {"spec": {"cache": {"capacity": "4Gi"}, "rollover": {"drainSeconds": 5}}})
    within("it is rejected", lambda: kube.condition("chat", "Accepted").get("status") == "False", 10)
    assert kube.condition("chat", "Accepted")["reason"] == "CapacityExceedsMemory"
    operator.restart()
    time.sleep(2)
    assert objects(kube) == before
    assert events(kube).count("PolicyRejected") == 1
    kube.rollout("chat", killSwitch="Engaged")
    within("the switch acts", lambda: document(kube)["rollout"]["killSwitch"] == "Engaged", 5)
    kube.patch("kvcp", "chat", {"spec": {"cache": {"capacity": "64Mi"}, "rollover": {"drainSeconds": 120}}})
    within("it is accepted", lambda: kube.condition("chat", "Accepted").get("status") == "True", 10)


def test_pods_that_the_api_server_refuses_are_a_rejection(kube: Kube, operator: Operator) -> None:
    before = kube.get("deployment", "chat")["spec"]
    toleration = {"key": "x", "operator": "Exists", "value": "not-with-Exists"}
    kube.patch("kvcp", "chat", {"spec": {"engine": {"template": {"tolerations": [toleration]}}}})
    within("it is rejected", lambda: kube.condition("chat", "Accepted").get("reason") == "InvalidTemplate", 10)
    assert kube.get("deployment", "chat")["spec"] == before
    assert len(kube.items("controllerrevisions", SELECTOR)) == 1


def test_kubectl_scale_and_nothing_else_sets_the_replicas(kube: Kube, operator: Operator) -> None:
    kube.kubectl("scale", "kvcp/chat", "--replicas=0")
    within("no replicas", lambda: kube.get("deployment", "chat")["spec"]["replicas"] == 0, 10)
    within("no pods", lambda: kube.condition("chat", "Available").get("reason") == "ScaledToZero", 30)
    scale = json.loads(kube.kubectl("get", "--raw", f"{POLICY.path(kube.namespace, 'chat')}/scale"))
    assert scale["status"] == {"replicas": 0, "selector": f"{wire.POLICY_LABEL}=chat"} or scale["status"]["selector"]
    assert len(kube.items("controllerrevisions", SELECTOR)) == 1


def test_a_new_identity_is_a_new_generation_beside_the_old_one(kube: Kube, operator: Operator) -> None:
    old = kube.items("configmaps", SELECTOR)[0]["metadata"]["name"]
    kube.patch("kvcp", "chat", {"spec": {"engine": {"model": {"revision": "2"}}}})
    within("two documents", lambda: len(kube.items("configmaps", SELECTOR)) == 2, 10)
    names = {body["metadata"]["name"] for body in kube.items("configmaps", SELECTOR)}
    assert set(kube.get("role", "chat-kvsteward")["rules"][0]["resourceNames"]) == names
    within("told", lambda: "RolloverStarted" in events(kube), 5)
    # No pod of this test becomes ready, so the Deployment keeps the old one until it may do without any.
    kube.kubectl("scale", "kvcp/chat", "--replicas=0")
    within(
        "only the new one is left",
        lambda: [body["metadata"]["name"] for body in kube.items("configmaps", SELECTOR)] == [*(names - {old})],
        60,
    )
    within("told", lambda: "RolloverDrained" in events(kube), 10)


def test_the_sidecars_account_may_read_its_two_objects_and_nothing_else(kube: Kube, operator: Operator) -> None:
    document_name = kube.items("configmaps", SELECTOR)[0]["metadata"]["name"]
    account = f"--as=system:serviceaccount:{kube.namespace}:chat-kvsteward"

    def may(*what: str) -> bool:
        asked = ["kubectl", "-n", kube.namespace, "auth", "can-i", *what, account]
        return subprocess.run(asked, capture_output=True, check=False).returncode == 0

    assert may("watch", f"configmaps/{document_name}")
    assert may("list", "kvcachepolicies.kvsteward.dev/chat")
    for refused in (("list", "configmaps"), ("get", "configmaps/other"), ("get", "secrets/chat-kvsteward"),
                    ("patch", "kvcachepolicies.kvsteward.dev/chat"), ("get", "pods")):  # fmt: skip
        assert not may(*refused), refused


def test_an_object_of_somebody_else_is_left_alone(kube: Kube, tmp_path: Path) -> None:
    theirs = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "taken"}, "spec": {"ports": [{"port": 9}]}}
    kube.apply(theirs)
    running = Operator(tmp_path, kube.namespace)
    try:
        kube.apply({**policy_resource(), "metadata": {"name": "taken", "namespace": kube.namespace}})
        within("it is rejected", lambda: kube.condition("taken", "Accepted").get("reason") == "NameConflict", 30)
        assert not kube.exists("deployment", "taken")
        assert "ownerReferences" not in kube.get("service", "taken")["metadata"]
        kube.delete("service", "taken")
        within("it is accepted", lambda: kube.condition("taken", "Accepted").get("status") == "True", 60)
    finally:
        running.stop()
        kube.delete("kvcp", "taken")


def test_deleting_the_policy_returns_at_once_and_everything_is_collected(kube: Kube, operator: Operator) -> None:
    began = time.monotonic()
    kube.delete("kvcp", "chat")
    assert time.monotonic() - began < 5
    within("collected", lambda: not objects(kube) and not kube.exists("secret", "chat-kvsteward"), 60)
    assert operator.process.poll() is None


def test_liveness_answers_and_a_term_signal_ends_the_operator_soon(kube: Kube, operator: Operator) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{operator.ports()[0]}/healthz", timeout=5) as answer:
        assert answer.status == 200
    began = time.monotonic()
    assert operator.stop() == 0
    assert time.monotonic() - began < 10


async def test_a_status_from_an_old_reading_is_a_conflict_and_a_wrong_one_is_not(kube: Kube) -> None:
    kube.apply({**policy_resource(), "metadata": {"name": "bare", "namespace": kube.namespace}})
    try:
        async with KubernetesApi(find_login()) as api:
            old = await api.get(POLICY, kube.namespace, "bare")
            stored = await api.replace_status(
                kube.namespace, "bare", old["metadata"]["resourceVersion"], {"observedGeneration": 1}
            )
            assert stored["status"]["observedGeneration"] == 1
            with pytest.raises(errors.Conflict):
                await api.replace_status(
                    kube.namespace, "bare", old["metadata"]["resourceVersion"], {"observedGeneration": 2}
                )
            with pytest.raises(errors.Refused):
                await api.replace_status(
                    kube.namespace, "bare", stored["metadata"]["resourceVersion"], {"observedGeneration": "two"}
                )
    finally:
        await asyncio.to_thread(kube.delete, "kvcp", "bare")


async def test_an_apply_with_the_uid_of_an_object_that_has_gone_is_a_conflict(kube: Kube) -> None:
    body: dict[str, Any] = {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "gone", "namespace": kube.namespace}, "data": {},
    }  # fmt: skip
    async with KubernetesApi(find_login()) as api:
        first = await api.apply(CONFIG_MAP, body, force=False)
        uid = first["metadata"]["uid"]
        await api.delete(CONFIG_MAP, kube.namespace, "gone", uid)
        old = {**body, "metadata": {**body["metadata"], "uid": uid}}
        with pytest.raises(errors.Conflict):
            await api.apply(CONFIG_MAP, old, force=True)
        second = await api.apply(CONFIG_MAP, body, force=False)
        with pytest.raises(errors.Conflict):
            await api.apply(CONFIG_MAP, old, force=True)
        await api.delete(CONFIG_MAP, kube.namespace, "gone", uid)  # of the first one: leaves the second
        assert (await api.get(CONFIG_MAP, kube.namespace, "gone"))["metadata"]["uid"] == second["metadata"]["uid"]
        await api.delete(CONFIG_MAP, kube.namespace, "gone", second["metadata"]["uid"])


async def test_watches_bring_what_is_ours_and_go_on_after_they_were_started_anew(kube: Kube) -> None:
    index, changed = Index(), set[Key]()
    watches = Watches(index, changed.add, (kube.namespace,))
    running = asyncio.create_task(watches.run())
    ours = {"app.kubernetes.io/managed-by": "kvsteward-operator", wire.POLICY_LABEL: "watched"}

    def config_map(name: str, labels: dict[str, str]) -> None:
        kube.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": labels}})

    async def known(*names: str) -> None:
        async with asyncio.timeout(20):
            while {body["metadata"]["name"] for body in index.objects("ConfigMap")} != set(names):
                await asyncio.sleep(0.05)

    try:
        await asyncio.to_thread(config_map, "theirs", {})
        await asyncio.to_thread(config_map, "first", ours)
        await known("first")
        assert changed == {Key(kube.namespace, "watched")}
        watches.restart()
        await asyncio.to_thread(config_map, "second", ours)
        await known("first", "second")
        await asyncio.to_thread(kube.delete, "configmap", "first")
        await known("second")
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for name in ("theirs", "first", "second"):
            await asyncio.to_thread(kube.delete, "configmap", name)


async def test_the_served_schema_is_known(kube: Kube) -> None:
    async with KubernetesApi(find_login()) as api:
        await check_schema(api)


def test_the_operator_refuses_to_start_on_a_crd_of_another_version(kube: Kube, tmp_path: Path) -> None:
    newer = crd()
    newer["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["later"] = {
        "type": "string"
    }
    try:
        kube.apply(newer)
        served = "/openapi/v3/apis/kvsteward.dev/v1alpha1"
        until("the field is served", lambda: '"later"' in kube.kubectl("get", "--raw", served), 30)
        running = Operator(tmp_path, kube.namespace)
        assert running.process.wait(30) == 1
        assert "spec.later): upgrade the operator" in running.log.read_text()
    finally:
        kube.apply(crd())
        until("the field is gone", lambda: '"later"' not in kube.kubectl("get", "--raw", served), 30)


async def test_the_operator_key_is_made_once(kube: Kube) -> None:
    async with KubernetesApi(find_login()) as api:
        assert await make_key(api, kube.namespace, "operator-key")
        before = kube.get("secret", "operator-key")
        assert not await make_key(api, kube.namespace, "operator-key")
    assert kube.get("secret", "operator-key") == before

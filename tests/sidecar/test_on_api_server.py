"""The policy through a real API server, with the rights of a pod's service account and no more."""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from kvsteward_contract.document import canonical
from kvsteward_contract.policy import KillSwitch, Stage
from kvsteward_sidecar.kube import ApiServer
from kvsteward_sidecar.policy_source import KubernetesSource, PolicyState
from support.control_plane import config_map, document, resource
from support.control_plane import until as soon
from support.kube import Kube, KubectlFailed, until

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
NAMESPACE, POLICY, DOCUMENT, ACCOUNT = "sidecar-source", "chat", "chat-1", "chat-kvsteward"


@pytest.fixture(scope="module")
def kube() -> Iterator[Kube]:
    """A namespace of its own with the CRD there; gone afterwards."""
    found = Kube(NAMESPACE)
    found.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
    found.kubectl("wait", "--for=condition=Established", "crd/kvcachepolicies.kvsteward.dev", "--timeout=30s")
    found.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    yield found
    found.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def rights() -> list[dict[str, Any]]:
    """What a pod's service account may do: see two objects by name."""
    verbs = ["get", "list", "watch"]
    rules = [
        {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [DOCUMENT], "verbs": verbs},
        {"apiGroups": ["kvsteward.dev"], "resources": ["kvcachepolicies"], "resourceNames": [POLICY], "verbs": verbs},
    ]
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": ACCOUNT}
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE}
    version = "rbac.authorization.k8s.io/v1"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT}},
        {"apiVersion": version, "kind": "Role", "metadata": {"name": ACCOUNT}, "rules": rules},
        {
            "apiVersion": version,
            "kind": "RoleBinding",
            "metadata": {"name": ACCOUNT},
            "roleRef": role,
            "subjects": [subject],
        },
    ]


def api_server(kube: Kube, token: Path | None) -> ApiServer:
    """The one that kubectl talks to; without a token nobody asks."""
    config = yaml.safe_load(kube.kubectl("config", "view", "--raw", "--minify"))["clusters"][0]["cluster"]
    authority = base64.b64decode(config["certificate-authority-data"]).decode()
    return ApiServer(config["server"], token, ssl.create_default_context(cadata=authority))


@dataclass(frozen=True)
class Followed:
    kube: Kube
    state: PolicyState

    def put(self, **rollout: Any) -> None:
        """The document, as the operator would write it for these rollout fields."""
        self.kube.apply({"apiVersion": "v1", "kind": "ConfigMap", **config_map(document(self.uid(), **rollout))})

    def uid(self) -> str:
        return str(self.kube.get("kvcp", POLICY)["metadata"]["uid"])

    def patch(self, **rollout: Any) -> None:
        patch = yaml.safe_dump({"spec": {"rollout": rollout}})
        self.kube.kubectl("patch", "kvcp", POLICY, "--type=merge", "--patch", patch)

    async def seen(self, condition: Any, seconds: float = 2.0) -> None:
        await soon(condition, seconds)


@pytest.fixture
async def followed(kube: Kube, tmp_path: Path) -> AsyncIterator[Followed]:
    asked = resource(stage="Full")
    asked["metadata"] = {"name": POLICY}
    kube.apply(*rights(), asked)
    token = tmp_path / "token"
    token.write_text(until("a token", lambda: kube.kubectl("create", "token", ACCOUNT)))
    server = api_server(kube, token)
    state = PolicyState(lambda: None, asyncio.get_running_loop().time)
    async with aiohttp.ClientSession() as session:
        source = KubernetesSource(
            state, session, server, namespace=NAMESPACE, policy=POLICY, config_map=DOCUMENT
        )
        task = asyncio.create_task(source.run())
        yield Followed(kube, state)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    kube.kubectl("delete", "kvcp,configmap,role,rolebinding", "--all", "--ignore-not-found")


async def test_document_and_resource_arrive_within_a_second_of_the_edit(followed: Followed) -> None:
    followed.put(stage="Full")
    await followed.seen(lambda: followed.state.document and followed.state.resource, 10)
    assert followed.state.document is not None
    assert canonical(followed.state.document) == canonical(document(followed.uid(), stage="Full"))
    for switch in (KillSwitch.ENGAGED, KillSwitch.RELEASED):
        await asyncio.to_thread(followed.patch, killSwitch=switch.value)
        await followed.seen(lambda switch=switch: followed.state.resource.kill_switch is switch, 1.0)
    await asyncio.to_thread(followed.put, stage="Canary")
    await followed.seen(lambda: followed.state.document.rollout.stage is Stage.CANARY, 1.0)


async def test_deleting_role_and_objects_leaves_what_was_read(followed: Followed) -> None:
    followed.put(stage="Full")
    await followed.seen(lambda: followed.state.document and followed.state.resource, 10)
    await asyncio.to_thread(followed.kube.kubectl, "delete", "kvcp", POLICY)
    await followed.seen(lambda: any("PolicyAbsent" in problem for problem in followed.state.problems))
    assert followed.state.resource is not None
    assert followed.state.document is not None


async def test_whoever_has_no_rights_is_told_to_check_the_role(kube: Kube, followed: Followed) -> None:
    refused: list[str] = []
    state = PolicyState(lambda: None, asyncio.get_running_loop().time)
    async with aiohttp.ClientSession() as session:
        source = KubernetesSource(
            state, session, api_server(kube, None), namespace=NAMESPACE, policy=POLICY, config_map=DOCUMENT
        )
        task = asyncio.create_task(source.run())
        await followed.seen(lambda: len(state.problems) == 2, 10)
        refused.extend(state.problems)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert all("check its Role" in problem for problem in refused)
    assert state.document is None


async def test_the_account_sees_no_other_object(followed: Followed) -> None:
    who = f"--as=system:serviceaccount:{NAMESPACE}:{ACCOUNT}"
    for what in ("configmaps", "configmaps/other", "secrets", "kvcp/other"):
        with pytest.raises(KubectlFailed, match="no"):
            followed.kube.kubectl("auth", "can-i", "get", what, who)
    assert followed.kube.kubectl("auth", "can-i", "get", f"configmaps/{DOCUMENT}", who).strip() == "yes"

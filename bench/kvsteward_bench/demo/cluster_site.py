"""A site on a Kubernetes cluster, used as a person would: through kubectl, and the policy's Service."""

import asyncio
import base64
import json
import os
from typing import Any, cast

import aiohttp
from kvsteward_contract import wire

from .site import Json, Tenant


class KubectlFailed(Exception):
    """kubectl said no; its own words."""


async def kubectl(*args: str, given: str | None = None) -> str:
    """What kubectl prints. Raises KubectlFailed with what it said otherwise."""
    process = await asyncio.create_subprocess_exec(
        "kubectl", *args, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate(given.encode() if given is not None else None)
    if process.returncode:
        raise KubectlFailed(f"kubectl {' '.join(args)}: {err.decode().strip()}")
    return out.decode()


class ClusterSite:
    label = "a Kubernetes cluster"

    def __init__(self, namespace: str, policy: str, model: str, tenants: tuple[Tenant, Tenant]) -> None:
        self.namespace, self.policy, self.model, self.tenants = namespace, policy, model, tenants
        self.url = ""
        self._token = ""
        self._forwards: dict[str, tuple[asyncio.subprocess.Process, str]] = {}

    async def _kubectl(self, *args: str) -> str:
        return await kubectl("-n", self.namespace, *args)

    async def open(self) -> None:
        """Find the endpoint and the admin token. The Service's own address where this machine reaches it, else a
        port-forward, which sends everything to one of its pods."""
        secret = await self._kubectl("get", "secret", f"{self.policy}-kvsteward", "-o", "json")
        self._token = base64.b64decode(json.loads(secret)["data"][wire.ADMIN_TOKEN_KEY]).decode().strip()
        address = await self._kubectl("get", "service", self.policy, "-o", "jsonpath={.spec.clusterIP}")
        self.url = f"http://{address}:{wire.TRAFFIC_PORT}"
        if os.environ.get("DEMO_CLUSTER") == "existing":
            self.url = await self._forward(f"service/{self.policy}", wire.TRAFFIC_PORT)

    async def close(self) -> None:
        for process, _ in self._forwards.values():
            process.terminate()
            await process.wait()

    async def _forward(self, target: str, port: int) -> str:
        if target not in self._forwards:
            process = await asyncio.create_subprocess_exec(
                "kubectl", "-n", self.namespace, "port-forward", target, f":{port}", stdout=asyncio.subprocess.PIPE
            )
            output = cast(asyncio.StreamReader, process.stdout)
            line = (await asyncio.wait_for(output.readline(), 30)).decode()
            if "127.0.0.1:" not in line:
                raise KubectlFailed(f"kubectl port-forward {target} did not start")
            local = line.split("127.0.0.1:")[1].split()[0]
            self._forwards[target] = (process, f"http://127.0.0.1:{local}")
        return self._forwards[target][1]

    async def _pods(self) -> list[Json]:
        selector = f"{wire.POLICY_LABEL}={self.policy}"
        pods: list[Json] = json.loads(await self._kubectl("get", "pods", "-l", selector, "-o", "json"))["items"]
        return pods

    async def _admin(self, path: str) -> list[Any]:
        """One answer of every pod's admin port."""
        bases = []
        for pod in await self._pods():
            if os.environ.get("DEMO_CLUSTER") == "existing":
                bases.append(await self._forward(f"pod/{pod['metadata']['name']}", wire.ADMIN_PORT))
            else:
                bases.append(f"http://{pod['status']['podIP']}:{wire.ADMIN_PORT}")
        headers = {"Authorization": f"Bearer {self._token}"}
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=10)) as client:

            async def get(base: str) -> Any:
                async with client.get(base + path) as response:
                    response.raise_for_status()
                    return await response.json()

            return list(await asyncio.gather(*(get(base) for base in bases)))

    async def _resource(self) -> Json:
        resource: Json = json.loads(await self._kubectl("get", wire.SHORT_NAME, self.policy, "-o", "json"))
        return resource

    async def edit(self, rollout: Json) -> None:
        patch = json.dumps({"spec": {"rollout": rollout}})
        await self._kubectl("patch", wire.SHORT_NAME, self.policy, "--type=merge", "-p", patch)

    async def stage(self) -> str:
        resource = await self._resource()
        status, replicas = resource.get("status", {}), resource["spec"]["engine"]["replicas"]
        if status.get("observedGeneration") != resource["metadata"]["generation"]:
            return ""
        serving = [entry for entry in status.get("generations", ()) if entry.get("state") == "Serving"]
        confirmed = len(serving) == 1 and serving[0].get("acknowledgedReplicas") == replicas
        return str(status.get("stage", "")) if confirmed else ""

    async def cold(self) -> bool:
        conditions = (await self._resource()).get("status", {}).get("conditions", ())
        return any(each["type"] == "ColdPath" and each["status"] == "True" for each in conditions)

    async def last_match(self) -> float:
        return max(float(each["lastMatchSeconds"]) for each in await self._admin("/v1/observation"))

    async def receipts(self) -> list[Json]:
        return [receipt for each in await self._admin("/v1/receipts?limit=200") for receipt in each["receipts"]]

    async def processes(self) -> frozenset[str]:
        return frozenset(
            f"{pod['metadata']['uid']}/{container['name']}/{container['restartCount']}"
            for pod in await self._pods()
            for container in pod["status"]["containerStatuses"] + pod["status"]["initContainerStatuses"]
        )

    async def show(self) -> None:
        print("\n$ kubectl get events")
        columns = "custom-columns=TIME:.metadata.creationTimestamp,REASON:.reason,MESSAGE:.message"
        which = ("--field-selector", f"involvedObject.kind={wire.KIND}", "--sort-by=.metadata.creationTimestamp")
        print(await self._kubectl("get", "events", *which, "-o", columns))
        print("$ kubectl get kvcp")
        print(await self._kubectl("get", wire.SHORT_NAME), flush=True)

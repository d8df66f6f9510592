"""A policy that runs on the cluster, with the verbs that tests need on it."""

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import requests
from kvsteward_bench.traffic import Load

from .kube import Json, Kube, until


@dataclass
class Deployed:
    kube: Kube
    name: str
    model: str
    keys: dict[str, str]
    url: str = ""
    token: str = ""

    def __post_init__(self) -> None:
        self.url = self.kube.endpoint(self.name)
        self.token = self.kube.admin_token(self.name)

    # --- the resource

    async def edit(self, **rollout: Any) -> None:
        await asyncio.to_thread(self.kube.rollout, self.name, **rollout)

    async def stage(self, stage: str, canary: int = 0, timeout: float = 30) -> float:
        """Edit the stage and wait until every pod's engine has confirmed it; seconds from the end of the edit."""
        percent = canary if stage == "Canary" else 0
        await self.edit(stage=stage, canary={"percent": percent})
        begun = time.monotonic()
        await self.in_force(stage, percent, timeout=timeout)
        return time.monotonic() - begun

    async def in_force(self, stage: str, percent: int = 0, timeout: float = 30) -> None:
        """Until every pod says, by itself, that its engine has confirmed this stage."""

        def look() -> bool:
            seen = self.observations()
            return bool(seen) and all(
                each["stage"] == stage
                and each["canaryPercent"] == percent
                and each["epoch"] == each["engineEpoch"]
                for each in seen
            )

        await asyncio.to_thread(until, f"stage {stage} in force", look, timeout, 0.03)

    async def cold(self, timeout: float = 30) -> None:
        """Until every pod's engine has confirmed that it makes no new match."""

        def look() -> bool:
            return all(each["coldConfirmed"] for each in self.observations())

        await asyncio.to_thread(until, "cold path confirmed", look, timeout, 0.02)

    # --- its pods

    def get(self, path: str) -> list[Any]:
        """One answer of each pod's admin port."""
        headers = {"Authorization": f"Bearer {self.token}"}
        answers = []
        for pod in self.kube.pods(self.name):
            response = requests.get(self.kube.admin(pod) + path, headers=headers, timeout=10)
            response.raise_for_status()
            answers.append(response)
        return answers

    def observations(self) -> list[Json]:
        return [answer.json() for answer in self.get("/v1/observation")]

    def receipts(self) -> list[Json]:
        return [receipt for answer in self.get("/v1/receipts?limit=1000") for receipt in answer.json()["receipts"]]

    def ledger(self) -> list[Json]:
        return [page for answer in self.get("/v1/ledger?limit=1000") for page in answer.json()["pages"]]

    def metrics(self) -> str:
        return "\n".join(answer.text for answer in self.get("/metrics"))

    def last_match(self) -> float:
        return max(each["lastMatchSeconds"] for each in self.observations())

    def refresh_mounts(self) -> None:
        """A changed annotation makes the kubelet look at a pod's mounted Secrets at once."""
        for pod in self.kube.pods(self.name):
            self.kube.kubectl("annotate", "pod", pod["metadata"]["name"], f"looked={time.time()}", "--overwrite")

    def restarts(self) -> dict[str, int]:
        """{pod uid/container: restart count}"""
        return {
            f"{pod['metadata']['uid']}/{container['name']}": container["restartCount"]
            for pod in self.kube.pods(self.name)
            for container in pod["status"]["containerStatuses"] + pod["status"]["initContainerStatuses"]
        }

    # --- traffic

    def load(self, streams: int, max_tokens: int = 64, prompts: Any = None, **fields: Any) -> Load:
        """Streams of acme and globex in turn, each sending its own few prompts again and again."""
        return Load(
            self.url,
            model=self.model,
            streams=streams,
            prompts=prompts or (lambda client, turn: [3 + (client // 2 * 31 + 7 * n) % 250 for n in range(160)]),
            keys=[self.keys["acme"], self.keys["globex"]],
            max_tokens=max_tokens,
            **{"ignore_eos": True} | fields,
        )


def figures(values: list[float]) -> Json:
    ordered = sorted(values)
    return {
        "tries": len(ordered),
        "median": round(ordered[len(ordered) // 2], 3),
        "worst": round(ordered[-1], 3),
        "all": json.loads(json.dumps([round(value, 3) for value in values])),
    }

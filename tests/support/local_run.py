"""`kvsteward local` as a process of its own, with a policy file to edit, two tenants and a client for each port."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import aiohttp
import yaml
from support.control_plane import until

KEYS = {"acme": "acme-" + "a" * 32, "globex": "globex-" + "g" * 32}
ADMIN = "admin-" + "x" * 58


def local_policy(model: str, capacity: str, max_tokens: int) -> dict[str, Any]:
    """A policy at Full without a protected group, so that every session may reuse."""
    source = {"persistentVolumeClaim": {"claimName": "models", "path": "model"}}
    return {
        "apiVersion": "kvsteward.dev/v1alpha1",
        "kind": "KVCachePolicy",
        "metadata": {"name": "chat"},
        "spec": {
            "engine": {
                "model": {
                    "name": model,
                    "revision": "1",
                    "tokenizerRevision": "1",
                    "source": source,
                    "maxTokens": max_tokens,
                },
                "maxConcurrent": 4,
            },
            "cache": {"capacity": capacity, "dtype": "FP32"},
            "scopes": {"identity": {"source": "APIKey", "secret": "keys"}},
            "rollout": {"stage": "Full", "protectedPercent": 0},
            "rollover": {"drainSeconds": 5},
        },
    }


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client saw of one chat completion."""

    status: int
    text: str
    prompt_tokens: int
    cached_tokens: int
    receipt: str


class LocalRun:
    """Started on entry, interrupted on exit. Its stderr is in `said`."""

    def __init__(self, folder: Path, policy: dict[str, Any], model: Path, *options: str) -> None:
        self.policy, self.file, self.model = policy, folder / "policy.yaml", policy["spec"]["engine"]["model"]["name"]
        self.said: list[str] = []
        self.printed: list[str] = []
        (folder / "admin-token").write_text(ADMIN)
        (folder / "temporary").mkdir()
        self.temporary = folder / "temporary"
        keys = [part for tenant, key in KEYS.items() for part in ("--api-key", f"{tenant}={key}")]
        self._command = [
            *(sys.executable, "-m", "kvsteward_cli.main", "local", "-f", str(self.file), "--model", str(model)),
            *("--port", "0", "--admin-port", "0", "--admin-token-file", str(folder / "admin-token"), *keys, *options),
        ]
        self.write()

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *self._command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"},
        )
        self._readers = [
            asyncio.create_task(_collect(self.process.stdout, self.printed)),
            asyncio.create_task(_collect(self.process.stderr, self.said)),
        ]

    async def __aenter__(self) -> Self:
        await self.start()
        self.client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120))
        try:
            await until(lambda: self.url or self.process.returncode is not None, 120)
            if not self.url:
                raise RuntimeError("kvsteward local ended before it was ready:\n" + "".join(self.said))
            await until(lambda: self.admin_url)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGINT)
        await self.ended()

    async def ended(self, seconds: float = 30) -> int:
        """Its exit status; kills it, and raises TimeoutError, when it does not end in time."""
        try:
            async with asyncio.timeout(seconds):
                status = await self.process.wait()
                await asyncio.gather(*self._readers)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
            raise
        return status

    @property
    def url(self) -> str:
        return next((line.split()[1] for line in self.printed if line.startswith("ready ")), "")

    @property
    def admin_url(self) -> str:
        line = next((line for line in self.said if " admin on " in line), "")
        return f"http://{line.split(' on ')[1].strip()}" if line else ""

    def pids(self) -> list[int]:
        """Of its children."""
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in listed.read_text().split()]

    def write(self) -> None:
        part = self.file.with_suffix(".part")
        part.write_text(yaml.safe_dump(self.policy))
        part.replace(self.file)

    async def edit(self, **rollout: Any) -> None:
        """Changes the file, and waits until the sidecar has it and the engine has confirmed it."""
        before = await self.observation()
        wanted = {**self.policy["spec"]["rollout"], **rollout}
        if wanted == self.policy["spec"]["rollout"]:
            return
        self.policy["spec"]["rollout"] = wanted
        self.write()
        await self.until(lambda seen: seen["policyVersion"] != before["policyVersion"] and confirmed(seen))

    async def until(self, condition: Callable[[dict[str, Any]], bool], seconds: float = 20) -> None:
        async with asyncio.timeout(seconds):
            while not condition(await self.observation()):
                await asyncio.sleep(0.02)

    async def observation(self) -> dict[str, Any]:
        return await self.admin("/v1/observation")

    async def admin(self, path: str, method: str = "GET") -> dict[str, Any]:
        async with self.client.request(
            method, self.admin_url + path, headers={"Authorization": f"Bearer {ADMIN}"}
        ) as answer:
            answer.raise_for_status()
            return await answer.json()

    async def receipt(self, answer: Answer) -> dict[str, Any]:
        return await self.admin(f"/v1/receipts?id={answer.receipt}")

    async def chat(self, tenant: str | None, prompt: str, *, stream: bool = False, **body: Any) -> Answer:
        """A greedy chat completion of eight tokens."""
        headers = {"Authorization": f"Bearer {KEYS[tenant]}"} if tenant else {}
        asked = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 8,
            "temperature": 0,
            **({"stream": True, "stream_options": {"include_usage": True}} if stream else {}),
            **body,
        }
        async with self.client.post(self.url + "/v1/chat/completions", json=asked, headers=headers) as response:
            receipt = response.headers.get("X-KV-Receipt", "")
            if response.status != 200:
                return Answer(response.status, await response.text(), 0, 0, receipt)
            if stream:
                return _of_stream(await response.text(), receipt)
            answer = await response.json()
        usage = answer["usage"]
        text = answer["choices"][0]["message"]["content"]
        return Answer(200, text, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], receipt)


def confirmed(seen: dict[str, Any]) -> bool:
    return seen["policyVersion"] == seen["acknowledgedVersion"] and seen["epoch"] == seen["engineEpoch"]


def _of_stream(events: str, receipt: str) -> Answer:
    import json

    assert events.endswith("data: [DONE]\n\n")
    assert "kv-outcome" not in events
    chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    usage = next(chunk["usage"] for chunk in chunks if chunk.get("usage"))
    return Answer(200, text, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], receipt)


async def _collect(stream: asyncio.StreamReader | None, lines: list[str]) -> None:
    assert stream is not None
    while line := await stream.readline():
        lines.append(line.decode())

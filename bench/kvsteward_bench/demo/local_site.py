"""A site on this machine alone: `kvsteward local` over a policy file that is edited as the story goes."""

import asyncio
import secrets
import socket
import sys
from pathlib import Path
from typing import Any, cast

import aiohttp
import yaml

from .site import Json, Tenant

START_SECONDS = 180


class LocalFailed(Exception):
    """`kvsteward local` did not start or has ended; its own words."""


class LocalSite:
    label = "this machine alone (`kvsteward local`): no cluster, no operator, one replica"

    def __init__(self, policy: Path, model_folder: Path, folder: Path, tenants: tuple[Tenant, Tenant]) -> None:
        """`policy` is copied into `folder`, which is the caller's to remove."""
        resource = yaml.safe_load(policy.read_text())
        self.model: str = resource["spec"]["engine"]["model"]["name"]
        self.tenants, self._resource, self._model_folder = tenants, resource, model_folder
        self._file, self._token = folder / "policy.yaml", secrets.token_hex(32)
        self._token_file = folder / "admin-token"
        self.url = self._admin_url = ""
        self._process: asyncio.subprocess.Process | None = None

    async def open(self) -> None:
        self._write()
        self._token_file.write_text(self._token)
        port, admin = _free_port(), _free_port()
        keys = [option for tenant in self.tenants for option in ("--api-key", f"{tenant.name}={tenant.key}")]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvsteward_cli.main", "local", "-f", str(self._file),
            "--model", str(self._model_folder), "--port", str(port), "--admin-port", str(admin),
            "--admin-token-file", str(self._token_file), *keys,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        output = cast(asyncio.StreamReader, self._process.stdout)
        async with asyncio.timeout(START_SECONDS):
            while line := (await output.readline()).decode():
                if line.startswith("ready "):
                    self.url, self._admin_url = line.split()[1], f"http://127.0.0.1:{admin}"
                    self._reader = asyncio.create_task(drop(output))
                    return
        raise LocalFailed("`kvsteward local` ended before it was ready; what it said stands above")

    async def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()

    def _write(self) -> None:
        """A whole new file in one step, so that no reader sees half of one."""
        part = self._file.with_suffix(".part")
        part.write_text(yaml.safe_dump(self._resource, sort_keys=False))
        part.replace(self._file)

    async def _admin(self, path: str) -> Any:
        headers = {"Authorization": f"Bearer {self._token}"}
        async with (
            aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=10)) as client,
            client.get(self._admin_url + path) as response,
        ):
            response.raise_for_status()
            return await response.json()

    async def edit(self, rollout: Json) -> None:
        self._resource["spec"].setdefault("rollout", {}).update(rollout)
        self._write()

    async def stage(self) -> str:
        seen = await self._admin("/v1/observation")
        return str(seen["stage"]) if seen["policyVersion"] == seen["acknowledgedVersion"] else ""

    async def cold(self) -> bool:
        return bool((await self._admin("/v1/observation"))["coldConfirmed"])

    async def last_match(self) -> float:
        return float((await self._admin("/v1/observation"))["lastMatchSeconds"])

    async def receipts(self) -> list[Json]:
        return list((await self._admin("/v1/receipts?limit=200"))["receipts"])

    async def processes(self) -> frozenset[str]:
        seen = await self._admin("/v1/observation")
        return frozenset({f"sidecar since {seen['startTime']}", f"engine {seen['engineInstance']}"})

    async def show(self) -> None:
        seen = await self._admin("/v1/observation")
        print(f"\n  policy {seen['policyVersion'][:19]} stage {seen['stage']}, {seen['residentPages']} pages resident")


async def drop(output: asyncio.StreamReader) -> None:
    """Receipts come on stdout, and a full pipe would stall them."""
    while await output.read(1 << 16):
        pass


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""The sidecar as a process: ports at once, one sentence when it can't start, nobody cut when it stops."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import yaml
from support.control_plane import TOKEN, PolicyEngine, resource, until

ADMIN = "admin-" + "x" * 58


class Process:
    """`kvsteward-sidecar serve` with ports that the system chose."""

    def __init__(self, folder: Path, engine: PolicyEngine) -> None:
        self.folder, self.engine = folder, engine
        self.policy = folder / "policy.yaml"
        self.ports: dict[str, int] = {}
        self.errors: list[str] = []
        (folder / "salt").write_bytes(bytes(32))
        (folder / "admin").write_text(ADMIN)
        (folder / "engine-token").write_text(TOKEN)
        (folder / "tenants").mkdir()
        (folder / "tenants" / "acme").write_text("a" * 32)
        self.write(stage="Full", protectedPercent=0)

    def write(self, **rollout: object) -> None:
        self.policy.write_text(yaml.safe_dump(resource(**rollout)))

    async def start(self, *more: str) -> None:
        folder = self.folder
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "kvsteward_sidecar.main", "serve", "--engine", self.engine.url),
            *("--engine-token-file", str(folder / "engine-token"), "--salt-file", str(folder / "salt")),
            *("--admin-token-file", str(folder / "admin"), "--tenant-keys", str(folder / "tenants")),
            *("--state-dir", str(folder), "--policy-file", str(self.policy), "--host", "127.0.0.1"),
            *("--port", "0", "--admin-port", "0", "--drain-port", "0", "--closing-seconds", "0", *more),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self.reader = asyncio.create_task(self._read_errors())

    async def _read_errors(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.errors.append(line.decode())
            if found := re.search(r"(traffic|admin|drain) on .*:(\d+)$", line.decode().rstrip()):
                self.ports[found[1]] = int(found[2])

    async def opened(self) -> None:
        await until(lambda: len(self.ports) == 3, 20)

    def url(self, port: str, path: str) -> str:
        return f"http://127.0.0.1:{self.ports[port]}{path}"

    async def ended(self, seconds: float = 10) -> int:
        async with asyncio.timeout(seconds):
            status = await self.process.wait()
            await self.reader
        return status


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[Process]:
    engine = PolicyEngine()
    await engine.start()
    made = Process(tmp_path, engine)
    yield made
    if made.process.returncode is None:
        made.process.kill()
        await made.ended()
    await engine.stop()


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def status(client: aiohttp.ClientSession, url: str) -> int:
    async with client.get(url) as answer:
        return answer.status


async def ready(client: aiohttp.ClientSession, process: Process) -> None:
    async with asyncio.timeout(20):
        while await status(client, process.url("admin", "/readyz")) != 200:
            await asyncio.sleep(0.02)


async def test_it_is_ready_when_the_engine_is_and_stops_when_asked(
    process: Process, client: aiohttp.ClientSession
) -> None:
    await process.start()
    await process.opened()
    await ready(client, process)
    assert await status(client, process.url("traffic", "/health")) == 200
    process.process.send_signal(signal.SIGTERM)
    assert await process.ended() == 0


async def test_ports_open_while_the_engine_is_away_and_requests_are_told_to_come_back(
    process: Process, client: aiohttp.ClientSession
) -> None:
    await process.engine.stop()
    await process.start()
    await process.opened()
    assert await status(client, process.url("admin", "/healthz")) == 200
    assert await status(client, process.url("admin", "/engine/live")) == 200
    async with client.post(process.url("traffic", "/v1/chat/completions"), json={}) as answer:
        assert (answer.status, answer.headers["Retry-After"].isdecimal()) == (503, True)
    await process.engine.start()
    await ready(client, process)


async def test_an_edit_of_the_file_reaches_the_engine(process: Process, client: aiohttp.ClientSession) -> None:
    await process.start()
    await process.opened()
    await until(lambda: process.engine.epoch == 1)
    process.write(stage="Full", protectedPercent=0, killSwitch="Engaged")
    await until(lambda: process.engine.epoch == 2, 2)
    async with client.get(
        process.url("admin", "/v1/observation"), headers={"Authorization": f"Bearer {ADMIN}"}
    ) as answer:
        observation = json.loads(await answer.text())
    assert (observation["coldRequested"], observation["coldConfirmed"]) == (True, True)


async def test_a_latch_outlives_the_process(process: Process, client: aiohttp.ClientSession) -> None:
    await process.start()
    await process.opened()
    bearer = {"Authorization": f"Bearer {ADMIN}"}
    async with client.post(process.url("admin", "/v1/cold"), headers=bearer) as answer:
        assert answer.status == 200
    process.process.kill()
    await process.ended()
    process.ports.clear()
    await process.start()
    await process.opened()
    async with client.get(process.url("admin", "/v1/policy"), headers=bearer) as answer:
        assert (await answer.json())["latch"]["reason"] == "ColdRequested"


async def test_the_drain_port_answers_once_drained_and_the_process_then_ends_at_once(
    process: Process, client: aiohttp.ClientSession
) -> None:
    await process.start()
    await process.opened()
    await ready(client, process)
    async with client.post(process.url("drain", "/drain?seconds=5")) as answer:
        assert (await answer.json())["phase"] == "Drained"
    assert await status(client, process.url("traffic", "/v1/models")) == 503
    process.process.send_signal(signal.SIGTERM)
    assert await process.ended(3) == 0


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        pytest.param(lambda made: (made.folder / "salt").write_bytes(b"x"), "--salt-file", id="short-salt"),
        pytest.param(lambda made: made.policy.write_text("spec: ["), "is no YAML", id="no-yaml"),
        pytest.param(lambda made: made.write(stage="Halfway"), "stage", id="unknown-stage"),
        pytest.param(lambda made: made.policy.unlink(), "No such file", id="no-file"),
    ],
)
async def test_what_cannot_start_says_so_in_one_sentence(process: Process, spoil: object, said: str) -> None:
    spoil(process)
    await process.start()
    assert await process.ended(20) == 2
    assert process.errors[-1].startswith("kvsteward-sidecar: ")
    assert said in process.errors[-1]
    assert "Traceback" not in "".join(process.errors)


async def test_a_port_that_is_taken_is_named(process: Process) -> None:
    taken = process.engine.url.rpartition(":")[2]
    await process.start("--port", taken)
    assert await process.ended(20) == 2
    assert f"the traffic port 127.0.0.1:{taken} can't be opened" in process.errors[-1]

"""The proxies under test as processes of their own: nginx from Debian, and the sidecar."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

KEY = "bench-" + "k" * 40  # the one tenant's API key

_NGINX = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_max_body_size 8m; client_body_buffer_size 256k; keepalive_requests 1000000;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream engine {{ server 127.0.0.1:{engine}; keepalive 512; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=1024;
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_request_buffering off; proxy_read_timeout 1h;
    }}
  }}
}}
"""
_POLICY = """
apiVersion: kvsteward.dev/v1alpha1
kind: KVCachePolicy
metadata: {name: bench, namespace: bench, uid: 00000000-0000-0000-0000-000000000000}
spec:
  engine:
    model:
      name: fake
      revision: "1"
      tokenizerRevision: "1"
      source: {persistentVolumeClaim: {claimName: models, path: fake}}
  cache: {capacity: 1Gi}
  scopes: {identity: {source: APIKey, secret: tenant-keys}}
  rollout: {stage: Full}
"""


class CannotRun(Exception):
    """Something the bench needs isn't there; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server to send load to; `pid` None: the engine itself, in this process."""

    name: str
    port: int
    pid: int | None = None

    def cpu_seconds(self) -> float:
        """CPU time its process has used so far, all threads."""
        spent = 0
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            spent += int((task / "schedstat").read_text().split()[0])
        return spent / 1e9

    def peak_bytes(self) -> int:
        """The most memory its process has had resident."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise CannotRun(f"/proc/{self.pid}/status has no VmHWM: this bench needs Linux")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _pinned(core: int | None) -> list[str]:
    return [] if core is None else ["taskset", "-c", str(core)]


@asynccontextmanager
async def _process(command: list[str], log: Path) -> AsyncIterator[Process]:
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(*command, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


@asynccontextmanager
async def nginx(engine_port: int, core: int | None) -> AsyncIterator[Target]:
    """nginx passing everything through, one worker."""
    binary = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if binary is None:
        raise CannotRun("nginx is missing: install it with `apt-get install nginx-light`")
    with tempfile.TemporaryDirectory(prefix="bench-nginx-") as name:
        folder, port = Path(name), free_port()
        config = folder / "nginx.conf"
        config.write_text(_NGINX.format(folder=folder, port=port, engine=engine_port))
        command = [*_pinned(core), binary, "-p", name, "-e", f"{name}/error.log", "-c", str(config)]
        async with _process(command, folder / "out.log") as process:
            await _until_serving(port, process, folder / "out.log")
            yield Target("nginx", port, process.pid)


@asynccontextmanager
async def sidecar(engine_port: int, core: int | None) -> AsyncIterator[Target]:
    """The sidecar at stage Full with one tenant, as `kvsteward local` runs it."""
    with tempfile.TemporaryDirectory(prefix="bench-sidecar-") as name:
        folder, port = Path(name), free_port()
        (folder / "policy.yaml").write_text(_POLICY)
        (folder / "tenants").mkdir()
        (folder / "tenants" / "acme").write_text(KEY + "\n")
        (folder / "salt").write_bytes(os.urandom(32))
        (folder / "admin-token").write_text(os.urandom(32).hex())
        (folder / "engine-token").write_text(os.urandom(32).hex())
        (folder / "state").mkdir()
        options = {
            "--engine": f"http://127.0.0.1:{engine_port}",
            "--engine-token-file": folder / "engine-token",
            "--salt-file": folder / "salt",
            "--admin-token-file": folder / "admin-token",
            "--tenant-keys": folder / "tenants",
            "--state-dir": folder / "state",
            "--policy-file": folder / "policy.yaml",
            "--port": port,
            "--admin-port": free_port(),
            "--drain-port": free_port(),
        }
        program = [sys.executable, "-m", "kvsteward_sidecar.main", "serve"]
        command = [*_pinned(core), *program, *(str(part) for pair in options.items() for part in pair)]
        async with _process(command, folder / "out.log") as process:
            await _until_serving(port, process, folder / "out.log")
            yield Target("sidecar", port, process.pid)


async def _until_serving(port: int, process: Process, log: Path) -> None:
    """Until GET /health is answered 200."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and process.returncode is None:
        if await asyncio.to_thread(_healthy, port):
            return
        await asyncio.sleep(0.05)
    raise CannotRun(f"nothing serves on port {port}:\n{await asyncio.to_thread(log.read_text, errors='replace')}")


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:  # refused, timed out, or not 200
        return False

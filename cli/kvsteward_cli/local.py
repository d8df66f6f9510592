"""`kvsteward local`: an engine and a sidecar from a policy file, with no cluster.

The sidecar follows the file and compiles it into the same document that an operator would write, so stage, switch,
quotas and tenants behave as in a pod. What only pods have (replicas, image, resources, template, source) is named at
the start and has no effect here.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from kvsteward_contract import wire
from kvsteward_contract.policy import (
    Engine,
    IdentitySource,
    InvalidPolicy,
    Policy,
    decode_policy,
    semantic_refusals,
)

from kvsteward_cli.children import Child, start
from kvsteward_cli.errors import CommandFailed

HOST = "127.0.0.1"
LOCAL_TENANT = "local"
POLL_SECONDS = 0.1
ENGINE_STOP_SECONDS = 5  # its requests have been drained by the sidecar before it is asked


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """The command line; ports 0 stand for free ones."""

    file: Path
    model: Path
    port: int
    admin_port: int
    api_keys: tuple[str, ...]  # TENANT=KEY
    admin_token_file: Path | None
    gateway_secret_file: Path | None


def run_local(options: LocalOptions) -> None:
    """Until SIGINT or SIGTERM. Raises CommandFailed."""
    policy = read_policy(options.file)
    if not options.model.exists():
        raise CommandFailed(f"--model {options.model} does not exist; `kvsteward model fetch smollm2 DIR` makes one", 2)
    if named := without_effect(policy.spec.engine):
        say(f"of the policy, only pods use {', '.join(named)}")
    with tempfile.TemporaryDirectory(prefix="kvsteward-") as folder:
        asyncio.run(Local(options, policy, Path(folder)).run())


def read_policy(file: Path) -> Policy:
    """The policy as it is at the start. Raises CommandFailed."""
    from kvsteward_sidecar.yaml_text import InvalidYaml, document

    try:
        policy = decode_policy(document(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise CommandFailed(f"-f {file} can't be read: {error.strerror}", 2) from None
    except (InvalidYaml, UnicodeDecodeError) as error:
        raise CommandFailed(f"-f {file} is no YAML: {error}", 2) from None
    except InvalidPolicy as error:
        raise CommandFailed(f"-f {file} was not accepted: {error}", 2) from None
    if refusals := semantic_refusals(policy.spec):
        raise CommandFailed(f"-f {file} was not accepted: {refusals[0].message}", 2)
    return policy


def without_effect(engine: Engine) -> list[str]:
    """Fields that were set and mean nothing without pods."""
    plain = Engine(model=engine.model)
    names = ("replicas", "image", "resources", "template")
    return [f"spec.engine.{name}" for name in names if getattr(engine, name) != getattr(plain, name)]


def write_keys(folder: Path, api_keys: tuple[str, ...], source: IdentitySource) -> str:
    """API keys as a mounted Secret has them. With none given, one is made up; it is returned. Raises CommandFailed."""
    from kvsteward_sidecar.tenants import InvalidTenants, read_keys

    made = ""
    if not api_keys and source is IdentitySource.API_KEY:
        made = secrets.token_urlsafe(32)
        api_keys = (f"{LOCAL_TENANT}={made}",)
    folder.mkdir(mode=0o700)
    for pair in api_keys:
        tenant, found, key = pair.partition("=")
        if not found or not tenant or "/" in tenant or tenant.startswith("."):
            raise CommandFailed(f"--api-key must look like TENANT=KEY, not {pair.partition('=')[0]!r}", 2)
        with (folder / tenant).open("a", encoding="utf-8") as file:
            file.write(key + "\n")
    try:
        read_keys(folder)
    except InvalidTenants as error:
        why = str(error).replace(f"{folder}/", "").replace(f" in {folder}", "")
        raise CommandFailed(f"--api-key: {why}", 2) from None
    return made


class Local:
    """One engine and one sidecar, from start to stop, in a folder that is the caller's to remove."""

    def __init__(self, options: LocalOptions, policy: Policy, folder: Path) -> None:
        self.options, self.policy, self.folder = options, policy, folder
        self.port, self.admin_port = options.port or free_port(), options.admin_port or free_port()
        self.engine_port, self.drain_port = free_port(), free_port()
        self.token_file = folder / wire.ENGINE_TOKEN_FILE
        self.children: list[Child] = []

    async def run(self) -> None:
        """Until asked to stop. Raises CommandFailed when a child ends by itself."""
        stop = asyncio.Event()
        again = asyncio.Event()

        def asked() -> None:
            (again if stop.is_set() else stop).set()

        loop = asyncio.get_running_loop()
        for one in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(one, asked)
        self._write_secrets()
        parts = (("sidecar", self.sidecar_arguments()), ("engine", self.engine_arguments()))
        try:
            for name, arguments in parts:
                # The sidecar's stdout has the receipts; the engine's would be taken for our own words.
                quiet = name == "engine"
                self.children.append(await start(name, f"kvsteward_{name}.main", arguments, words_to_stderr=quiet))
            serving = asyncio.create_task(self._announce())
            await self._until(stop, serving)
        finally:
            stopping = asyncio.create_task(self._stop())
            hurry = asyncio.create_task(again.wait())
            await asyncio.wait([stopping, hurry], return_when=asyncio.FIRST_COMPLETED)
            for child in self.children:
                child.kill()
            await stopping
            hurry.cancel()

    async def _until(self, stop: asyncio.Event, serving: asyncio.Task[None]) -> None:
        """Returns when `stop` is set; raises CommandFailed as soon as a child has ended."""
        stopped = asyncio.create_task(stop.wait())
        ends = {asyncio.create_task(child.process.wait()): child for child in self.children}
        try:
            await asyncio.wait([stopped, *ends], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (stopped, serving, *ends):
                task.cancel()
        if not stop.is_set():
            child = next(child for child in ends.values() if child.ended)
            raise CommandFailed(f"the {child.name} ended by itself with status {child.process.returncode}; see above")

    async def _announce(self) -> None:
        """Says where it serves, as soon as it does."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as client:
            while not await self._ready(client):  # noqa: ASYNC110 - another process has no event to wait for
                await asyncio.sleep(POLL_SECONDS)
        print(f"ready http://{HOST}:{self.port}", flush=True)

    async def _ready(self, client: aiohttp.ClientSession) -> bool:
        try:
            async with client.get(f"http://{HOST}:{self.admin_port}/readyz") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _stop(self) -> None:
        """The sidecar first: it drains, and the engine must still be there for what runs."""
        drain_seconds = self.policy.spec.rollover.drain_seconds
        for child in self.children:
            await child.stop(drain_seconds if child.name == "sidecar" else ENGINE_STOP_SECONDS)

    def _write_secrets(self) -> None:
        from kvsteward_sidecar.settings import make_token

        (self.folder / wire.SALT_KEY).write_bytes(secrets.token_bytes(32))
        (self.folder / "state").mkdir()
        make_token(self.token_file)
        identity = self.policy.spec.scopes.identity
        made = write_keys(self.folder / "tenants", self.options.api_keys, identity.source)
        if made:
            say(f"no --api-key was given; use this one, of tenant {LOCAL_TENANT}: {made}")
        file = self.options.admin_token_file
        if file is not None and not file.exists():
            try:
                make_token(file)
            except OSError as error:
                raise CommandFailed(f"--admin-token-file {file} can't be made: {error.strerror}", 2) from None

    def engine_arguments(self) -> list[str]:
        """The flags that the operator would give the engine's container."""
        engine, cache = self.policy.spec.engine, self.policy.spec.cache
        options = {
            "--model": self.options.model,
            "--served-model-name": engine.model.name,
            "--model-revision": engine.model.revision,
            "--tokenizer-revision": engine.model.tokenizer_revision,
            "--host": HOST,
            "--port": self.engine_port,
            "--token-file": self.token_file,
            "--capacity": cache.capacity,
            "--block-tokens": cache.block_tokens,
            "--dtype": cache.dtype.value,
            "--max-tokens": engine.model.max_tokens,
            "--max-concurrent": engine.max_concurrent,
            "--drain-seconds": ENGINE_STOP_SECONDS,
        }
        return ["serve", *flags(options)]

    def sidecar_arguments(self) -> list[str]:
        options: dict[str, object] = {
            "--engine": f"http://{HOST}:{self.engine_port}",
            "--engine-token-file": self.token_file,
            "--salt-file": self.folder / wire.SALT_KEY,
            "--tenant-keys": self.folder / "tenants",
            "--state-dir": self.folder / "state",
            "--policy-file": self.options.file,
            "--host": HOST,
            "--port": self.port,
            "--admin-port": self.admin_port,
            "--drain-port": self.drain_port,
            "--drain-seconds": self.policy.spec.rollover.drain_seconds,
            "--closing-seconds": 0,  # nobody balances over a laptop
        }
        if self.options.admin_token_file is not None:
            options["--admin-token-file"] = self.options.admin_token_file
        if self.options.gateway_secret_file is not None:
            options["--gateway-secret-file"] = self.options.gateway_secret_file
        return ["serve", *flags(options)]


def flags(options: dict[str, object]) -> list[str]:
    return [str(part) for pair in options.items() for part in pair]


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def say(text: str) -> None:
    print(f"kvsteward: {text}", file=sys.stderr, flush=True)

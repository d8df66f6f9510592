"""What the sidecar is started with: the command line, checked, and the secrets it names, read."""

from __future__ import annotations

import argparse
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kvsteward_contract import wire

from .drain import CLOSING_SECONDS, MAX_DRAIN_SECONDS

MIN_SALT, MIN_TOKEN = 32, 16  # bytes, characters
TOKEN_BYTES = 32
_TOKEN = re.compile(rf"[!-~]{{{MIN_TOKEN},}}")
EVERYWHERE = "0.0.0.0"  # noqa: S104 - clients and the operator come from outside the pod


class StartError(Exception):
    """The sidecar can't start as it was told to; one sentence that says what to change."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A checked command line."""

    engine: str  # URL
    engine_token_file: Path | None
    make_engine_token: bool
    salt_file: Path
    admin_token_file: Path | None
    tenant_keys: Path | None
    gateway_secret_file: Path | None
    state_dir: Path
    policy_file: Path | None  # None: --kubernetes
    namespace: str
    policy: str
    document: str
    host: str
    port: int
    admin_port: int
    drain_port: int
    drain_seconds: int
    closing_seconds: float


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="kvsteward-sidecar", description="Governs one engine's KV-cache reuse.")
    serve = top.add_subparsers(dest="command", required=True).add_parser("serve", help="serve until told to stop")
    add = serve.add_argument
    add("--engine", default=f"http://127.0.0.1:{wire.ENGINE_PORT}", help="the engine's URL (%(default)s)")
    add("--engine-token-file", type=Path, help="the token that the engine wants")
    add("--make-engine-token", action="store_true", help="write a random --engine-token-file if there is none")
    add("--salt-file", type=Path, required=True, help=f"the policy's secret, at least {MIN_SALT} bytes")
    add("--admin-token-file", type=Path, help="the bearer token of the admin port's /v1 routes; none: they answer 401")
    add("--tenant-keys", type=Path, help="folder with one file of API keys a tenant")
    add("--gateway-secret-file", type=Path, help="the token by which a gateway proves itself (identity source Header)")
    add("--state-dir", type=Path, required=True, help="folder that outlives restarts of the sidecar")
    add("--policy-file", type=Path, help="a KVCachePolicy to follow, instead of --kubernetes")
    add("--kubernetes", action="store_true", help="follow the policy through the API server")
    add("--namespace", default="", help="--kubernetes: of the policy")
    add("--policy", default="", help="--kubernetes: the KVCachePolicy's name")
    add("--document", default="", help="--kubernetes: the ConfigMap with the policy document")
    add("--host", default=EVERYWHERE, help="where traffic and admin ports listen (%(default)s)")
    add("--port", type=int, default=wire.TRAFFIC_PORT)
    add("--admin-port", type=int, default=wire.ADMIN_PORT)
    add("--drain-port", type=int, default=wire.DRAIN_PORT, help="on loopback")
    add("--drain-seconds", type=int, default=120, help="what runs may finish within this when the sidecar stops")
    add("--closing-seconds", type=float, default=CLOSING_SECONDS, help="of these arrivals are still served at first")
    return top


def parse(arguments: list[str] | None) -> Settings:
    """Raises StartError; argparse itself ends the process with status 2 on an unknown or missing option."""
    given = parser().parse_args(arguments)
    if given.kubernetes == (given.policy_file is not None):
        raise StartError("give either --kubernetes or --policy-file FILE")
    if given.kubernetes and not (given.namespace and given.policy and given.document):
        raise StartError("--kubernetes needs --namespace, --policy and --document")
    url = urlsplit(given.engine)
    if url.scheme != "http" or not url.hostname or url.path not in ("", "/"):
        raise StartError(f"--engine must look like http://127.0.0.1:8000, not {given.engine}")
    if not 0 <= given.drain_seconds <= MAX_DRAIN_SECONDS or not 0 <= given.closing_seconds <= given.drain_seconds:
        raise StartError(f"--drain-seconds must be 0 to {MAX_DRAIN_SECONDS}, and --closing-seconds not more than it")
    if given.make_engine_token and given.engine_token_file is None:
        raise StartError("--make-engine-token needs --engine-token-file, the file to write")
    options = {name: value for name, value in vars(given).items() if name not in ("command", "kubernetes")}
    return Settings(**{**options, "engine": given.engine.rstrip("/")})


def read_salt(file: Path) -> bytes:
    """Raises StartError."""
    try:
        salt = file.read_bytes()
    except OSError as error:
        raise StartError(f"--salt-file {file} can't be read: {error.strerror}") from None
    if len(salt) < MIN_SALT:
        raise StartError(f"--salt-file {file} holds {len(salt)} bytes; it needs {MIN_SALT} random ones")
    return salt


def engine_token(settings: Settings) -> str:
    """The engine's token, made first if asked to and it isn't there yet. Raises StartError."""
    file = settings.engine_token_file
    if file is None:
        return ""
    try:
        if settings.make_engine_token and not file.exists():
            make_token(file)
        token = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it isn't ASCII"
        raise StartError(f"--engine-token-file {file} can't be used: {why}") from None
    if not _TOKEN.fullmatch(token):  # what goes into a header as it is must end no line of it
        raise StartError(f"--engine-token-file {file} holds no token of at least {MIN_TOKEN} visible ASCII characters")
    return token


def make_token(file: Path) -> None:
    """A random token, mode 0400; whoever reads the file while it appears finds all of it or nothing."""
    fresh = file.with_name(file.name + f".{os.getpid()}")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
    with os.fdopen(descriptor, "w") as opened:
        opened.write(secrets.token_hex(TOKEN_BYTES))
    try:
        os.link(fresh, file)  # fails when another process was first: its token counts
    except FileExistsError:
        pass
    finally:
        fresh.unlink()

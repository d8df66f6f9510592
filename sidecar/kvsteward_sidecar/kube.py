"""The API server, as far as a sidecar needs it: list and watch one named object of one kind.

The only module that speaks to the API server. It answers with `Seen`, `Absent`, `Confirmed` and `Unreachable` and never
ends by itself: what a dead connection, an expired resourceVersion, a refused token or a restarting server mean is
settled here. 401 and 403 are Unreachable, never Absent: a role that was deleted first says nothing about the policy.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

# The server ends a watch after this, and sends a bookmark just before: so the policy's age stays below it while all is
# well, and a connection that died without a word is noticed soon after.
WATCH_SECONDS = 30
INACTIVITY_SECONDS = WATCH_SECONDS + 10
LIST_SECONDS = 10
FIRST_BACKOFF, LAST_BACKOFF = 0.2, 10.0


@dataclass(frozen=True, slots=True)
class Seen:
    """The object as the API server has it now."""

    object: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Absent:
    """The API server says that there is no such object (any more)."""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The API server has just said that nothing changed (a bookmark)."""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """The API server could not be asked; `why` is one clause for a log line and the observation."""

    why: str


Change = Seen | Absent | Confirmed | Unreachable


class _Relist(Exception):
    """The watch can't go on from its resourceVersion (410)."""


class _Failed(Exception):
    """A request failed; the text is for people."""


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Where the API server is and how this pod proves itself."""

    url: str  # https://10.0.0.1:443, without a trailing slash
    token_file: Path | None  # read anew for each request: projected tokens are replaced while the pod runs
    tls: ssl.SSLContext | bool

    @classmethod
    def in_cluster(cls, environment: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> ApiServer:
        """From the variables and the projected volume of a pod. Raises ValueError with one sentence when not in one."""
        host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ValueError("--kubernetes needs a pod: KUBERNETES_SERVICE_HOST is not set; use --policy-file outside")
        authority = folder / "ca.crt"
        if not authority.is_file():
            raise ValueError(f"--kubernetes needs a service account: {authority} is not mounted into this container")
        bracketed = f"[{host}]" if ":" in host else host
        return cls(f"https://{bracketed}:{port}", folder / "token", ssl.create_default_context(cafile=str(authority)))

    def headers(self) -> dict[str, str]:
        """Raises OSError when the token can't be read."""
        if self.token_file is None:
            return {}
        return {"Authorization": f"Bearer {self.token_file.read_text().strip()}"}


async def follow(
    session: aiohttp.ClientSession,
    server: ApiServer,
    collection: str,
    name: str,
    *,
    watch_seconds: int = WATCH_SECONDS,
    inactivity_seconds: float = INACTIVITY_SECONDS,
) -> AsyncGenerator[Change, None]:
    """What becomes of the object `name` in `collection` (a path such as /api/v1/namespaces/n/configmaps), for ever."""
    failures = 0
    while True:
        try:
            version, listed = await _list(session, server, collection, name)
            yield listed
            failures = 0
            while True:
                began = asyncio.get_running_loop().time()
                events = _watch(session, server, collection, name, version, watch_seconds, inactivity_seconds)
                async with aclosing(events):
                    async for newest, change in events:
                        version = newest
                        yield change
                if asyncio.get_running_loop().time() - began < 1.0:
                    await asyncio.sleep(random.uniform(0.5, 1.0))  # a server that ends watches at once isn't hammered
        except _Relist:
            continue
        except _Failed as failure:
            yield Unreachable(str(failure))
            await asyncio.sleep(backoff(failures))
            failures += 1


def backoff(failures: int) -> float:
    """Seconds to wait after so many failures in a row: doubling, with jitter so that pods don't come back in step."""
    longest = min(LAST_BACKOFF, FIRST_BACKOFF * float(2 ** min(failures, 16)))
    return random.uniform(0.5, 1.0) * longest


async def _list(session: aiohttp.ClientSession, server: ApiServer, collection: str, name: str) -> tuple[str, Change]:
    query = {"fieldSelector": f"metadata.name={name}"}
    async with _request(session, server, collection, query, LIST_SECONDS) as answer:
        body = msgspec.json.decode(await answer.read())
    items = body.get("items") or []
    return str(body.get("metadata", {}).get("resourceVersion", "")), Seen(items[0]) if items else Absent()


async def _watch(
    session: aiohttp.ClientSession,
    server: ApiServer,
    collection: str,
    name: str,
    version: str,
    watch_seconds: int,
    inactivity_seconds: float,
) -> AsyncGenerator[tuple[str, Change], None]:
    """Events with the resourceVersion to go on from, until the server ends the watch."""
    query = {
        "fieldSelector": f"metadata.name={name}",
        "watch": "1",
        "allowWatchBookmarks": "true",
        "resourceVersion": version,
        "timeoutSeconds": str(watch_seconds),
    }
    async with _request(session, server, collection, query, None, inactivity_seconds) as answer:
        rest = b""
        async for chunk in answer.content.iter_any():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if line.strip():
                    version, change = _event(line, version)
                    yield version, change


def _event(line: bytes, version: str) -> tuple[str, Change]:
    event = msgspec.json.decode(line)
    kind, found = event.get("type"), event.get("object") or {}
    if kind == "ERROR":
        if found.get("code") == 410:
            raise _Relist
        raise _Failed(f"the watch failed: {found.get('message') or found}")
    version = str(found.get("metadata", {}).get("resourceVersion") or version)
    if kind == "BOOKMARK":
        return version, Confirmed()
    if kind == "DELETED":
        return version, Absent()
    return version, Seen(found)


@asynccontextmanager
async def _request(
    session: aiohttp.ClientSession,
    server: ApiServer,
    path: str,
    query: Mapping[str, str],
    total: float | None,
    silence: float | None = None,
) -> AsyncIterator[aiohttp.ClientResponse]:
    """One GET; every way to fail becomes _Failed or _Relist, also while its answer is read."""
    try:
        async with session.get(
            server.url + path,
            params=query,
            headers={"Accept": "application/json", **server.headers()},
            ssl=server.tls,
            timeout=aiohttp.ClientTimeout(total=total, connect=LIST_SECONDS, sock_read=silence),
            allow_redirects=False,
        ) as answer:
            if answer.status != 200:
                raise _status(answer.status, path, (await answer.read())[:300].decode("utf-8", "replace"))
            yield answer
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
        raise _Failed(f"GET {path}: {error or type(error).__name__}") from error


def _status(status: int, path: str, text: str) -> Exception:
    if status == 410:
        return _Relist()
    if status in (401, 403):
        return _Failed(f"GET {path}: the API server refused this pod's service account ({status}); check its Role")
    return _Failed(f"GET {path}: {status} {text}")

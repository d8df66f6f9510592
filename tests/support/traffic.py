"""What the sidecar's request path stands on in tests: an engine that answers as a script says, raw HTTP clients, and a
sidecar whose traffic port is open. Bytes on both sides are written and read by hand, so that nothing is tidied up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from kvsteward_contract.directive import Directive, EnginePolicy, EngineState, Outcome, decode_directive, encode
from kvsteward_contract.document import PolicyDocument, canonical
from kvsteward_sidecar.control import Control
from kvsteward_sidecar.engine_link import EngineAddress
from kvsteward_sidecar.proxy import Proxy
from support.control_plane import TOKEN, document, resource, running_control, until

ACME, GLOBEX = "a" * 32, "g" * 32  # the keys of running_control's two tenants
TAIL = b"data: [DONE]\n\n"
SECONDS = 10.0  # for any one answer


def event(text: str = "x") -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


@dataclass
class Seen:
    """One request as the engine got it."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes
    left: asyncio.Event = field(default_factory=asyncio.Event)  # its connection closed

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name.lower()]

    @property
    def directive(self) -> Directive:
        (value,) = self.values("x-kv-directive")
        return decode_directive(value)

    @property
    def json(self) -> dict[str, Any]:
        return dict(json.loads(self.body))

    def outcome(self, **fields: Any) -> bytes:
        directive = self.directive
        return encode(Outcome(request=directive.request, mode=directive.mode, epoch=directive.epoch, **fields))


Script = Callable[[Seen, asyncio.StreamWriter], Awaitable[None]]


async def stream(seen: Seen, writer: asyncio.StreamWriter) -> None:
    """Three events, the outcome, [DONE]; each a chunk of its own."""
    writer.write(stream_head())
    for text in "abc":
        await write_chunk(writer, event(text))
    await write_chunk(writer, b": kv-outcome " + seen.outcome(prompt_tokens=32, reused_tokens=16) + b"\n\n")
    await write_chunk(writer, TAIL)
    await write_chunk(writer, b"")


async def whole(seen: Seen, writer: asyncio.StreamWriter) -> None:
    """One JSON object with the outcome in a header."""
    outcome = seen.outcome(prompt_tokens=32, reused_tokens=16).decode() if seen.values("x-kv-directive") else ""
    writer.write(answer(200, b'{"ok":true}', {"X-KV-Outcome": outcome} if outcome else {}))
    await writer.drain()


def stream_head(extra: str = "") -> bytes:
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    return f"{head}{extra}\r\n".encode()


async def write_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    """A chunk in a segment of its own."""
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
    await writer.drain()
    await asyncio.sleep(0.002)


def answer(status: int, body: bytes, headers: dict[str, str] | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status} Whatever", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class ScriptedEngine:
    """Policy routes as the contract has them; everything else goes to `script` and is kept in `seen`."""

    def __init__(self) -> None:
        self.script: Script = whole
        self.seen: list[Seen] = []
        self.connections = 0  # that carried a request of `seen`
        self.epoch, self.version = 0, ""
        self.outcomes: dict[str, Outcome] = {}
        self.url = ""
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=1 << 20)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        """As a process that dies: no connection ends cleanly, none is taken."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()
        await until(lambda: not self._writers)

    def close_idle(self) -> None:
        """Closes every connection, as an engine does with those that were idle for long."""
        for writer in list(self._writers):
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        current: list[Seen] = []
        counted = False
        try:
            while True:
                seen = await _read_request(reader)
                if seen is None:
                    return
                if seen.line.split()[1].startswith("/kv/v1/"):
                    writer.write(self._control(seen))
                    continue
                self.connections += not counted
                counted = True
                self.seen.append(seen)
                current = [seen]
                watch = asyncio.create_task(_until_gone(reader, seen))
                try:
                    await self.script(seen, writer)
                finally:
                    watch.cancel()
                    await asyncio.wait([watch])
                current = []
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            for one in current:
                one.left.set()
            self._writers.discard(writer)
            writer.close()

    def _control(self, seen: Seen) -> bytes:
        target = seen.line.split()[1]
        if target == "/kv/v1/policy":
            if seen.body:
                policy = msgspec.json.decode(seen.body, type=EnginePolicy)
                self.epoch, self.version = policy.epoch, policy.version
            state = EngineState("one", self.epoch, self.version, 0.0, "build", "float32", 16, 1024, 256, 512, "tiny")
            return answer(200, encode(state))
        if target.startswith("/kv/v1/outcomes/"):
            outcome = self.outcomes.get(target.rsplit("/", 1)[1])
            return answer(404, b"{}") if outcome is None else answer(200, encode(outcome))
        return answer(200, b"{}")


async def _until_gone(reader: asyncio.StreamReader, seen: Seen) -> None:
    """Looks for the end of the connection without taking a byte of a next request."""
    while not (reader.at_eof() or reader.exception()):
        await asyncio.sleep(0.001)
    seen.left.set()


async def _read_request(reader: asyncio.StreamReader) -> Seen | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    line, *rest = head[:-4].split("\r\n")
    headers = [(name, value.strip()) for name, _, value in (one.partition(":") for one in rest)]
    length = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
    return Seen(line, headers, await reader.readexactly(length) if length else b"")


class Cut(Exception):
    """The connection ended before the answer did."""


@dataclass
class Got:
    """One answer as the client got it."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    chunks: list[bytes] = field(default_factory=list)

    def header(self, name: str) -> str | None:
        values = [value for key, value in self.headers if key.lower() == name.lower()]
        assert len(values) < 2, f"{name} is there twice"
        return values[0] if values else None

    @property
    def error(self) -> dict[str, Any]:
        return dict(json.loads(self.body)["error"])


class Client:
    """One connection to the traffic port."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> Got:
        """Raises Cut, and TimeoutError where nothing more comes."""
        async with asyncio.timeout(SECONDS):
            return await self._answer()

    async def _answer(self) -> Got:
        try:
            got = await self.head()
            if got.status == 100:
                return got
            if got.header("transfer-encoding") == "chunked":
                while chunk := await self.chunk():
                    got.chunks.append(chunk)
                got.body = b"".join(got.chunks)
            elif (length := got.header("content-length")) is not None:
                got.body = await self.reader.readexactly(int(length))
            else:
                got.body = await self.reader.read()
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise Cut from error
        return got

    async def head(self) -> Got:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *rest = head[:-4].split("\r\n")
        headers = [(name, value.strip()) for name, _, value in (one.partition(":") for one in rest)]
        return Got(int(line.split()[1]), headers, b"")

    async def chunk(self) -> bytes:
        """The next chunk; empty: the last one."""
        async with asyncio.timeout(SECONDS):
            size = int((await self.reader.readuntil(b"\r\n"))[:-2], 16)
            data = await self.reader.readexactly(size)
            assert await self.reader.readexactly(2) == b"\r\n"
            return data

    async def ask(self, data: bytes) -> Got:
        await self.send(data)
        return await self.answer()

    def leave(self) -> None:
        self.writer.transport.abort()


def chat(
    body: dict[str, Any] | bytes | None = None,
    headers: dict[str, str] | list[tuple[str, str]] | None = None,
    key: str | None = ACME,
    target: str = "/v1/chat/completions",
    version: str = "1.1",
) -> bytes:
    """A chat completion's request, as bytes."""
    if body is None:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {target} HTTP/{version}", "Host: sidecar", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(data)}"]
    if key is not None:
        lines.append(f"Authorization: Bearer {key}")
    pairs = headers.items() if isinstance(headers, dict) else headers or []
    lines += [f"{name}: {value}" for name, value in pairs]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def get(target: str, method: str = "GET") -> bytes:
    return f"{method} {target} HTTP/1.1\r\nHost: sidecar\r\nAuthorization: Bearer {ACME}\r\n\r\n".encode()


class Sidecar:
    """The traffic port over a real Control."""

    def __init__(self, control: Control, port: int) -> None:
        self.control, self.port = control, port
        self._clients: list[Client] = []

    async def connect(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 22))
        self._clients.append(client)
        return client

    async def ask(self, data: bytes) -> Got:
        """On a connection of its own."""
        return await (await self.connect()).ask(data)

    def forget(self, client: Client) -> None:
        """The client stays when the sidecar goes; it is the test's to close."""
        self._clients.remove(client)

    def close(self) -> None:
        for client in self._clients:
            client.leave()

    def dropped(self) -> dict[str, int]:
        return dict(self.control.telemetry.dropped)

    async def receipt(self, identity: str | None) -> Any:
        assert identity
        await until(lambda: self.control.receipts.find(identity))
        return self.control.receipts.find(identity)


@asynccontextmanager
async def running_sidecar(
    folder: Path,
    engine: ScriptedEngine,
    policy: PolicyDocument | None = None,
    max_body: int = 1 << 20,
    max_receiving: int = 1 << 27,
) -> AsyncIterator[Sidecar]:
    """At stage Full, nobody protected, unless `policy` says otherwise; the engine has confirmed it."""
    if policy is None:
        policy = document(stage="Full", protectedPercent=0)
    async with running_control(folder, engine) as control:  # type: ignore[arg-type]
        control.policy.take_document(canonical(policy))
        control.policy.take_resource(resource(stage=policy.rollout.stage.value))
        await until(lambda: control.link.acknowledged)
        proxy = Proxy(control, EngineAddress(engine.url, TOKEN), max_body=max_body, max_receiving=max_receiving)
        runner = web.ServerRunner(proxy.server(), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        sidecar = Sidecar(control, runner.addresses[0][1])
        try:
            yield sidecar
        finally:
            sidecar.close()
            await runner.cleanup()
            proxy.close()

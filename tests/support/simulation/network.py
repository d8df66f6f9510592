"""The wires between the parts: a stand-in for aiohttp's client session, with latency, partitions and silent streams.

The only thing simulated between the product's modules. A request reaches a server or not, its answer comes back or not;
a stream's chunks come in order, late, or from some moment on not at all (as when a NAT entry is dropped).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from multidict import CIMultiDict

from .clock import SimulatedLoop

CONNECT_SECONDS = 5.0  # a connection that nobody answers is given up after this


@dataclass(slots=True)
class Request:
    """What a server sees of a request."""

    method: str
    path: str
    query: dict[str, str]
    headers: CIMultiDict[str]
    body: bytes
    source: str  # who asks


Chunk = bytes | Exception | None  # None: a clean end


@dataclass(slots=True, eq=False)
class Stream:
    """The sending end of an answer that goes on. `lost`: the client will hear nothing more, not even an end."""

    source: str
    about: str
    lost: bool = False
    closed: bool = False
    _receiver: Callable[[Chunk], None] | None = None
    _early: list[Chunk] = field(default_factory=list)

    def attach(self, receiver: Callable[[Chunk], None]) -> None:
        """The client has the answer's head; what was sent before goes to it now."""
        self._receiver = receiver
        for chunk in self._early:
            receiver(chunk)

    def send(self, chunk: Chunk) -> None:
        if self.closed:
            return
        if self._receiver is None:
            self._early.append(chunk)
        else:
            self._receiver(chunk)

    def close(self, broken: bool = False) -> None:
        """A clean end, or a broken connection."""
        self.send(aiohttp.ClientPayloadError("the connection broke") if broken else None)
        self.closed = True


@dataclass(slots=True)
class Reply:
    """A server's answer: a body, or a stream that goes on."""

    status: int
    body: bytes = b""
    stream: Stream | None = None


Handler = Callable[[Request], Awaitable[Reply]]


@dataclass(slots=True)
class Link:
    """What the way between two parties is like right now."""

    cut: bool = False  # nothing arrives, nobody is told
    slow: float = 0.0  # seconds on top of the usual latency, each way at most


class Server:
    """One listening process. `stop` is a crash: whoever waits for it sees the connection break."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.running = True
        self._handling: set[asyncio.Task[Reply]] = set()
        self._streams: list[Stream] = []

    async def answer(self, request: Request) -> Reply:
        """Raises ServerDisconnectedError when the process ends first. A client that goes doesn't end the handling."""
        task = asyncio.ensure_future(self.handler(request))
        self._handling.add(task)
        task.add_done_callback(self._handling.discard)
        await asyncio.wait({task})
        if task.cancelled():
            raise aiohttp.ServerDisconnectedError
        reply = task.result()
        if reply.stream is not None:
            self._streams.append(reply.stream)
        return reply

    def stop(self) -> None:
        self.running = False
        for task in list(self._handling):
            task.cancel()
        for stream in self._streams:
            stream.close(broken=True)


class Network:
    """All servers by (host, port), and the links between parties."""

    def __init__(self, loop: SimulatedLoop, chance: random.Random) -> None:
        self.loop, self.chance = loop, chance
        self.servers: dict[tuple[str, int], Server] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self.streams: list[tuple[str, str, Stream]] = []  # client, server host, stream

    def link(self, client: str, host: str) -> Link:
        return self._links.setdefault((client, host), Link())

    def heal(self) -> None:
        """Every link is as at the start; what was lost stays lost."""
        self._links.clear()

    def cut(self, client: str, host: str) -> None:
        """From now on nothing passes; streams under way go silent for ever."""
        self.link(client, host).cut = True
        self.silence(client, host)

    def silence(self, client: str, host: str, about: str = "") -> int:
        """Streams under way between the two that carry `about` in their address go silent. How many."""
        found = [
            stream
            for name, server, stream in self.streams
            if (name, server) == (client, host) and about in stream.about and not stream.closed and not stream.lost
        ]
        for stream in found:
            stream.lost = True
        return len(found)

    def latency(self, client: str, host: str) -> float:
        slow = self.link(client, host).slow
        return self.chance.uniform(0.0005, 0.003) + (self.chance.uniform(0.0, slow) if slow else 0.0)


class Session:
    """As much of aiohttp.ClientSession as the product uses. `aliases` names what a host (127.0.0.1) means here."""

    def __init__(
        self,
        network: Network,
        client: str,
        aliases: Mapping[str, str] | None = None,
        timeout: aiohttp.ClientTimeout | None = None,
    ) -> None:
        self._network, self._client, self._aliases = network, client, aliases or {}
        self._timeout = timeout or aiohttp.ClientTimeout()

    def get(self, url: Any, **options: Any) -> _Context:
        return self.request("GET", url, **options)

    def post(self, url: Any, **options: Any) -> _Context:
        return self.request("POST", url, **options)

    def request(
        self,
        method: str,
        url: Any,
        *,
        params: Mapping[str, str] | None = None,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: aiohttp.ClientTimeout | None = None,
        ssl: Any = None,
        allow_redirects: bool = True,
    ) -> _Context:
        parts = urlsplit(str(url))
        host = self._aliases.get(parts.hostname or "", parts.hostname or "")
        query = dict(pair.split("=", 1) for pair in parts.query.split("&") if "=" in pair) | dict(params or {})
        request = Request(method, parts.path, query, CIMultiDict(headers or {}), data or b"", self._client)
        return _Context(self._perform(request, host, parts.port or 443, timeout or self._timeout))

    async def _perform(self, request: Request, host: str, port: int, timeout: aiohttp.ClientTimeout) -> Response:
        network, client = self._network, self._client
        try:
            async with asyncio.timeout(timeout.total):
                await self._pass(host, min(timeout.connect or CONNECT_SECONDS, CONNECT_SECONDS))
                server = network.servers.get((host, port))
                if server is None or not server.running:
                    raise aiohttp.ClientConnectionError(f"cannot connect to {host}:{port}")
                reply = await server.answer(request)
                await self._pass(host, None)
        except TimeoutError:
            raise aiohttp.ServerTimeoutError(f"{host}:{port} did not answer in time") from None
        if reply.stream is not None:
            network.streams.append((client, host, reply.stream))
        return Response(network, self, host, reply, timeout.sock_read)

    async def _pass(self, host: str, patience: float | None) -> None:
        """One way over the link; for ever (or `patience` seconds, then TimeoutError) where it is cut."""
        if self._network.link(self._client, host).cut:
            async with asyncio.timeout(patience):
                await asyncio.get_running_loop().create_future()
        await asyncio.sleep(self._network.latency(self._client, host))
        if self._network.link(self._client, host).cut:
            async with asyncio.timeout(patience):
                await asyncio.get_running_loop().create_future()


class _Context:
    """Awaitable, and an async context manager, as what aiohttp's methods return."""

    def __init__(self, request: Coroutine[Any, Any, Response]) -> None:
        self._request = request

    def __await__(self) -> Generator[Any, None, Response]:
        return self._request.__await__()

    async def __aenter__(self) -> Response:
        self._response = await self._request
        return self._response

    async def __aexit__(self, *_: object) -> None:
        self._response.close()


class Response:
    """As much of aiohttp.ClientResponse as the product uses."""

    def __init__(self, network: Network, session: Session, host: str, reply: Reply, silence: float | None) -> None:
        self.status, self._body, self._silence = reply.status, reply.body, silence
        self._stream = reply.stream
        self._chunks: asyncio.Queue[Chunk] = asyncio.Queue()
        self._begun = False
        self.content = self
        if reply.stream is not None:
            self._receive(network, session, host, reply.stream)

    def _receive(self, network: Network, session: Session, host: str, stream: Stream) -> None:
        arrival = 0.0

        def deliver(chunk: Chunk) -> None:
            nonlocal arrival
            if stream.lost:
                return
            arrival = max(arrival + 1e-6, network.loop.time() + network.latency(session._client, host))
            network.loop.call_at(arrival, lambda: None if stream.lost else self._chunks.put_nowait(chunk))

        stream.attach(deliver)

    async def read(self, limit: int = -1) -> bytes:
        self._begun = True
        return self._body

    def at_eof(self) -> bool:
        return self._begun

    async def iter_any(self) -> AsyncIterator[bytes]:
        while True:
            try:
                async with asyncio.timeout(self._silence):
                    chunk = await self._chunks.get()
            except TimeoutError:
                raise aiohttp.SocketTimeoutError("the stream has been silent for too long") from None
            if chunk is None:
                return
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    def close(self) -> None:
        if self._stream is not None:
            self._stream.closed = True

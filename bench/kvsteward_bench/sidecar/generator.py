"""Clients: HTTP by hand on an asyncio protocol, one request at a time a connection, kept alive."""

import asyncio
import time
from collections.abc import Callable

import msgspec

_END = b"0\r\n\r\n"


class Broken(Exception):
    """The answer was not a whole 200."""


def request(host: str, *, prompt_bytes: int, stream: bool, chunks: int, first_us: int, gap_us: int, key: str) -> bytes:
    """A chat completion whose body is about `prompt_bytes` long; see fake_engine for what the numbers ask for."""
    body = msgspec.json.encode(
        {
            "model": "fake",
            "stream": stream,
            "max_tokens": chunks,
            "seed": first_us,
            "top_k": gap_us,
            "messages": [{"role": "user", "content": "lorem ipsum " * (prompt_bytes // 12)}],
        }
    )
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Client(asyncio.Protocol):
    """One connection. After `ask`, `first` and `events` say when the first data came and how many events did."""

    def __init__(self, on_events: Callable[[], None] | None = None) -> None:
        self._on_events = on_events  # called when events came
        self.transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._tail = b""
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self._done is not None and not self._done.done():
            self._done.set_exception(Broken(f"connection lost: {exc}; head {self._head[:200]!r}"))

    def leave(self, politely: bool) -> float:
        """Closes the connection, whatever it waits for: with FIN, else with RST. Returns time.perf_counter()."""
        self._done = None
        now = time.perf_counter()
        if self.transport is not None:
            if politely:
                self.transport.close()
            else:
                self.transport.abort()
        return now

    async def ask(self, data: bytes, stream: bool) -> float:
        """Sends and waits for the whole answer. Returns seconds to the first data event (or to the answer)."""
        self.start(data, stream)
        await self.finished()
        return self.first - self.sent

    def start(self, data: bytes, stream: bool) -> None:
        if self.transport is None:
            raise Broken("not connected")
        self._done = asyncio.get_running_loop().create_future()
        self._stream, self._head, self._tail, self._left = stream, b"", b"", -1
        self.events, self.first = 0, 0.0
        self.sent = time.perf_counter()
        self.transport.write(data)

    async def finished(self) -> None:
        if self._done is None:
            raise Broken("nothing was asked")
        await self._done

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        done = self._done
        if done is None or done.done():
            return
        if self._left < 0:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            data = self._head[end + 4 :]
            head = self._head[: end + 2]
            if not head.startswith(b"HTTP/1.1 200"):
                done.set_exception(Broken(repr(self._head[:300])))
                return
            self._left = 0
            if not self._stream:
                self._left = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        if not self._stream:
            self._left -= len(data)
            if self._left == 0:
                self.first = now
                done.set_result(None)
            return
        if not self.first and b"data:" in data:
            self.first = now
        events = data.count(b"\n\n")
        if events:
            self.events += events
            if self._on_events is not None:
                self._on_events()
        self._tail = (self._tail + data)[-5:]
        if self._tail == _END:
            done.set_result(None)


async def connect(port: int, on_events: Callable[[], None] | None = None) -> Client:
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(lambda: Client(on_events), "127.0.0.1", port)
    return client

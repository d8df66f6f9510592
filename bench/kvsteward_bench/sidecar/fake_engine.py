"""An engine that computes nothing: HTTP by hand on an asyncio protocol, as fast as Python goes.

What a request gets is in its own body, so that it survives any proxy: `max_tokens` chunks, the first after `seed`
microseconds, then one every `top_k` microseconds (0: as fast as the loop turns; LOCKSTEP: each when `advance` is
called, which the client does when it has the one before, so that no proxy can take two at once).
`"stream": false` gives one JSON object.
"""

import asyncio
import re
import time
from collections.abc import Callable
from functools import partial

import msgspec

CHUNK_BYTES = 200
LOCKSTEP = -1
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_DIRECTIVE = re.compile(rb'\r\nx-kv-directive: *\{"request":"([0-9a-f]{32})"', re.IGNORECASE)

_STATE = msgspec.json.encode(
    {
        "instance": "fake",
        "epoch": 0,
        "version": "",
        "lastMatchSeconds": 0.0,
        "build": "fake",
        "dtype": "FP32",
        "blockTokens": 16,
        "poolTokens": 65536,
        "bytesPerToken": 1,
        "maxTokens": 8192,
        "model": "fake",
    }
)
_OUTCOME = b'{"request":"%b","mode":"Cold","epoch":1,"promptTokens":1000,"outputTokens":64,"finish":"stop"}'
_EVENT = b"data: " + b'{"choices":[{"index":0,"delta":{"content":"'.ljust(CHUNK_BYTES - 13, b"x") + b'"}}]}' + b"\n\n"
_CHUNK = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_WHOLE = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"hello"},"finish_reason":"stop"}]}'


class Asked(msgspec.Struct):
    """The part of a request's body that says what to answer; the rest is skipped."""

    stream: bool = True
    max_tokens: int = 64  # chunks
    seed: int = 0  # microseconds until the first
    top_k: int = 0  # microseconds from one to the next, or LOCKSTEP


_asked = msgspec.json.Decoder(Asked)


class FakeEngine:
    """What all its connections share: the policy it confirmed, who asked, who left before the answer's end."""

    def __init__(self) -> None:
        self.state = _STATE
        self.arrived = 0
        self.left: list[float] = []  # time.perf_counter() at which each early leave was noticed
        self.waiting: Callable[[], None] | None = None  # the one stream in lockstep

    def advance(self) -> None:
        """Lets the stream in lockstep send its next chunk."""
        step, self.waiting = self.waiting, None
        if step is not None:
            step()

    async def listen(self) -> asyncio.Server:
        """Serves on a free port of 127.0.0.1."""
        return await asyncio.get_running_loop().create_server(lambda: _Connection(self), "127.0.0.1", 0, backlog=1024)


class _Connection(asyncio.Protocol):
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._buffer = bytearray()
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._loop = asyncio.get_running_loop()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._engine.left.append(time.perf_counter())

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        while (end := buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(buffer[: end + 2])
            found = _LENGTH.search(head)
            whole = end + 4 + (int(found[1]) if found else 0)
            if len(buffer) < whole:
                return
            body = bytes(buffer[end + 4 : whole])
            del buffer[:whole]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        target = head.split(b" ", 2)[1]
        if target.startswith(b"/v1/"):
            asked = _asked.decode(body)
            directive = _DIRECTIVE.search(head)
            outcome = _OUTCOME % directive[1] if directive else b""
            self._engine.arrived += 1
            if asked.stream:
                self._later(asked.seed, self._first, asked, outcome)
            else:
                self._whole(200, _WHOLE, b"X-KV-Outcome: %b\r\n" % outcome if outcome else b"")
        elif target == b"/kv/v1/policy":
            if body:
                wanted = msgspec.json.decode(body)
                state = msgspec.json.decode(_STATE) | {"epoch": wanted["epoch"], "version": wanted["version"]}
                self._engine.state = msgspec.json.encode(state)
            self._whole(200, self._engine.state)
        elif target in (b"/kv/v1/stats", b"/health"):
            self._whole(200, b"{}")
        else:
            self._whole(404, b"{}")

    def _later(self, microseconds: int, call: Callable[..., None], *arguments: object) -> None:
        if microseconds == LOCKSTEP:
            self._engine.waiting = partial(call, *arguments)
        elif microseconds:
            self._timer = self._loop.call_later(microseconds / 1e6, call, *arguments)
        else:
            self._timer = self._loop.call_soon(call, *arguments)

    def _first(self, asked: Asked, outcome: bytes) -> None:
        self._write(_STREAM_HEAD + _CHUNK)
        self._later(asked.top_k, self._next, asked, outcome, asked.max_tokens - 1)

    def _next(self, asked: Asked, outcome: bytes, left: int) -> None:
        if left:
            self._write(_CHUNK)
            self._later(asked.top_k, self._next, asked, outcome, left - 1)
            return
        self._timer = None
        last = b": kv-outcome %b\n\n" % outcome if outcome else b""
        last += b"data: [DONE]\n\n"
        self._write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last))

    def _whole(self, status: int, body: bytes, extra: bytes = b"") -> None:
        self._write(
            b"HTTP/1.1 %d OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b\r\n%b"
            % (status, len(body), extra, body)
        )

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

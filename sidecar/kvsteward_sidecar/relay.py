"""An engine's answer on its way to one client: head written anew, body framed and written read by read.

Writes go straight to the client's transport from the loop's turn in which the engine's bytes came. When the client
doesn't keep up, the engine is asked to wait; only then does the request's task wake.
"""

import asyncio
import socket
import struct
import time
from email.utils import formatdate
from http import HTTPStatus

from aiohttp import web
from kvsteward_contract.wire import OUTCOME_HEADER, RECEIPT_HEADER

from .events import EventFilter
from .upstream import Answer

HIGH_WATER = 65_536  # bytes on their way to the client; past it the engine is asked to wait
STALL_SECONDS = 120.0  # a client that takes nothing for so long is gone

_PASSED = ((b"content-type", b"Content-Type"), (b"cache-control", b"Cache-Control"), (b"retry-after", b"Retry-After"))
_OUTCOME = OUTCOME_HEADER.lower().encode()
_RECEIPT = RECEIPT_HEADER.encode()
_STATUS = {status.value: status.phrase.encode() for status in HTTPStatus}


class Sent(web.StreamResponse):
    """Tells aiohttp that the answer is already on its way, and whether the connection goes on."""

    def __init__(self, keep_alive: bool) -> None:
        super().__init__()
        self._goes_on = keep_alive

    @property
    def keep_alive(self) -> bool | None:
        return self._goes_on

    async def prepare(self, request: web.BaseRequest) -> None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        return None


class ClientStalled(Exception):
    """The client has taken nothing for STALL_SECONDS."""


class Relay:
    """One answer. `receipt` empty: none is named. `first` is the loop's time when the first data event passed."""

    __slots__ = (
        "_answer",
        "_chunked",
        "_events",
        "_head",
        "_outcome",
        "_request",
        "_transport",
        "_unframed",
        "first",
        "goes_on",
        "opened",
    )

    def __init__(self, request: web.BaseRequest, answer: Answer, receipt: str, closing: bool) -> None:
        headers = answer.headers
        http11 = request.version >= (1, 1)
        self._request, self._answer = request, answer
        self._transport = request.transport
        self._outcome = headers.get(_OUTCOME)
        streams = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        self._events = EventFilter() if streams else None
        length = None if streams else headers.get(b"content-length")
        self._chunked = length is None and http11
        self._unframed = length is None and not http11
        self.goes_on = http11 and request.keep_alive and not closing
        self.first: float | None = None
        self.opened = False
        lines = [b"HTTP/1.1 %d %b" % (answer.status, _STATUS.get(answer.status, b""))]
        lines += [b"%b: %b" % (name, headers[key]) for key, name in _PASSED if key in headers]
        if receipt:
            lines.append(b"%b: %b" % (_RECEIPT, receipt.encode()))
        if length is not None:
            lines.append(b"Content-Length: " + length)
        elif http11:
            lines.append(b"Transfer-Encoding: chunked")
        if not self.goes_on:
            lines.append(b"Connection: close")
        lines.append(b"Date: %b\r\n\r\n" % _clock.date())
        self._head = b"\r\n".join(lines)

    @property
    def outcome(self) -> bytes | None:
        """The Outcome's JSON, once it came."""
        return self._outcome if self._events is None else self._events.outcome

    async def run(self) -> None:
        """Until the client's transport has the whole answer. Raises EngineBroke, ClientStalled."""
        self._answer.attach(self._take, self._take_chunk if self._chunked and self._events is not None else None)
        while not await self._answer.wait():
            try:
                async with asyncio.timeout(STALL_SECONDS):
                    await self._request.writer.drain()
            except TimeoutError:
                raise ClientStalled from None
            self._answer.resume()

    def _take_chunk(self, chunk: bytes) -> bool:
        """Passes a chunk on as it is, if it is whole events that hold nothing to take out or to note."""
        transport = self._transport
        if transport is None or transport.is_closing() or not self._events.passes(chunk):  # type: ignore[union-attr]
            return False
        transport.write(chunk)
        if transport.get_write_buffer_size() > HIGH_WATER:
            self._answer.hold()
        return True

    def _take(self, data: bytes, last: bool) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return  # the client is gone, and the request's task about to be cancelled
        events = self._events
        if events is not None:
            data = events.feed(data)
            if last:
                data += events.rest()
            if events.begun and self.first is None:
                self.first = asyncio.get_running_loop().time()
        if self._chunked:
            if data:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            if last:
                data += b"0\r\n\r\n"
        if not self.opened:
            self.opened = True
            data = self._head + data
            if self._unframed and not last:
                _reset_when_closed(transport, True)
        elif self._unframed and last:
            _reset_when_closed(transport, False)
        if data:
            transport.write(data)
            if transport.get_write_buffer_size() > HIGH_WATER:
                self._answer.hold()


def _reset_when_closed(transport: asyncio.Transport, reset: bool) -> None:
    """Chunks and lengths show a cut by what is missing, but an answer without either, as HTTP/1.0 clients get it (nginx
    is one, unless told otherwise), ends where its connection does: whoever cuts it, this process's end included, must
    leave a reset behind, and only its true end a close."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", reset, 0))


class _Clock:
    """The time as HTTP writes it, made once a second."""

    def __init__(self) -> None:
        self._second, self._text = 0, b""

    def date(self) -> bytes:
        now = int(time.time())
        if now != self._second:
            self._second, self._text = now, formatdate(now, usegmt=True).encode()
        return self._text


_clock = _Clock()

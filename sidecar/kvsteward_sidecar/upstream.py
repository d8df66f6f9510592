"""Connections to the engine: requests out, answers in, as asyncio protocols with httptools' parser.

A task woken for every chunk is what makes a proxy slow, so an `Answer` hands each read's body to a plain callback in
the event loop's own turn, and wakes its reader only when the head is there, when the client must catch up, and at the
end. Only loopback peers are meant: no TLS, no redirects, no decompression, no proxies, no cookies.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import lru_cache

import httptools

CONNECT_SECONDS = 2.0
IDLE_SECONDS = 30.0  # below the engine's own keep-alive time, so that it's rarely the engine that closes first
RESEND_SECONDS = 0.2  # a stale connection shows at once
MAX_HEADER_BYTES = 65_536
HOLD_BYTES = 65_536  # of a body that nobody takes yet, before the engine is asked to wait


class EngineUnavailable(Exception):
    """No byte of an answer came: the client may be told to try again."""


class EngineBroke(Exception):
    """The engine died or spoke no HTTP in the middle of an answer: what the client has so far is no whole answer."""


class Answer:
    """One answer of the engine, while it comes.

    Wait for `head()`, then `attach()` a sink for the body, then `wait()` until it returns True.
    """

    __slots__ = (
        "_chunk_sink",
        "_connection",
        "_error",
        "_held",
        "_sink",
        "_waiter",
        "complete",
        "headers",
        "size",
        "started",
        "status",
    )

    def __init__(self, connection: "Connection") -> None:
        self._connection: Connection | None = connection
        self._error: Exception | None = None
        self._held: list[bytes] = []
        self._sink: Callable[[bytes, bool], None] | None = None
        self._chunk_sink: Callable[[bytes], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.status = 0  # 0 until the head is complete
        self.headers: dict[bytes, bytes] = {}  # names in lower case; of a repeated one the last value
        self.complete = False
        self.started = False  # a byte of the answer has come
        self.size = 0  # body bytes held for want of a sink

    async def head(self) -> None:
        """Returns with status and headers set. Raises EngineUnavailable when the connection closed before any byte,
        EngineBroke when it closed within the head."""
        while not self.status:
            self._raise()
            await self._wake()

    def attach(self, sink: Callable[[bytes, bool], None], chunk_sink: Callable[[bytes], bool] | None = None) -> None:
        """From now on `sink(body, last)` gets the body, one call a read; what came before, if only nothing, at once.

        `chunk_sink(chunk)` is asked first when a read is one whole chunk: it gets it with its framing, and returns
        False to have it unpacked for `sink` after all. A sink that raises EngineBroke ends the answer.
        """
        self._chunk_sink = chunk_sink
        self._sink = sink
        held, self._held, self.size = b"".join(self._held), [], 0
        sink(held, self.complete)
        if self._connection is not None and not self.complete:
            self._connection.resume()

    async def wait(self) -> bool:
        """True when the whole body has gone to the sink; False when `hold` asks for attention first.

        Raises EngineBroke.
        """
        if self.complete:
            return True
        self._raise()
        await self._wake()
        if self.complete:
            return True
        self._raise()
        return False

    def hold(self) -> None:
        """From a sink: read no more from the engine until `resume()`, and wake the reader to see to that."""
        if self._connection is not None:
            self._connection.pause()
        self._notify()

    def resume(self) -> None:
        if self._connection is not None:
            self._connection.resume()

    def abort(self) -> None:
        """Gives the answer up. The connection closes at once, which is what tells the engine."""
        connection, self._connection = self._connection, None
        if connection is not None and not self.complete:
            connection.abort()

    # Called by the connection, in the loop's turn in which bytes came.

    def _began(self, status: int) -> None:
        self.status = status
        self._notify()

    def _body(self, data: bytes, last: bool) -> None:
        if last:
            self.complete = True
            self._connection = None
        if self._sink is not None:
            self._sink(data, last)
        elif data:
            self._held.append(data)
            self.size += len(data)
            if self.size > HOLD_BYTES and self._connection is not None:
                self._connection.pause()
        if last:
            self._notify()

    def _failed(self, error: Exception) -> None:
        self._connection = None
        if not self.complete:
            self._error = error
            self._notify()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _notify(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _wake(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class Connection(asyncio.Protocol):
    """One connection to the engine. One request at a time: `send`, then the Answer, then it goes back to its pool."""

    __slots__ = (
        "_answer",
        "_between",
        "_body",
        "_done",
        "_header_bytes",
        "_headers",
        "_idle_again",
        "_interim",
        "_keep",
        "_parser",
        "_paused",
        "idle_since",
        "transport",
        "used",
    )

    def __init__(self, idle_again: Callable[["Connection"], None]) -> None:
        self._idle_again = idle_again
        self._answer: Answer | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._paused = False
        self.transport: asyncio.Transport | None = None
        self.idle_since = 0.0
        self.used = False  # it has carried an answer before
        self._reset()

    def _reset(self) -> None:
        self._headers: dict[bytes, bytes] = {}
        self._header_bytes = 0
        self._body: list[bytes] = []
        self._done = self._keep = self._interim = False
        self._between = False  # the last thing parsed was a chunk's end

    @property
    def usable(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def send(self, head: bytes, body: bytes) -> Answer:
        transport = self.transport
        if transport is None or self._answer is not None:
            raise RuntimeError("a connection carries one request at a time")
        self._answer = Answer(self)
        if len(body) > 4096:
            transport.writelines((head, body))  # no copy of a long prompt
        else:
            transport.write(head + body)
        return self._answer

    def pause(self) -> None:
        if not self._paused and self.usable:
            self._paused = True
            self.transport.pause_reading()  # type: ignore[union-attr]

    def resume(self) -> None:
        if self._paused and self.usable:
            self._paused = False
            self.transport.resume_reading()  # type: ignore[union-attr]

    def abort(self) -> None:
        self._answer = None
        if self.transport is not None:
            self.transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # bytes that nobody asked for: whose answer would the next one be?
            self.abort()
            return
        # Most reads of a stream are one chunk: the parser, at a chunk's end, needn't see one that begins and ends here.
        if (
            self._between
            and answer._chunk_sink is not None
            and data.startswith(_chunk_head(len(data)))
            and answer._chunk_sink(data)
        ):
            return
        answer.started = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            why = error.__context__ if isinstance(error.__context__, EngineBroke) else error
            self._break(answer, EngineBroke(f"the engine's answer is not the HTTP expected: {why}"))
            return
        # A size line that has only begun makes no callback, but then the read doesn't end with a line end.
        self._between = self._between and data.endswith(b"\r\n")
        if self._body or self._done:
            parts = self._body
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            done, keep = self._done, self._keep
            if done:
                self._answer = None
                self._reset()
            else:
                self._body = []
            try:
                answer._body(body, done)
            except EngineBroke as error:
                self._break(answer, error)
                return
            if done:
                self._finish(keep)

    def _finish(self, keep: bool) -> None:
        if not keep or not self.usable:
            if self.transport is not None:
                self.transport.close()
            return
        self.resume()
        self.used = True
        self._idle_again(self)

    def _break(self, answer: Answer, error: EngineBroke) -> None:
        self._answer = None
        answer.complete = False
        answer._failed(error)
        self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        answer, self._answer = self._answer, None
        if answer is not None:
            if answer.started:
                answer._failed(EngineBroke("the engine closed the connection within its answer"))
            else:
                answer._failed(EngineUnavailable("the engine closed the connection without an answer"))

    # httptools callbacks

    def on_message_begin(self) -> None:
        if self._done:
            raise EngineBroke("a second answer to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEADER_BYTES:
            raise EngineBroke("headers too large")
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._interim = status < 200  # 100 Continue and the like: the answer proper follows
        if self._interim:
            self._headers = {}
        elif self._answer is not None:
            self._answer.headers = self._headers
            self._answer._began(status)

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_chunk_header(self) -> None:
        self._between = False

    def on_chunk_complete(self) -> None:
        self._between = True

    def on_message_complete(self) -> None:
        if self._interim:
            return
        self._done = True
        self._keep = self._parser.should_keep_alive()


@lru_cache(maxsize=4096)
def _chunk_head(length: int) -> bytes:
    """How `length` bytes begin if they are one whole chunk; something that nothing begins with if they can't be."""
    for digits in range(1, 9):
        size = length - digits - 4
        head = b"%x\r\n" % max(size, 0)
        if size > 0 and len(head) == digits + 2:
            return head
    return b"\r\n\r\n"


class Pool:
    """Connections to one engine: the most recently used idle one first, a new one when there is none."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self._idle: deque[Connection] = deque()

    async def acquire(self, fresh: bool = False) -> Connection:
        """An idle connection, or a new one (always with `fresh`). Raises EngineUnavailable."""
        loop = asyncio.get_running_loop()
        if not fresh:
            now = loop.time()
            while self._idle:
                connection = self._idle.pop()
                if connection.usable and now - connection.idle_since < IDLE_SECONDS:
                    return connection
                _close(connection)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(lambda: Connection(self._release), self.host, self.port)
        except (OSError, TimeoutError):
            raise EngineUnavailable("the engine takes no connection") from None
        return connection

    def _release(self, connection: Connection) -> None:
        now = asyncio.get_running_loop().time()
        connection.idle_since = now
        self._idle.append(connection)
        while self._idle and now - self._idle[0].idle_since >= IDLE_SECONDS:
            _close(self._idle.popleft())

    async def request(self, head: bytes, body: bytes) -> Answer:
        """Sends a request and returns its answer with the head complete.

        A reused connection that closes at once, before any byte came, was closed by the engine for being idle: the
        request is sent once more, on a new one. After RESEND_SECONDS the engine must have been at work on it, so the
        body is let go of. Raises EngineUnavailable or EngineBroke; when cancelled, the engine is told at once.
        """
        connection = await self.acquire()
        again = [head, body] if connection.used else []
        answer = connection.send(head, body)
        del body
        timer = asyncio.get_running_loop().call_later(RESEND_SECONDS, again.clear) if again else None
        try:
            return await _headed(answer)
        except EngineUnavailable:
            if not again:
                raise
        finally:
            if timer is not None:
                timer.cancel()
        return await _headed((await self.acquire(fresh=True)).send(*again))

    def close(self) -> None:
        while self._idle:
            _close(self._idle.pop())


async def _headed(answer: Answer) -> Answer:
    try:
        await answer.head()
    except asyncio.CancelledError:
        answer.abort()
        raise
    return answer


def _close(connection: Connection) -> None:
    if connection.transport is not None:
        connection.transport.close()

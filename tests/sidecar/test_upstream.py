"""Connections to the engine: reused, tried again when stale, cut when the engine is, never mixed up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvsteward_sidecar import upstream
from kvsteward_sidecar.upstream import Answer, Connection, EngineBroke, EngineUnavailable, Pool
from support.control_plane import until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: engine\r\nContent-Length: 2\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

Serve = Callable[[int, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Peer:
    """A server whose connections are numbered and handled as a test says."""

    def __init__(self, serve: Serve) -> None:
        self.connections = 0
        self.requests = 0
        self._serve = serve
        self._server: asyncio.Server | None = None

    async def start(self) -> Pool:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return Pool("127.0.0.1", self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()

    async def request(self, reader: asyncio.StreamReader) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(2)
        self.requests += 1

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self._serve(self.connections, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def serving() -> AsyncIterator[Callable[[Serve], Awaitable[tuple[Peer, Pool]]]]:
    started: list[tuple[Peer, Pool]] = []

    async def start(serve: Serve) -> tuple[Peer, Pool]:
        peer = Peer(serve)
        started.append((peer, await peer.start()))
        return started[-1]

    yield start
    for peer, pool in started:
        pool.close()
        await peer.stop()


Start = Callable[[Serve], Awaitable[tuple[Peer, Pool]]]


async def whole(answer: Answer) -> bytes:
    parts: list[bytes] = []
    answer.attach(lambda data, last: parts.append(data))
    while not await answer.wait():
        answer.resume()
    return b"".join(parts)


async def test_a_connection_is_used_again(serving: Start) -> None:
    async def serve(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await peer.request(reader)
            writer.write(OK)

    peer, pool = await serving(serve)
    for _ in range(3):
        answer = await pool.request(HEAD, b"{}")
        assert (answer.status, await whole(answer)) == (200, b"ok")
    assert (peer.connections, peer.requests) == (1, 3)


async def test_two_at_once_need_two_connections(serving: Start) -> None:
    async def serve(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await peer.request(reader)
        await asyncio.sleep(0.05)
        writer.write(OK)

    peer, pool = await serving(serve)
    answers = await asyncio.gather(pool.request(HEAD, b"{}"), pool.request(HEAD, b"{}"))
    assert [await whole(answer) for answer in answers] == [b"ok", b"ok"]
    assert peer.connections == 2


@pytest.mark.parametrize("seen", [False, True], ids=["before", "as-it-is-sent"])
async def test_a_stale_connection_is_replaced_once(serving: Start, seen: bool) -> None:
    """The engine closed an idle connection, and we knew, or learn it only when we send."""
    close = asyncio.Event()

    async def serve(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await peer.request(reader)
        writer.write(OK)
        if number == 1:
            if seen:
                await reader.readexactly(1)  # the next request's first byte: close without an answer
            return
        await close.wait()

    peer, pool = await serving(serve)
    await whole(await pool.request(HEAD, b"{}"))
    if not seen:
        await asyncio.sleep(0.05)
    assert await whole(await pool.request(HEAD, b"{}")) == b"ok"
    assert peer.connections == 2
    close.set()


async def test_a_fresh_connection_that_closes_is_not_tried_again(serving: Start) -> None:
    async def serve(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await peer.request(reader)

    peer, pool = await serving(serve)
    with pytest.raises(EngineUnavailable):
        await pool.request(HEAD, b"{}")
    assert peer.requests == 1


async def test_a_request_the_engine_has_worked_on_is_not_sent_twice(
    serving: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "RESEND_SECONDS", 0.05)

    async def serve(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await peer.request(reader)
        writer.write(OK)
        await peer.request(reader)
        await asyncio.sleep(0.2)

    peer, pool = await serving(serve)
    await whole(await pool.request(HEAD, b"{}"))
    with pytest.raises(EngineUnavailable):
        await pool.request(HEAD, b"{}")
    assert peer.requests == 2


async def test_nobody_listening_is_unavailable() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    with pytest.raises(EngineUnavailable):
        await Pool("127.0.0.1", port).request(HEAD, b"{}")


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"HTTP/1.1 200 OK\r\nConte", id="within-the-head"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", id="within-a-body-of-known-length"),
        pytest.param(CHUNKED + b"2\r\nok\r\n", id="between-chunks"),
        pytest.param(CHUNKED + b"9\r\nok", id="within-a-chunk"),
        pytest.param(CHUNKED + b"2\r\nok\r\n0\r\n", id="before-the-last-line"),
        pytest.param(CHUNKED + b"2\r\nokXX", id="bad-chunk"),
        pytest.param(CHUNKED + b"zz\r\nok\r\n", id="bad-size"),
        pytest.param(b"hello\r\n\r\n", id="no-http"),
        pytest.param(b"HTTP/1.1 200 OK\r\nA: " + b"x" * 70_000 + b"\r\n\r\n", id="endless-head"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n", id="two-framings"),
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\nno framing: an end or a crash?", id="until-close"),
    ],
)
async def test_an_answer_that_does_not_end_well_is_broken(serving: Start, sent: bytes) -> None:
    async def serve(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await peer.request(reader)
        writer.write(sent)

    peer, pool = await serving(serve)
    with pytest.raises(EngineBroke):
        await whole(await pool.request(HEAD, b"{}"))
    assert peer.requests == 1


async def test_what_comes_after_an_answer_is_never_taken_for_the_next(serving: Start) -> None:
    async def serve(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await peer.request(reader)
        if number == 1:
            writer.write(OK)
            await asyncio.sleep(0.02)
            writer.write(OK.replace(b"ok", b"no"))
            await asyncio.sleep(0.02)
        else:
            writer.write(OK.replace(b"ok", b"2!"))
        await reader.read()

    peer, pool = await serving(serve)
    assert await whole(await pool.request(HEAD, b"{}")) == b"ok"
    await asyncio.sleep(0.05)
    assert await whole(await pool.request(HEAD, b"{}")) == b"2!"
    assert peer.connections == 2


async def test_two_answers_in_one_read_are_no_answer(serving: Start) -> None:
    async def serve(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await peer.request(reader)
        writer.write(OK + OK)
        await reader.read()

    peer, pool = await serving(serve)
    with pytest.raises(EngineBroke):
        await whole(await pool.request(HEAD, b"{}"))


async def test_a_connection_that_the_engine_closes_politely_is_not_kept(serving: Start) -> None:
    async def serve(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await peer.request(reader)
        writer.write(OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        await reader.read()

    peer, pool = await serving(serve)
    for _ in range(2):
        assert await whole(await pool.request(HEAD, b"{}")) == b"ok"
    assert peer.connections == 2


async def test_interim_answers_are_skipped(serving: Start) -> None:
    async def serve(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await peer.request(reader)
        writer.write(b"HTTP/1.1 100 Continue\r\nX-KV-Outcome: no\r\n\r\n")
        await asyncio.sleep(0.01)
        writer.write(OK)
        await reader.read()

    peer, pool = await serving(serve)
    answer = await pool.request(HEAD, b"{}")
    assert (answer.status, answer.headers) == (200, {b"content-length": b"2"})
    assert await whole(answer) == b"ok"


async def test_idle_connections_are_closed_in_time(serving: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = asyncio.Event()

    async def serve(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await peer.request(reader)
        writer.write(OK)
        await reader.read()
        closed.set()

    peer, pool = await serving(serve)
    await whole(await pool.request(HEAD, b"{}"))
    monkeypatch.setattr(upstream, "IDLE_SECONDS", 0.0)
    await whole(await pool.request(HEAD, b"{}"))
    assert peer.connections == 2
    async with asyncio.timeout(1):
        await closed.wait()


async def test_a_cancelled_wait_for_the_head_closes_the_engines_connection_at_once(serving: Start) -> None:
    asked, gone = asyncio.Event(), asyncio.Event()

    async def serve(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await peer.request(reader)
        asked.set()
        try:
            await reader.read()
        finally:
            gone.set()

    peer, pool = await serving(serve)
    task = asyncio.create_task(pool.request(HEAD, b"{}"))
    await asked.wait()
    task.cancel()
    async with asyncio.timeout(0.5):
        await gone.wait()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_sink_that_asks_to_hold_stops_the_engine_until_it_resumes(serving: Start) -> None:
    """Without that the engine's whole answer would pile up here for a client that doesn't read."""
    size, written = 64 * 1024 * 1024, 0

    async def serve(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await peer.request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(size // 65_536):
            writer.write(b"x" * 65_536)
            await writer.drain()
            written += 65_536

    peer, pool = await serving(serve)
    answer = await pool.request(HEAD, b"{}")
    got = 0

    def sink(data: bytes, last: bool) -> None:
        nonlocal got
        got += len(data)
        answer.hold()

    answer.attach(sink)
    assert not await answer.wait()
    await asyncio.sleep(0.1)
    held = written
    await asyncio.sleep(0.1)
    assert written == held < size // 2
    answer.resume()
    while not await answer.wait():
        answer.resume()
    assert got == size


async def test_a_body_that_nobody_takes_yet_stops_the_engine_too(serving: Start) -> None:
    size, written = 64 * 1024 * 1024, 0

    async def serve(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await peer.request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(size // 65_536):
            writer.write(b"x" * 65_536)
            await writer.drain()
            written += 65_536

    peer, pool = await serving(serve)
    answer = await pool.request(HEAD, b"{}")
    await asyncio.sleep(0.1)
    assert written < size // 2
    assert len(await whole(answer)) == size


class Wire(asyncio.Transport):
    """A transport that takes everything; bytes are fed to the connection by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def write(self, data: object) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


PAYLOADS = st.lists(st.binary(min_size=1, max_size=300) | st.just(b"data: 1\n\n"), min_size=1, max_size=6)


@given(PAYLOADS, st.data(), st.booleans())
def test_however_an_answer_is_cut_into_reads_its_body_is_the_same(
    payloads: list[bytes], data: st.DataObject, takes_chunks: bool
) -> None:
    """Also where a read is exactly one chunk, and so never seen by the parser."""
    frames = [b"%x\r\n%b\r\n" % (len(payload), payload) for payload in payloads]
    sent = CHUNKED + b"".join(frames) + b"0\r\n\r\n"
    edges = {len(CHUNKED) + sum(map(len, frames[:count])) for count in range(len(frames) + 1)}
    anywhere = data.draw(st.sets(st.integers(0, len(sent)), max_size=8))
    cuts = sorted(anywhere | data.draw(st.sets(st.sampled_from(sorted(edges)))))
    returned: list[Connection] = []
    connection = Connection(returned.append)
    connection.connection_made(Wire())
    answer = connection.send(HEAD, b"{}")
    parts: list[bytes] = []

    def chunk_sink(chunk: bytes) -> bool:
        if not takes_chunks:
            return False
        size, _, rest = chunk.partition(b"\r\n")
        assert int(size, 16) == len(rest) - 2
        assert rest.endswith(b"\r\n")
        parts.append(rest[:-2])
        return True

    answer.attach(lambda body, last: parts.append(body), chunk_sink)
    for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
        if end > start:
            connection.data_received(sent[start:end])
    assert answer.complete
    assert b"".join(parts) == b"".join(payloads)
    assert returned == [connection]  # and it is free for the next request


def test_the_rest_of_a_size_line_is_not_taken_for_a_chunk() -> None:
    """A size of 18 (hex) cut after its 1 leaves what looks like a whole chunk of 8."""
    payload = b"12345678\r\n" + b"x" * 14
    connection = Connection(lambda _: None)
    connection.connection_made(Wire())
    answer = connection.send(HEAD, b"{}")
    parts: list[bytes] = []
    answer.attach(lambda body, last: parts.append(body), lambda chunk: not parts.append(b"taken"))  # type: ignore[func-returns-value]
    for read in (CHUNKED, b"2\r\nok\r\n1", b"8\r\n12345678\r\n", b"x" * 14 + b"\r\n0\r\n\r\n"):
        connection.data_received(read)
    assert answer.complete
    assert b"".join(parts) == b"ok" + payload


async def test_the_pool_is_bounded_by_what_runs_at_once(serving: Start) -> None:
    async def serve(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await peer.request(reader)
            writer.write(OK)

    peer, pool = await serving(serve)
    for _ in range(3):
        await asyncio.gather(*(pool.request(HEAD, b"{}") for _ in range(5)))
    await until(lambda: peer.requests == 15)
    assert peer.connections <= 5

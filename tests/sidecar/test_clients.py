"""What a client may hold of the sidecar before it has asked for anything, and what of it may be logged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kvsteward_sidecar import clients
from kvsteward_sidecar.clients import Discreet
from support.traffic import (
    ACME,
    SECONDS,
    TAIL,
    Client,
    ScriptedEngine,
    Seen,
    Sidecar,
    chat,
    event,
    running_sidecar,
    stream_head,
    write_chunk,
)

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: sidecar\r\n"
PROMPT = b"a prompt that nobody else may read"


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    made = ScriptedEngine()
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def sidecar(tmp_path: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sidecar]:
    monkeypatch.setattr(clients, "HEAD_SECONDS", 0.3)
    async with running_sidecar(tmp_path, engine) as running:
        yield running


async def closed(client: Client) -> bytes:
    """What still came before the connection closed. Raises TimeoutError when it stays open."""
    try:
        async with asyncio.timeout(SECONDS):
            return await client.reader.read()
    except ConnectionError:
        return b""


async def trickle(client: Client, lines: list[bytes]) -> None:
    """A line every 0.1 s, for as long as the connection is open."""
    try:
        for line in lines:
            await client.send(line)
            await asyncio.sleep(0.1)
    except (ConnectionError, RuntimeError):  # uvloop's word for a connection that is closed already
        pass


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(HEAD + b"Transfer-Encoding: chunked\r\n\r\n22\n" + PROMPT + b"\n0\n\n", id="prompt-in-a-chunk"),
        pytest.param(chat() + PROMPT + b"\r\n\r\n", id="prompt-behind-a-body-whose-length-is-too-short"),
        pytest.param(HEAD + b"Authorization: Bearer " + ACME.encode() + b"x" * 9_000 + b"\r\n\r\n", id="key-too-long"),
        pytest.param(HEAD + b"Authorization: Bearer " + ACME.encode() + b"\x00\r\n\r\n", id="key-and-a-null"),
    ],
)
async def test_what_a_client_sent_is_not_quoted_in_the_log_when_it_is_no_http(
    sidecar: Sidecar, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        client = await sidecar.connect()
        await client.send(sent)
        assert b" 400 " in await closed(client)
    assert PROMPT.decode() not in caplog.text
    assert ACME not in caplog.text


def test_faults_of_our_own_are_still_logged(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise RuntimeError("a fault of the sidecar")
    except RuntimeError as error:
        Discreet().exception("Error handling request from %s", "somewhere", exc_info=error)
    assert "a fault of the sidecar" in caplog.text


@pytest.mark.parametrize("before", [pytest.param(b"", id="first-request"), pytest.param(chat(), id="second-request")])
async def test_a_head_that_does_not_end_is_given_up_however_it_trickles(sidecar: Sidecar, before: bytes) -> None:
    client = await sidecar.connect()
    if before:
        assert (await client.ask(before)).status == 200
    await trickle(client, [HEAD, *[b"X-A: b\r\n"] * 8])
    assert await closed(client) == b""


@pytest.mark.slow
async def test_a_connection_that_has_said_nothing_may_be_used_later(sidecar: Sidecar) -> None:
    client = await sidecar.connect()
    await asyncio.sleep(0.6)
    assert (await client.ask(chat())).status == 200
    await asyncio.sleep(0.6)
    assert (await client.ask(chat())).status == 200


async def test_a_head_and_a_body_in_pieces_are_read_as_one_request(sidecar: Sidecar) -> None:
    request = chat()
    client = await sidecar.connect()
    for place in range(0, len(request), 50):
        await client.send(request[place : place + 50])
        await asyncio.sleep(0.01 if b"\r\n\r\n" not in request[:place] else 0.2)
    assert (await client.answer()).status == 200


async def test_a_head_of_many_long_lines_is_given_up(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "HEAD_SECONDS", 60.0)
    client = await sidecar.connect()
    lines = [b"X-%d: %s\r\n" % (number, b"v" * 8_000) for number in range(10)]
    await trickle(client, [HEAD, b"".join(lines[:5]), b"".join(lines[5:])])
    assert await closed(client) == b""


@pytest.mark.parametrize("after", [pytest.param(b"\r\n", id="an-empty-line"), pytest.param(HEAD, id="half-a-head")])
async def test_what_comes_after_a_request_does_not_cut_its_answer(
    sidecar: Sidecar, engine: ScriptedEngine, after: bytes
) -> None:
    async def slow(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(stream_head())
        for _ in range(8):
            await write_chunk(writer, event())
            await asyncio.sleep(0.1)
        await write_chunk(writer, TAIL)
        await write_chunk(writer, b"")

    engine.script = slow
    client = await sidecar.connect()
    await client.send(chat())
    await asyncio.sleep(0.05)
    await client.send(after)
    assert (await client.answer()).body.endswith(TAIL)


async def test_bodies_that_arrive_slowly_take_no_more_than_their_room(
    tmp_path: Path, engine: ScriptedEngine
) -> None:
    large = b'{"model":"tiny","prompt":"' + b"x" * 400_000 + b'"}'
    async with running_sidecar(tmp_path, engine, max_receiving=500_000) as sidecar:
        slow = await sidecar.connect()
        await slow.send(chat(large, target="/v1/completions")[:-50_000])
        await asyncio.sleep(0.2)
        refused = await sidecar.ask(chat(large, target="/v1/completions"))
        assert (refused.status, refused.error["code"]) == (503, "overloaded")
        assert refused.header("retry-after") == "1"
        assert (await sidecar.ask(chat())).status == 200  # it came whole, so it takes no room
        slow.leave()
        await asyncio.sleep(0.2)
        assert (await sidecar.ask(chat(large, target="/v1/completions"))).status == 200
        assert (await sidecar.ask(chat(large, target="/v1/completions"))).status == 200  # each gave its room back

"""The bench measures what it says: its engine and generator tested against each other, without a proxy between."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from kvsteward_bench.sidecar import measure
from kvsteward_bench.sidecar.__main__ import GOALS, _report
from kvsteward_bench.sidecar.fake_engine import FakeEngine
from kvsteward_bench.sidecar.generator import Broken, connect, request
from kvsteward_bench.sidecar.targets import Target


@pytest.fixture
async def engine() -> AsyncIterator[tuple[FakeEngine, Target]]:
    made = FakeEngine()
    server = await made.listen()
    yield made, Target("direct", server.sockets[0].getsockname()[1])
    server.close()


async def test_a_stream_has_its_events_and_its_first_one_is_timed(engine: tuple[FakeEngine, Target]) -> None:
    _, target = engine
    seconds = await measure.first_token(target, measure.SMALL, 2, 3)
    assert len(seconds) == 2  # of three rounds each the first two are warm-up
    assert all(0 < one < 1 for one in seconds)


async def test_in_lockstep_no_chunk_is_sent_before_the_one_before_was_read(engine: tuple[FakeEngine, Target]) -> None:
    made, target = engine
    advanced = 0

    def read() -> None:
        nonlocal advanced
        advanced += 1
        made.advance()

    client = await connect(target.port, read)
    data = request("x", prompt_bytes=100, stream=True, chunks=10, first_us=0, gap_us=-1, key="k")
    await client.ask(data, True)
    assert advanced == client.events == 11
    client.leave(politely=True)


async def test_the_time_to_the_first_token_contains_the_engines(engine: tuple[FakeEngine, Target]) -> None:
    _, target = engine
    client = await connect(target.port)
    data = request("x", prompt_bytes=100, stream=True, chunks=1, first_us=80_000, gap_us=0, key="k")
    assert 0.08 <= await client.ask(data, True) < 0.5
    client.leave(politely=True)


@pytest.mark.parametrize("prefill", [True, False])
async def test_a_client_that_leaves_is_noticed(engine: tuple[FakeEngine, Target], prefill: bool) -> None:
    made, target = engine
    taken = await measure.cancels(target, made, 4, prefill)
    assert len(taken) == 4
    assert all(0 < one < 1 for one in taken)


async def test_an_answer_that_is_cut_counts_as_broken() -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(cut, "127.0.0.1", 0)
    client = await connect(server.sockets[0].getsockname()[1])
    data = request("x", prompt_bytes=10, stream=True, chunks=1, first_us=0, gap_us=0, key="k")
    with pytest.raises(Broken):
        await client.ask(data, True)
    server.close()


@pytest.mark.parametrize(("share", "met"), [(0.9, True), (1.1, False)])
def test_a_goal_is_met_on_its_own_side(share: float, met: bool) -> None:
    figures = {name: goal / share if more else goal * share for name, (goal, _, more) in GOALS.items()}
    report = _report(figures)
    assert report["goalsMet"] is met
    assert {entry["met"] for entry in report["goals"].values()} == {met}

"""A drain serves on for a while, then refuses, and ends when nothing runs or its time is over."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from aiohttp.test_utils import TestServer
from kvsteward_sidecar.drain import Drain, Phase, drain_app
from support.control_plane import until


class Load:
    def __init__(self, running: int) -> None:
        self.running = running
        self.drain = Drain(lambda: self.running, closing_seconds=0.05)

    def finish_one(self) -> None:
        self.running -= 1
        if not self.running:
            self.drain.settled()


async def test_arrivals_are_served_first_and_refused_then() -> None:
    load = Load(1)
    assert load.drain.phase is Phase.SERVING
    ended = asyncio.create_task(load.drain.run(10))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert load.drain.phase is Phase.CLOSING
    await until(lambda: load.drain.phase is Phase.REFUSING)
    assert not ended.done()
    load.finish_one()
    assert await ended == 0
    assert load.drain.phase is Phase.DRAINED


async def test_an_idle_pod_serves_on_for_the_whole_closing_time() -> None:
    load = Load(0)
    began = asyncio.get_running_loop().time()
    assert await load.drain.run(10) == 0
    assert 0.04 <= asyncio.get_running_loop().time() - began < 1  # uvloop's timers are a millisecond early at times


async def test_the_time_ends_a_drain_and_says_what_is_left() -> None:
    assert await Load(3).drain.run(0.1) == 3


async def test_a_short_drain_is_not_made_longer_by_the_closing_time() -> None:
    load = Load(1)
    began = asyncio.get_running_loop().time()
    await load.drain.run(0.01)
    assert asyncio.get_running_loop().time() - began < 0.05


async def test_requests_that_come_and_go_while_closing_do_not_end_it_early() -> None:
    load = Load(1)
    ended = asyncio.create_task(load.drain.run(10))
    await asyncio.sleep(0)
    load.finish_one()
    load.running += 1
    await until(lambda: load.drain.phase is Phase.REFUSING)
    await asyncio.sleep(0.02)
    assert not ended.done()
    load.finish_one()
    await ended


async def test_a_second_call_joins_the_first() -> None:
    load = Load(1)
    first, second = asyncio.create_task(load.drain.run(10)), asyncio.create_task(load.drain.run(0))
    await until(lambda: load.drain.phase is Phase.REFUSING)
    assert not second.done()
    load.finish_one()
    assert (await first, await second) == (0, 0)


async def test_a_caller_that_leaves_does_not_end_the_drain() -> None:
    load = Load(1)
    caller = asyncio.create_task(load.drain.run(10))
    await asyncio.sleep(0.01)
    caller.cancel()
    await until(lambda: load.drain.phase is Phase.REFUSING)
    load.finish_one()
    await until(lambda: load.drain.phase is Phase.DRAINED)


async def test_the_port_answers_when_the_drain_is_over() -> None:
    load = Load(1)
    async with TestServer(drain_app(load.drain, lambda: load.running, 10)) as server, aiohttp.ClientSession() as client:
        asked = asyncio.create_task(client.post(server.make_url("/drain?seconds=10")))
        await until(lambda: load.drain.phase is Phase.REFUSING)
        async with client.get(server.make_url("/drain")) as answer:
            assert await answer.json() == {"phase": "Refusing", "inFlight": 1}
        assert not asked.done()
        load.finish_one()
        async with await asked as answer:
            assert await answer.json() == {"phase": "Drained", "inFlight": 0}


@pytest.mark.parametrize("seconds", ["-1", "soon", "nan", "99999"])
async def test_a_time_that_makes_no_sense_is_refused_and_drains_nothing(seconds: str) -> None:
    load = Load(0)
    async with (
        TestServer(drain_app(load.drain, lambda: 0, 10)) as server,
        aiohttp.ClientSession() as client,
        client.post(server.make_url(f"/drain?seconds={seconds}")) as answer,
    ):
        assert answer.status == 400
        assert "seconds must be" in await answer.text()
    assert load.drain.phase is Phase.SERVING

"""Whoever has much work waits for it; nobody waits for somebody else's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest
from kvsteward_engine.errors import InvalidRequest, QueueFull
from kvsteward_engine.turns import Turns


class Bench:
    """Turns whose work lasts until it is let go, and the order in which it began."""

    def __init__(self, threads: int = 3, most: int = 64) -> None:
        self.turns = Turns(threads, most, "test")
        self.began: list[str] = []
        self._go = threading.Semaphore(0)
        self.tasks: list[asyncio.Task[str]] = []

    def ask(self, owner: str, count: int = 1) -> list[asyncio.Task[str]]:
        asked = [asyncio.create_task(self.turns.run(owner, self._work(owner))) for _ in range(count)]
        self.tasks += asked
        return asked

    def _work(self, owner: str) -> Callable[[], str]:
        def work() -> str:
            self.began.append(owner)
            self._go.acquire()
            return owner

        return work

    async def started(self, count: int) -> list[str]:
        """The owners of all work that has begun, once it is so much; and a little later it is no more."""
        async with asyncio.timeout(5):
            while len(self.began) < count:
                await asyncio.sleep(0.002)
        await asyncio.sleep(0.02)
        return self.began

    def release(self, count: int = 1) -> None:
        self._go.release(count)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    made.release(1000)
    await asyncio.gather(*made.tasks, return_exceptions=True)
    made.turns.close()


async def test_one_owners_burst_leaves_a_thread_to_others(bench: Bench) -> None:
    bench.ask("burst", 20)
    assert await bench.started(2) == ["burst"] * 2
    bench.ask("other")
    assert await bench.started(3) == ["burst", "burst", "other"]


async def test_owners_are_served_in_turn_whoever_came_first(bench: Bench) -> None:
    bench.turns = Turns(1, 64, "test")
    bench.ask("a", 10)
    await bench.started(1)
    bench.ask("b", 3)
    bench.ask("c", 3)
    for count in range(2, 9):
        bench.release()
        await bench.started(count)
    assert "".join(bench.began) == "aabcabca"


async def test_too_much_work_is_refused_and_places_are_kept_for_others(bench: Bench) -> None:
    bench.turns = Turns(3, 16, "test")
    bench.ask("burst", 16)
    await bench.started(2)
    with pytest.raises(QueueFull, match="14 of them"):
        await bench.turns.run("burst", lambda: None)
    bench.ask("other", 2)
    assert await bench.started(3) == ["burst", "burst", "other"]


async def test_work_whose_client_left_is_not_done_and_takes_no_place(bench: Bench) -> None:
    bench.turns = Turns(3, 8, "test")
    waiting = bench.ask("a", 9)[2:]
    await bench.started(2)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    bench.ask("a", 7)  # as many places as there were before
    bench.release(2)
    assert len(await bench.started(4)) == 4


async def test_results_and_errors_reach_who_asked(bench: Bench) -> None:
    def fails() -> None:
        raise InvalidRequest("no")

    bench.release()
    assert await bench.ask("a")[0] == "a"
    with pytest.raises(InvalidRequest, match="no"):
        await bench.turns.run("a", fails)
    bench.release()
    assert await bench.ask("a")[0] == "a"


async def test_work_that_ends_after_its_client_left_frees_its_thread(bench: Bench) -> None:
    (asked,) = bench.ask("a")
    await bench.started(1)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    bench.release(3)
    assert await bench.ask("a")[0] == "a"
    assert bench.turns._running.total() == 0

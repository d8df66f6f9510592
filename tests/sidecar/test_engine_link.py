"""The engine next door: it gets the policy, at once and again after a restart, and nothing waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from kvsteward_contract.directive import EnginePolicy, Mode, Outcome, Retention
from kvsteward_sidecar import engine_link
from kvsteward_sidecar.engine_link import EngineAddress, EngineLink
from support.control_plane import TOKEN, PolicyEngine, until


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PolicyEngine]:
    monkeypatch.setattr(engine_link, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(engine_link, "RETRY_SECONDS", 0.02)
    fake = PolicyEngine()
    await fake.start()
    yield fake
    await fake.stop()


class Linked:
    """A link that wants epochs as a Control does: always past the engine's."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.now = 0.0
        self.heard: list[int] = []
        address = EngineAddress(url, TOKEN)
        self.link = EngineLink(session, address, self.heard.append, lambda state: None, clock=lambda: self.now)


@asynccontextmanager
async def linked(engine: PolicyEngine) -> AsyncIterator[Linked]:
    async with aiohttp.ClientSession() as session:
        made = Linked(session, engine.url)
        task = asyncio.create_task(made.link.run())
        try:
            yield made
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def policy(epoch: int, version: str = "v") -> EnginePolicy:
    return EnginePolicy(epoch, version, {"private": Retention()}, "00" * 32)


async def test_the_engines_epoch_is_read_before_anything_is_pushed(engine: PolicyEngine) -> None:
    engine.epoch = 41
    async with linked(engine) as made:
        await until(lambda: made.heard == [41])
        assert made.link.ready
        assert engine.pushes == []


async def test_a_wish_arrives_and_is_confirmed(engine: PolicyEngine) -> None:
    async with linked(engine) as made:
        await until(lambda: made.link.ready)
        assert not made.link.acknowledged
        made.link.want(policy(1))
        await until(lambda: made.link.acknowledged)
        assert (engine.epoch, engine.version) == (1, "v")


async def test_a_wish_from_before_the_engine_was_there_arrives_when_it_is(engine: PolicyEngine) -> None:
    engine.loading = True
    async with linked(engine) as made:
        made.link.want(policy(1))
        await asyncio.sleep(0.1)
        assert not made.link.ready
        engine.loading = False
        await until(lambda: made.link.acknowledged)


async def test_a_newer_wish_does_not_wait_for_an_older_one_to_be_confirmed(engine: PolicyEngine) -> None:
    engine.confirm_after = asyncio.Event()
    async with linked(engine) as made:
        await until(lambda: made.link.ready)
        made.link.want(policy(1))
        await until(lambda: len(engine.pushes) == 1)
        made.link.want(policy(2))
        await until(lambda: len(engine.pushes) >= 2, 0.5)
        assert engine.pushes[-1].epoch == 2
        engine.confirm_after.set()
        await until(lambda: made.link.acknowledged)
        assert engine.epoch == 2


async def test_a_slow_confirmation_is_waited_for_and_not_asked_for_again_and_again(engine: PolicyEngine) -> None:
    engine.confirm_after = asyncio.Event()
    async with linked(engine) as made:
        await until(lambda: made.link.ready)
        made.link.want(policy(1))
        await asyncio.sleep(0.3)
        assert len(engine.pushes) == 1
        assert not made.link.acknowledged
        engine.confirm_after.set()
        await until(lambda: made.link.acknowledged)


async def test_a_restarted_engine_is_told_again_and_until_then_nothing_is_acknowledged(engine: PolicyEngine) -> None:
    async with linked(engine) as made:
        await until(lambda: made.link.ready)
        made.link.want(policy(5))
        await until(lambda: made.link.acknowledged)
        engine.confirm_after = asyncio.Event()
        engine.restart()
        await until(lambda: not made.link.acknowledged)
        engine.confirm_after.set()
        await until(lambda: made.link.acknowledged)
        assert (engine.epoch, made.link.restarts) == (5, 1)
        assert made.heard == [0]


async def test_an_engine_that_is_ahead_is_reported_so_that_it_can_be_passed(engine: PolicyEngine) -> None:
    async with linked(engine) as made:
        await until(lambda: made.link.ready)
        engine.epoch = 9
        made.link.want(policy(3))
        await until(lambda: 9 in made.heard)
        assert not made.link.acknowledged


async def test_an_engine_that_went_away_is_not_ready_and_is_ready_again_when_it_is_back(engine: PolicyEngine) -> None:
    async with linked(engine) as made:
        await until(lambda: made.link.ready)
        await engine.stop()
        await until(lambda: not made.link.ready)
        await engine.start()
        await until(lambda: made.link.ready)


async def test_only_silence_longer_than_the_tolerance_makes_an_engine_dead(engine: PolicyEngine) -> None:
    async with linked(engine) as made:
        await until(lambda: made.link.ready)
        await engine.stop()
        await until(lambda: not made.link.ready)
        made.now += engine_link.LIVE_TOLERANCE - 1
        assert made.link.live
        made.now += 2
        assert not made.link.live


async def test_an_engine_that_is_slow_stays_ready_for_a_while_and_not_for_ever(
    engine: PolicyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_link, "POLL_TIMEOUT", 0.05)
    async with linked(engine) as made:
        await until(lambda: made.link.ready)
        engine.stuck = True
        made.now += engine_link.BUSY_SECONDS - 1
        await asyncio.sleep(0.3)
        assert made.link.ready
        made.now += 2
        await until(lambda: not made.link.ready)
        engine.stuck = False
        await until(lambda: made.link.ready)


async def test_an_engine_that_answers_that_it_is_loading_is_alive(engine: PolicyEngine) -> None:
    engine.loading = True
    async with linked(engine) as made:
        made.now += engine_link.LIVE_TOLERANCE * 10
        await until(lambda: made.link.live)
        assert not made.link.ready


async def test_a_wrong_token_is_not_ready(engine: PolicyEngine) -> None:
    async with linked(engine) as made:
        made.link.address = EngineAddress(engine.url, "wrong")
        await until(lambda: not made.link.ready)
        await asyncio.sleep(0.1)
        assert not made.link.ready


async def test_the_outcome_of_a_request_that_still_runs_is_waited_for(engine: PolicyEngine) -> None:
    name = "0" * 32
    engine.outcomes[name] = None
    async with linked(engine) as made:
        asked = asyncio.create_task(made.link.outcome(name))
        await asyncio.sleep(0.1)
        assert not asked.done()
        engine.outcomes[name] = Outcome(name, Mode.COLD, 1, finish="cancelled")
        found = await asked
        assert found is not None
        assert found.finish == "cancelled"


async def test_an_unknown_request_has_no_outcome(engine: PolicyEngine) -> None:
    async with linked(engine) as made:
        assert await made.link.outcome("f" * 32) is None


async def test_statistics_of_before_stay_when_the_engine_is_gone(engine: PolicyEngine) -> None:
    async with linked(engine) as made:
        await made.link.refresh_stats()
        assert made.link.stats["oomRecoveries"] == 1
        await engine.stop()
        await made.link.refresh_stats()
        assert made.link.stats["oomRecoveries"] == 1

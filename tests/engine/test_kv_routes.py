"""/kv/v1: what the sidecar tells the engine, and asks it."""

import asyncio
import json
from typing import Any

import msgspec
import pytest
from kvsteward_contract.directive import Directive, EngineState, Mode, encode
from support.engine_server import SALTS, eventually, policy, serving


def directive(request: str) -> Directive:
    return Directive(request * 32, Mode.REUSE, 1, SALTS["a"], "Private/a", "private", "v1", "a")


async def test_a_policy_is_confirmed_with_the_engines_state() -> None:
    async with serving() as served:
        async with served.get("/kv/v1/policy") as response:
            before = msgspec.json.decode(await response.read(), type=EngineState)
        async with served.post("/kv/v1/policy", encode(policy(5))) as response:
            after = msgspec.json.decode(await response.read(), type=EngineState)
        assert (before.epoch, after.epoch, after.version) == (0, 5, "v1")
        assert before.instance == after.instance
        assert (after.pool_tokens, after.max_tokens) == (1024, 512)


async def test_an_older_policy_is_refused_with_the_epoch_in_force() -> None:
    async with serving() as served:
        async with served.post("/kv/v1/policy", encode(policy(5))) as response:
            assert response.status == 200
        async with served.post("/kv/v1/policy", encode(policy(4))) as response:
            assert response.status == 409
            assert msgspec.json.decode(await response.read(), type=EngineState).epoch == 5


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"{}",
        json.dumps({"epoch": -1, "version": "v", "retention": {}}).encode(),
        json.dumps({"epoch": 1, "version": "v", "retention": {}, "new": 1}).encode(),
        json.dumps({"epoch": 1, "version": "v", "retention": {"a": {"quotaPercent": 101}}}).encode(),
        b'{"epoch": ' + b"[" * 100_000,
    ],
)
async def test_a_policy_that_cannot_be_read_changes_nothing(body: bytes) -> None:
    async with serving() as served:
        async with served.post("/kv/v1/policy", body) as response:
            assert response.status == 400
        assert served.engine.state().epoch == 0


async def test_outcomes_are_kept_for_who_asks_later() -> None:
    async with serving() as served:
        served.runner.hold()
        running = asyncio.ensure_future(served.complete("x", directive("1")))
        await eventually(served.runner.waiting.is_set)
        async with served.get(f"/kv/v1/outcomes/{'1' * 32}") as response:
            assert response.status == 202
        served.runner.release()
        answer = await running
        async with served.get(f"/kv/v1/outcomes/{'1' * 32}") as response:
            assert (response.status, await response.read()) == (200, encode(answer["outcome"]))
        async with served.get(f"/kv/v1/outcomes/{'2' * 32}") as response:
            assert response.status == 404


async def test_the_ledger_shows_every_page_once_over_several_calls() -> None:
    async with serving() as served:
        served.engine.set_policy(policy())
        await served.complete(list(range(40)), directive("1"))
        pages: list[dict[str, Any]] = []
        cursor: str | None = ""
        while cursor is not None:
            async with served.get("/kv/v1/ledger", params={"limit": "3", "cursor": cursor}) as response:
                answer = await response.json()
            assert len(answer["pages"]) <= 3
            pages += answer["pages"]
            cursor = answer["cursor"]
        assert len({page["key"] for page in pages}) == len(pages) >= 10
        assert {page["scope"] for page in pages} == {"Private/a"}
        assert "tokens" not in pages[0]


@pytest.mark.parametrize("limit", ["0", "-1", "1001", "x", "", "\u0663", "9" * 5000])
async def test_a_limit_out_of_range_is_refused(limit: str) -> None:
    async with serving() as served, served.get("/kv/v1/ledger", params={"limit": limit}) as response:
        assert response.status == 400


async def test_stats_tell_what_is_resident_and_reused() -> None:
    async with serving() as served:
        served.engine.set_policy(policy())
        for request in "12":
            await served.complete(list(range(40)), directive(request))
        async with served.get("/kv/v1/stats") as response:
            stats = await response.json()
        assert stats["reusedTokens"] == 36
        assert stats["residentPages"]["Private"] >= 10
        assert (stats["model"], stats["epoch"], stats["running"]) == ("", 1, 0)
        assert stats["scopeViolations"] == 0

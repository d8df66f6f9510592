"""Clients that leave, engines that fail, tokens that are wrong, servers that start and drain."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from kvsteward_contract.directive import Directive, Mode
from kvsteward_engine.service import Loaded, Phase
from multidict import CIMultiDict
from support.engine_server import MODEL, TOKENIZER, Served, directive_header, eventually, policy, serving

BODY = {"model": MODEL, "prompt": "x" * 20, "temperature": 0, "max_tokens": 200, "ignore_eos": True}
TOKEN = "t" * 32


# ---- clients that leave


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("when", ["prefill", "decode", "queue"])
async def test_a_client_that_leaves_is_cancelled_within_a_step(stream: bool, when: str) -> None:
    async with serving(max_concurrent=1) as served:
        served.engine.set_policy(policy())
        served.runner.hold()
        if when == "queue":
            blocker = asyncio.ensure_future(served.complete(max_tokens=2))
            await eventually(served.runner.waiting.is_set)
        directive = Directive("9" * 32, Mode.REUSE, 1, "aa" * 32, "Private/a", "private", "v1", "a")
        leaving = asyncio.ensure_future(_read(served, BODY | {"stream": stream}, directive))
        await eventually(lambda: served.engine.in_flight(directive.request))
        if when == "decode":
            served.runner.allow(3)
            await eventually(lambda: len(served.runner.steps) == 4)
        elif when == "prefill":
            await eventually(served.runner.waiting.is_set)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await eventually(lambda: served.service.in_flight == (1 if when == "queue" else 0))
        steps = len(served.runner.steps)
        served.runner.allow(10)
        await eventually(lambda: not served.engine.in_flight(directive.request))
        assert sum(directive.request in step for step in served.runner.steps[steps:]) == 0
        outcome = served.engine.outcome(directive.request)
        assert outcome is not None and outcome.finish == "cancelled"
        async with served.get(f"/kv/v1/outcomes/{directive.request}") as response:
            assert (await response.json())["tokenizeSeconds"] > 0
        if when == "queue":
            await blocker
        stats = served.engine.stats()
        assert (stats["running"], stats["waiting"]) == (0, 0)
        assert stats["freePages"] + stats["retainedPages"] == stats["totalPages"]
        assert await served.metric('kvsteward_engine_finished_total{finish="cut"}') == 1


async def _read(served: Served, body: dict[str, Any], directive: Directive | None = None) -> bytes:
    async with served.post("/v1/completions", body, headers=directive_header(directive)) as response:
        return await response.read()


# ---- engines that fail


async def test_a_stream_cut_by_a_failure_does_not_look_complete() -> None:
    async with serving("abcdefgh") as served:
        served.runner.hold()
        served.runner.allow(2)
        async with served.post("/v1/completions", {"model": MODEL, "prompt": "x", "stream": True}) as response:
            assert b"data: " in await response.content.readuntil(b"\n\n")
            served.runner.failure = RuntimeError("a kernel went wrong")
            served.runner.release()
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        served.runner.failure = None
        assert (await served.complete())["choices"][0]["text"] == "abcdefgh"  # one failed step is survived


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_is_an_error_with_a_status(stream: bool) -> None:
    async with serving() as served:
        served.runner.failure = RuntimeError("a kernel went wrong")
        async with served.post("/v1/completions", {"model": MODEL, "prompt": "x", "stream": stream}) as response:
            assert response.status == 500
            assert "a kernel went wrong" in (await response.json())["error"]["message"]


# ---- who may ask


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param([("Authorization", f"Bearer {TOKEN}")], 200, id="the token"),
        pytest.param([("authorization", f"bearer {TOKEN}")], 200, id="in small letters"),
        pytest.param([], 401, id="none"),
        pytest.param([("Authorization", TOKEN)], 401, id="no scheme"),
        pytest.param([("Authorization", f"Basic {TOKEN}")], 401, id="another scheme"),
        pytest.param([("Authorization", "Bearer ")], 401, id="empty"),
        pytest.param([("Authorization", f"Bearer {TOKEN[:-1]}")], 401, id="a part of it"),
        pytest.param([("Authorization", f"Bearer {TOKEN}x")], 401, id="more than it"),
        pytest.param([("Authorization", f"Bearer {TOKEN}"), ("Authorization", "Bearer x")], 401, id="two"),
        pytest.param([("Authorization", "Bearer \u00e9")], 401, id="no ASCII"),
        pytest.param([("X-Api-Key", TOKEN)], 401, id="in another header"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/kv/v1/policy", "/kv/v1/stats", "/kv/v1/ledger"])
async def test_every_route_wants_the_token(path: str, headers: list[tuple[str, str]], status: int) -> None:
    async with serving(token=TOKEN.encode()) as served, served.get(path, headers=CIMultiDict(headers)) as response:
        assert response.status == status


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/tokenize"),
        ("POST", "/kv/v1/policy"),
        ("POST", "/kv/v1/drain"),
        ("POST", "/health"),
        ("GET", "/nowhere"),
        ("GET", "/health/"),
        ("GET", "//health"),
    ],
)
async def test_without_the_token_nothing_is_told_not_even_what_exists(method: str, path: str) -> None:
    async with serving(token=TOKEN.encode()) as served:
        async with served.session.request(method, served.url + path, data=b"{}") as response:
            assert response.status == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
        assert served.service.phase is Phase.READY
        async with served.get("/health") as response:
            assert response.status == 200


# ---- start and end


async def test_while_it_loads_every_request_is_told_to_come_back() -> None:
    async with serving(ready=False) as served:
        async with served.get("/health") as response:
            assert (response.status, await response.json()) == (503, {"status": "loading"})
            assert int(response.headers["Retry-After"]) > 0
        for path in ("/v1/models", "/kv/v1/policy", "/kv/v1/stats"):
            async with served.get(path) as response:
                assert response.status == 503 and int(response.headers["Retry-After"]) > 0
        async with served.post("/v1/completions", BODY) as response:
            assert response.status == 503 and int(response.headers["Retry-After"]) > 0
        async with served.get("/metrics") as response:
            assert response.status == 200


async def test_a_drain_lets_what_runs_finish_and_takes_nothing_new() -> None:
    async with serving("abcd") as served:
        served.runner.hold()
        running = asyncio.ensure_future(served.stream("/v1/completions", {"model": MODEL, "prompt": "x"}))
        await eventually(served.runner.waiting.is_set)
        async with served.post("/kv/v1/drain") as response:
            assert await response.json() == {"status": "draining", "inFlight": 1}
        async with served.post("/v1/completions", BODY) as response:
            assert response.status == 503 and int(response.headers["Retry-After"]) > 0
            assert response.headers["Connection"] == "close"
        async with served.get("/health") as response:
            assert (response.status, await response.json()) == (503, {"status": "draining"})
        served.runner.release()
        assert (await running).text == "abcd"
        async with served.get("/kv/v1/drain") as response:
            assert await response.json() == {"status": "draining", "inFlight": 0}
        async with served.get("/kv/v1/policy") as response:
            assert response.status == 200  # the sidecar still has to hear of it


async def test_a_drain_that_comes_while_loading_stays() -> None:
    async with serving(ready=False) as served:
        async with served.post("/kv/v1/drain"):
            pass
        served.service.ready(Loaded(served.engine, TOKENIZER, 10, 10))
        assert served.service.phase is Phase.DRAINING


async def test_a_slow_reader_gets_the_whole_answer() -> None:
    async with serving("abcd" * 20) as served:
        async with served.post("/v1/completions", BODY | {"stream": True, "max_tokens": 80}) as response:
            await asyncio.sleep(0.3)
            events = (await response.read()).split(b"\n\n")
        chunks = [json.loads(event[6:]) for event in events if event.startswith(b"data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abcd" * 20

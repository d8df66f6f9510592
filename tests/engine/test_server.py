"""The HTTP server over a real engine whose runner is scripted: answers, streams, refusals."""

import asyncio
import contextlib
import io
import json
from typing import Any

import aiohttp
import pytest
from kvsteward_contract import wire
from kvsteward_contract.directive import Directive, Mode, encode
from kvsteward_engine.server import MAX_BODY
from support.engine_server import END, MODEL, SALTS, TOKENIZER, eventually, policy, serving

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
TEXT = "one two \u4f60\u597d three"


def reuse(request: str, tenant: str = "a", epoch: int = 1, mode: Mode = Mode.REUSE) -> Directive:
    return Directive(request * 32, mode, epoch, SALTS[tenant], f"Private/{tenant}", "private", "v1", tenant)


# ---- answers


async def test_a_completion_has_text_usage_and_an_outcome() -> None:
    async with serving(TEXT) as served:
        answer = await served.complete("some prompt")
        prompt = len(TOKENIZER.encode("some prompt"))
        output = len(TOKENIZER.encode(TEXT)) + 1  # the end token counts
        assert (answer["object"], answer["model"]) == ("text_completion", MODEL)
        assert answer["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}]
        assert answer["usage"] == {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        outcome = answer["outcome"]
        assert (outcome.mode, outcome.finish, outcome.prompt_tokens) == (Mode.COLD, "stop", prompt)
        assert outcome.tokenize_seconds > 0
        assert answer["id"] == f"cmpl-{outcome.request}"


async def test_a_chat_answers_as_the_assistant() -> None:
    async with serving(TEXT) as served, served.post("/v1/chat/completions", CHAT) as response:
        answer = await response.json()
        assert answer["object"] == "chat.completion"
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
        rendered = TOKENIZER.encode(TOKENIZER.render(CHAT["messages"]), add_special_tokens=False)
        assert answer["usage"]["prompt_tokens"] == len(rendered)


async def test_an_answer_ends_at_its_limit() -> None:
    async with serving(TEXT) as served:
        answer = await served.complete(max_tokens=2)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["choices"][0]["text"] == TOKENIZER.decode(TOKENIZER.encode(TEXT)[:2])


async def test_the_end_token_can_be_ignored_and_others_made_ends() -> None:
    async with serving("ab") as served:
        answer = await served.complete(max_tokens=8, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 8
        stop = TOKENIZER.encode("b")
        assert (await served.complete(stop_token_ids=stop))["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("prompt", ["words", TOKENIZER.encode("words")], ids=["text", "token ids"])
async def test_a_prompt_may_be_text_or_token_ids(prompt: Any) -> None:
    async with serving() as served:
        assert (await served.complete(prompt))["usage"]["prompt_tokens"] == len(TOKENIZER.encode("words"))


async def test_a_long_prompt_is_tokenised_beside_the_event_loop_with_the_same_result() -> None:
    async with serving(max_tokens=4096, pages=2048) as served:
        prompt = "the time was now " * 200
        assert (await served.complete(prompt))["usage"]["prompt_tokens"] == len(TOKENIZER.encode(prompt))


# ---- streams


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_says_what_the_whole_answer_says(path: str) -> None:
    body = {"model": MODEL, "prompt": "x"} if path == "/v1/completions" else CHAT
    async with serving(TEXT) as served:
        got = await served.stream(path, body)
        assert got.text == TEXT
        assert all("\ufffd" not in event.decode() for event in got.events)
        assert [chunk["choices"][0]["finish_reason"] for chunk in got.chunks[:-1]] == [None] * (len(got.chunks) - 1)
        assert got.chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert "usage" not in got.chunks[0]
        assert got.events[-1] == b"data: [DONE]"
        assert got.events[-2].startswith(wire.OUTCOME_COMMENT)
        assert (got.outcome.finish, got.outcome.output_tokens) == ("stop", len(TOKENIZER.encode(TEXT)) + 1)


async def test_a_chats_first_chunk_names_the_role_and_no_other_does() -> None:
    async with serving(TEXT) as served:
        deltas = [chunk["choices"][0]["delta"] for chunk in (await served.stream("/v1/chat/completions", CHAT)).chunks]
        assert deltas[0]["role"] == "assistant"
        assert not any("role" in delta for delta in deltas[1:])


async def test_usage_comes_in_a_chunk_of_its_own_when_asked_for() -> None:
    async with serving() as served:
        got = await served.stream("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}})
        assert all(chunk["usage"] is None for chunk in got.chunks[:-1])
        last = got.chunks[-1]
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == got.outcome.output_tokens
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_each_token_is_sent_as_it_comes() -> None:
    async with serving("xzqj") as served:
        served.runner.hold()
        served.runner.allow(1)
        async with served.post("/v1/completions", {"model": MODEL, "prompt": "x", "stream": True}) as response:
            assert b'"text":"x"' in await response.content.readuntil(b"\n\n")
            served.runner.allow(1)
            assert b'"text":"z"' in await response.content.readuntil(b"\n\n")


async def test_sixteen_streams_at_once_do_not_mix() -> None:
    async with serving(TEXT) as served:
        bodies = [
            {"model": MODEL, "prompt": f"number {i}", "stream_options": {"include_usage": True}} for i in range(16)
        ]
        got = await asyncio.gather(*(served.stream("/v1/completions", body) for body in bodies))
        assert all(one.text == TEXT for one in got)
        assert [one.chunks[-1]["usage"]["prompt_tokens"] for one in got] == [
            len(TOKENIZER.encode(body["prompt"])) for body in bodies
        ]
        assert len({one.chunks[0]["id"] for one in got}) == 16


# ---- stop strings and log probabilities


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        pytest.param("two", "one ", id="inside a token"),
        pytest.param(["zzz", "o \u4f60"], "one tw", id="over several tokens"),
        pytest.param("\u597d th", "one two \u4f60", id="over characters of several tokens"),
        pytest.param("one", "", id="at once"),
        pytest.param("absent", TEXT, id="never"),
    ],
)
async def test_the_answer_ends_before_a_stop_string(stop: Any, expected: str, stream: bool) -> None:
    async with serving(TEXT) as served:
        if stream:
            got = await served.stream(
                "/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 40, "stop": stop}
            )
            text, reason, outcome = got.text, got.chunks[-1]["choices"][0]["finish_reason"], got.outcome
        else:
            answer = await served.complete(stop=stop, max_tokens=40)
            text, reason = answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]
            outcome = answer["outcome"]
        assert (text, reason, outcome.finish) == (expected, "stop", "stop")
        # The engine stops with the very token that completes the stop string, however slow the reader is.
        ids = [*TOKENIZER.encode(TEXT), END]
        stops = [stop] if isinstance(stop, str) else stop
        needed = next(
            (n for n in range(1, len(ids)) if any(one in TOKENIZER.decode(ids[:n]) for one in stops)), len(ids)
        )
        assert outcome.output_tokens == needed


async def test_completion_log_probabilities_have_openais_shape() -> None:
    async with serving("xz the") as served:
        logprobs = (await served.complete(logprobs=2))["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["x", "z", " the"]  # and no end token
        assert logprobs["token_logprobs"] == [0, -0.1, -0.2]
        assert logprobs["text_offset"] == [0, 1, 2]
        assert logprobs["top_logprobs"][1] == {"z": -0.1, "{": -9.0}
        assert (await served.complete(logprobs=0))["choices"][0]["logprobs"]["top_logprobs"] == [None] * 3


async def test_chat_log_probabilities_have_openais_shape_in_streams_too() -> None:
    asked = CHAT | {"logprobs": True, "top_logprobs": 1}
    async with serving("a\u00e9") as served:
        async with served.post("/v1/chat/completions", asked) as response:
            content = (await response.json())["choices"][0]["logprobs"]["content"]
        first, *halves = content
        assert first == {
            "token": "a",
            "logprob": 0,
            "bytes": [97],
            "top_logprobs": [{"token": "a", "logprob": 0, "bytes": [97]}],
        }
        assert [half["bytes"] for half in halves] == [[0xC3], [0xA9]]
        streamed = await served.stream("/v1/chat/completions", asked)
        assert [entry for chunk in streamed.chunks for entry in chunk["choices"][0]["logprobs"]["content"]] == content


# ---- reuse


async def test_reuse_is_reported_and_another_tenant_gets_none() -> None:
    prompt = list(range(40))
    async with serving() as served:
        served.engine.set_policy(policy())
        first = await served.complete(prompt, reuse("1"))
        again = await served.complete(prompt, reuse("2"))
        other = await served.complete(prompt, reuse("3", "b"))
        assert [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, again, other)] == [0, 36, 0]
        assert [one["outcome"].reused_tokens for one in (first, again, other)] == [0, 36, 0]
        assert first["outcome"].output_digest == again["outcome"].output_digest != ""
        streamed = await served.stream("/v1/completions", {"model": MODEL, "prompt": prompt}, reuse("4"))
        assert streamed.outcome.reused_tokens == 36


async def test_a_directive_of_another_epoch_runs_cold() -> None:
    async with serving() as served:
        served.engine.set_policy(policy())
        await served.complete(list(range(40)), reuse("1"))
        late = await served.complete(list(range(40)), reuse("2", epoch=0))
        assert (late["outcome"].mode, late["outcome"].reused_tokens) == (Mode.COLD, 0)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param("{", id="no JSON"),
        pytest.param("[]", id="no object"),
        pytest.param('{"request":"x","mode":"Reuse","epoch":1}', id="an id of another form"),
        pytest.param(json.dumps({"request": "1" * 32, "mode": "Reuse", "epoch": 1, "extra": 1}), id="unknown field"),
        pytest.param(json.dumps({"request": "1" * 32, "mode": "Warm", "epoch": 1}), id="unknown mode"),
        pytest.param(json.dumps({"request": "1" * 32, "mode": "Reuse", "epoch": -1}), id="epoch below 0"),
        pytest.param(json.dumps({"request": "1" * 32, "mode": "Reuse", "epoch": 1, "namespace": "zz"}), id="no salt"),
        pytest.param("x" * 4000, id="oversized"),
        pytest.param('{"request":"\u00e9"}', id="no ASCII"),
    ],
)
async def test_a_directive_that_cannot_be_read_runs_cold_and_is_counted(value: str) -> None:
    async with serving() as served:
        served.engine.set_policy(policy())
        await served.complete(list(range(40)), reuse("1"))
        assert await served.metric("kvsteward_engine_bad_directives_total") == 0
        body = {"model": MODEL, "prompt": list(range(40))}
        async with served.post("/v1/completions", body, headers={wire.DIRECTIVE_HEADER: value}) as response:
            answer = await response.json()
        assert (response.status, answer["usage"]["prompt_tokens_details"]["cached_tokens"]) == (200, 0)
        assert await served.metric("kvsteward_engine_bad_directives_total") == 1


async def test_two_directives_are_none() -> None:
    async with serving() as served:
        served.engine.set_policy(policy())
        await served.complete(list(range(40)), reuse("1"))
        headers = [(wire.DIRECTIVE_HEADER, encode(reuse("2")).decode()), (wire.DIRECTIVE_HEADER, "{}")]
        async with served.post("/v1/completions", {"model": MODEL, "prompt": list(range(40))}, headers=headers) as got:
            assert (await got.json())["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert await served.metric("kvsteward_engine_bad_directives_total") == 1


# ---- refusals


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        pytest.param("/v1/completions", b"{", 400, id="no JSON"),
        pytest.param("/v1/completions", b'{"model":"tiny","prompt":"\\ud800 x"}', 400, id="lone surrogate"),
        pytest.param("/v1/completions", {"prompt": "x"}, 400, id="no model"),
        pytest.param("/v1/completions", {"model": "other", "prompt": "x"}, 404, id="another model"),
        pytest.param("/v1/completions", {"model": MODEL, "prompt": ""}, 400, id="empty prompt"),
        pytest.param("/v1/completions", {"model": MODEL, "prompt": [999_999]}, 400, id="token id too large"),
        pytest.param("/v1/completions", {"model": MODEL, "prompt": [1] * 600}, 400, id="prompt beyond the context"),
        pytest.param("/v1/completions", {"model": MODEL, "prompt": [1] * 512}, 400, id="prompt as long as the context"),
        pytest.param(
            "/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 600}, 400, id="answer beyond the context"
        ),
        pytest.param("/v1/completions", {"model": MODEL, "prompt": "x", "temperature": 9}, 400, id="temperature"),
        pytest.param("/v1/completions", {"model": MODEL, "prompt": "x", "n": 2}, 400, id="two answers"),
        pytest.param("/v1/chat/completions", {"model": MODEL, "messages": []}, 400, id="no messages"),
        pytest.param("/v1/chat/completions", CHAT | {"tools": [{}]}, 400, id="tools"),
        pytest.param("/tokenize", {"model": MODEL}, 400, id="nothing to tokenise"),
        pytest.param("/tokenize", {"prompt": "x", "messages": CHAT["messages"]}, 400, id="two things to tokenise"),
        pytest.param("/v1/embeddings", {"model": MODEL}, 404, id="another API"),
        pytest.param("/v1/models", {}, 405, id="another method"),
    ],
)
async def test_a_refusal_has_openais_shape_and_the_engine_goes_on(path: str, body: Any, status: int) -> None:
    async with serving(TEXT) as served:
        running = asyncio.ensure_future(served.complete("x" * 50))
        async with served.post(path, body) as response:
            error = (await response.json())["error"]
        assert response.status == status
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["message"]
        assert (await running)["choices"][0]["text"] == TEXT
        assert served.service.in_flight == 0


async def test_a_body_too_large_is_refused_by_its_length_and_by_what_comes() -> None:
    async with serving() as served:
        big = b" " * (MAX_BODY + 1)

        async def parts() -> Any:
            for start in range(0, len(big), 65536):
                yield big[start : start + 65536]

        answers = []
        for data in (io.BytesIO(big), parts()):
            # The server may close before all of it is sent; the client then may or may not see why.
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with served.session.post(served.url + "/v1/completions", data=data) as response:
                    answers.append((response.status, (await response.json())["error"]["type"]))
        assert set(answers) == {(413, "invalid_request_error")}
        route = 'kvsteward_engine_requests_total{route="/v1/completions",status="413"}'
        assert await served.metric(route) == 2
        assert (await served.complete())["choices"]


async def test_a_full_queue_says_when_to_come_back() -> None:
    async with serving(max_waiting=1, max_concurrent=1) as served:
        served.runner.hold()
        first = asyncio.ensure_future(served.complete())
        await eventually(served.runner.waiting.is_set)
        second = asyncio.ensure_future(served.complete())
        await eventually(lambda: served.service.in_flight == 2)
        async with served.post("/v1/completions", {"model": MODEL, "prompt": "x", "stream": True}) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
            assert (await response.json())["error"]["type"] == "rate_limit_error"
        served.runner.release()
        served.runner.allow(1)
        assert (await first)["choices"] and (await second)["choices"]


async def test_too_many_long_prompts_at_once_are_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsteward_engine.service.MAX_OFF_LOOP", 0)
    async with serving() as served:
        async with served.post("/tokenize", {"prompt": "x" * 3000}) as response:
            assert response.status == 429
        async with served.post("/tokenize", {"prompt": "x" * 300}) as response:
            assert response.status == 200


async def test_long_prompts_are_tokenised_in_the_turn_of_their_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(max_tokens=4096, pages=2048) as served:
        turns, owners = served.service._tokenising, []
        run = turns.run

        async def noted(owner: str, work: Any) -> Any:
            owners.append(owner)
            return await run(owner, work)

        monkeypatch.setattr(turns, "run", noted)
        await served.complete("the time was now " * 200, reuse("a", "a"))
        await served.complete("the time was now " * 200)
        async with served.post("/tokenize", {"prompt": "x" * 3000}) as response:
            assert response.status == 200
        assert owners == ["a", "", ""]


# ---- other routes


async def test_tokenize_gives_the_ids_that_would_be_run() -> None:
    async with serving() as served:
        async with served.post("/tokenize", {"prompt": "the time"}) as response:
            ids = TOKENIZER.encode("the time")
            assert await response.json() == {"count": len(ids), "max_model_len": 512, "tokens": ids}
        async with served.post("/tokenize", {"model": MODEL, "messages": CHAT["messages"]}) as response:
            tokens = (await response.json())["tokens"]
        assert (await served.complete(tokens))["usage"]["prompt_tokens"] == len(tokens)
        async with served.post("/v1/chat/completions", CHAT) as response:
            assert (await response.json())["usage"]["prompt_tokens"] == len(tokens)


async def test_models_lists_the_one_served() -> None:
    async with serving() as served, served.get("/v1/models") as response:
        (model,) = (await response.json())["data"]
        assert (model["id"], model["object"], model["max_model_len"]) == (MODEL, "model", 512)


async def test_metrics_count_what_was_done() -> None:
    async with serving() as served:
        await served.complete("x")
        async with served.post("/v1/completions", b"{"):
            pass
        assert await served.metric('kvsteward_engine_requests_total{route="/v1/completions",status="200"}') == 1
        assert await served.metric('kvsteward_engine_requests_total{route="/v1/completions",status="400"}') == 1
        assert await served.metric('kvsteward_engine_finished_total{finish="stop"}') == 1
        assert await served.metric('kvsteward_engine_tokens_total{kind="prompt"}') == 1
        assert await served.metric("kvsteward_engine_pages") == 256

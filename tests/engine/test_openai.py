"""Requests of the OpenAI API: what is taken, and the words in which the rest is refused."""

import gc
import json
import time
from typing import Any

import pytest
from kvsteward_engine.openai import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    Generation,
    Text,
    characters,
    decode,
    generation,
)
from kvsteward_engine.service import INLINE_CHARACTERS

USER = {"role": "user", "content": "hi"}


def completion(**fields: Any) -> Generation:
    return generation(decode(CompletionRequest, json.dumps({"model": "m", "prompt": "x"} | fields).encode()))


def chat(**fields: Any) -> Generation:
    return generation(decode(ChatRequest, json.dumps({"model": "m", "messages": [USER]} | fields).encode()))


def test_defaults_are_openais() -> None:
    asked = completion()
    sampling = asked.sampling(16)
    assert (asked.max_tokens, asked.stream, asked.stops, asked.logprobs) == (16, False, (), None)
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (1.0, 1.0, None)
    assert chat().max_tokens is None


def test_null_stands_for_the_default() -> None:
    names = ("temperature", "top_p", "top_k", "stop", "seed", "max_tokens", "stream", "stream_options", "logprobs", "n")
    assert completion(**dict.fromkeys(names)).sampling(16) == completion().sampling(16)


def test_all_sampling_fields_arrive() -> None:
    asked = completion(
        temperature=0, top_p=0.5, top_k=7, min_p=0.1, seed=3, stop_token_ids=[4], ignore_eos=True, logprobs=2,
        frequency_penalty=-2, presence_penalty=2,
    )  # fmt: skip
    got = asked.sampling(9)
    assert (got.max_tokens, got.temperature, got.top_p, got.top_k, got.min_p, got.seed) == (9, 0.0, 0.5, 7, 0.1, 3)
    assert (got.stop_token_ids, got.ignore_eos, got.logprobs) == (frozenset({4}), True, 2)
    assert (got.frequency_penalty, got.presence_penalty) == (-2, 2)
    assert completion(top_k=-1).sampling(1).top_k == 0


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        pytest.param("text", Text("text", True), id="text"),
        pytest.param(["text"], Text("text", True), id="one text in a list"),
        pytest.param([1, 2], [1, 2], id="token ids"),
        pytest.param([[1, 2]], [1, 2], id="one list of token ids"),
    ],
)
def test_a_prompt_may_be_text_or_token_ids(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompt == expected


def test_content_parts_are_joined_and_the_developer_is_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = chat(messages=[{"role": "developer", "content": parts}, USER | {"name": "ann"}])
    assert asked.prompt == [{"role": "system", "content": "ab"}, USER | {"name": "ann"}]


def test_an_assistants_turn_may_come_back_with_its_empty_fields() -> None:
    turn = {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None, "annotations": []}
    assert chat(messages=[USER, turn, USER]).prompt[1] == {"role": "assistant", "content": "yes"}


def test_a_chats_limit_has_two_names() -> None:
    assert chat(max_tokens=5).max_tokens == chat(max_completion_tokens=5).max_tokens == 5


def test_chat_log_probabilities_need_two_fields() -> None:
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).logprobs == 3
    assert chat(logprobs=False).logprobs is None


def test_fields_that_ask_for_nothing_are_taken() -> None:
    completion(n=1, best_of=1, echo=False, logit_bias={}, suffix=None, user="ann", repetition_penalty=1.0)
    chat(tools=[], tool_choice="none", response_format={"type": "text"}, parallel_tool_calls=True, store=False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        pytest.param({"temperature": 2.01}, "temperature", id="temperature above 2"),
        pytest.param({"temperature": -0.01}, "temperature", id="temperature below 0"),
        pytest.param({"temperature": "1"}, "temperature", id="temperature as text"),
        pytest.param({"top_p": 0}, "top_p", id="top_p 0"),
        pytest.param({"top_p": 1.1}, "top_p", id="top_p above 1"),
        pytest.param({"top_k": -2}, "top_k", id="top_k below -1"),
        pytest.param({"top_k": 1.5}, "top_k", id="top_k no integer"),
        pytest.param({"min_p": 1.5}, "min_p", id="min_p"),
        pytest.param({"max_tokens": 0}, "max_tokens", id="max_tokens 0"),
        pytest.param({"max_tokens": 2**70}, "max_tokens", id="max_tokens beyond 64 bits"),
        pytest.param({"seed": -1}, "seed", id="seed below 0"),
        pytest.param({"seed": 2**63}, "seed", id="seed beyond 63 bits"),
        pytest.param({"frequency_penalty": 2.1}, "frequency_penalty", id="frequency_penalty"),
        pytest.param({"presence_penalty": -2.1}, "presence_penalty", id="presence_penalty"),
        pytest.param({"logprobs": 21}, "logprobs", id="too many log probabilities"),
        pytest.param({"logprobs": True}, "logprobs", id="chat's logprobs in a completion"),
        pytest.param({"stop": ""}, "stop", id="empty stop string"),
        pytest.param({"stop": ["a", ""]}, "stop[1]", id="empty stop string in a list"),
        pytest.param({"stop": ["a"] * 17}, "stop", id="too many stop strings"),
        pytest.param({"stop_token_ids": [-1]}, "stop_token_ids[0]", id="stop token below 0"),
        pytest.param({"stream": 1}, "stream", id="stream no boolean"),
        pytest.param({"stream_options": {"include_usage": True}}, "stream_options", id="stream_options alone"),
        pytest.param({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", id="unknown stream option"),
        pytest.param({"prompt": ""}, "prompt", id="empty prompt"),
        pytest.param({"prompt": []}, "prompt", id="empty list"),
        pytest.param({"prompt": [[]]}, "prompt", id="empty list of tokens"),
        pytest.param({"prompt": ["a", "b"]}, "prompt", id="two prompts"),
        pytest.param({"prompt": [1, "a"]}, "prompt", id="mixed prompt"),
        pytest.param({"prompt": [-1]}, "prompt[0]", id="token below 0"),
        pytest.param({"prompt": [1, 2**40]}, "prompt[1]", id="token far too large"),
        pytest.param({"prompt": [1.5]}, "prompt[0]", id="token no integer"),
        pytest.param({"prompt": None}, "prompt", id="no prompt"),
        pytest.param({"model": 1}, "model", id="model no text"),
        pytest.param({"n": 2}, "n", id="n 2"),
        pytest.param({"n": True}, "n", id="n true"),
        pytest.param({"best_of": 2}, "best_of", id="best_of"),
        pytest.param({"echo": True}, "echo", id="echo"),
        pytest.param({"suffix": "x"}, "suffix", id="suffix"),
        pytest.param({"logit_bias": {"1": 2}}, "logit_bias", id="logit_bias"),
        pytest.param({"prompt_logprobs": 1}, "prompt_logprobs", id="prompt_logprobs"),
        pytest.param({"prompt_logprobs": 0}, "prompt_logprobs", id="prompt_logprobs 0"),
        pytest.param({"repetition_penalty": 1.1}, "repetition_penalty", id="repetition_penalty"),
        pytest.param({"response_format": {"type": "json_object"}}, "response_format", id="response_format"),
        pytest.param({"cache_salt": "x"}, "cache_salt", id="another server's field"),
        pytest.param({"messages": []}, "messages", id="chat's field in a completion"),
    ],
)
def test_a_completion_that_cannot_be_done_is_refused_by_the_fields_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        completion(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.message.startswith(f"{param}: ")
    assert json.loads(refused.value.body())["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        pytest.param({"messages": []}, "messages", id="no messages"),
        pytest.param({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", id="tool"),
        pytest.param({"messages": [{"role": "user"}]}, "messages[0].content", id="no content"),
        pytest.param({"messages": [{"content": "x"}]}, "messages[0].role", id="no role"),
        pytest.param({"messages": [USER | {"x": 1}]}, "messages[0].x", id="unknown field of a message"),
        pytest.param({"messages": [USER | {"tool_calls": [1]}]}, "messages[0].tool_calls", id="tool calls"),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
            id="image",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
            "messages[0].content",
            id="number",
        ),
        pytest.param({"tools": [{"type": "function"}]}, "tools", id="tools"),
        pytest.param({"tool_choice": "required"}, "tool_choice", id="tool_choice"),
        pytest.param({"functions": [{}]}, "functions", id="functions"),
        pytest.param({"modalities": ["audio"]}, "modalities", id="modalities"),
        pytest.param({"reasoning_effort": "low"}, "reasoning_effort", id="reasoning_effort"),
        pytest.param({"top_logprobs": 2}, "top_logprobs", id="top_logprobs alone"),
        pytest.param({"logprobs": 1}, "logprobs", id="a completion's logprobs in a chat"),
        pytest.param({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", id="two limits"),
        pytest.param({"prompt": "x"}, "prompt", id="a completion's field in a chat"),
    ],
)
def test_a_chat_that_cannot_be_done_is_refused_by_the_fields_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.message.startswith(f"{param}: ")


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"{", id="cut off"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b"null", id="null"),
        pytest.param(b'{"model": "m", "prompt": "\xff"}', id="no UTF-8"),
        pytest.param(b'{"model": "m", "prompt": "a\\ud800b"}', id="a lone surrogate"),
        pytest.param(b'{"model": "m", "prompt": "x", "temperature": NaN}', id="NaN"),
        pytest.param(b'{"model": "m", "prompt": "x", "temperature": 1e999}', id="a number too large"),
        pytest.param(b'{"model": "m", "prompt": "x"} x', id="something behind it"),
        pytest.param(b'{"model": "m", "prompt": ' + b"[" * 200_000, id="nested without end"),
        pytest.param(b'{"model": "m", "logit_bias": ' + b'{"a":' * 200_000, id="nested in a field of any kind"),
        pytest.param(b'{"prompt": "x"}', id="no model"),
    ],
)
def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        decode(CompletionRequest, body)
    assert refused.value.status == 400
    assert json.loads(refused.value.body())["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b'{"model": "m", "messages": [{"role": "user", "content": "x", "%b": 1}]}', id="unknown-field"),
        pytest.param(b'{"model": "m", "%b": 1}', id="unknown-field-of-the-request"),
        pytest.param(b'{"model": "m", "messages": [{"role": "%b", "content": "x"}]}', id="role"),
        pytest.param(
            b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "%b"}]}]}', id="type-of-a-part"
        ),
    ],
)
def test_a_name_of_megabytes_is_refused_soon_and_not_sent_back(body: bytes) -> None:
    """The event loop, which every stream and the kill switch wait for, read it for two seconds once."""
    began = time.process_time()
    with pytest.raises(ApiError) as refused:
        generation(decode(ChatRequest, body % (b" - at `$" * 250_000)))
    assert len(refused.value.body()) < 4_000
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize("depth", [*range(900, 1000, 9)])
def test_a_part_that_is_nested_as_deeply_as_can_be_read_is_refused(depth: int) -> None:
    content = b'[{"type": %b}]' % (b"[" * depth + b"]" * depth)
    with pytest.raises(ApiError) as refused:
        generation(decode(ChatRequest, b'{"model": "m", "messages": [{"role": "user", "content": %b}]}' % content))
    assert refused.value.status == 400


def test_a_body_of_many_small_things_is_not_searched_for_garbage_while_it_is_read() -> None:
    """For a million of them, which four megabytes hold, that took a second of the event loop."""
    collected: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        collected.append(phase)

    gc.callbacks.append(note)
    try:
        request = decode(CompletionRequest, b'{"model": "m", "prompt": [%b[1]]}' % (b"[1]," * 100_000))
    finally:
        gc.callbacks.remove(note)
    assert len(collected) <= 4  # once it is over
    assert gc.isenabled()
    with pytest.raises(ApiError, match="one prompt a request"):
        generation(request)


def test_messages_count_as_text_also_when_they_are_empty() -> None:
    assert characters([{"role": "user", "content": ""}] * 4096) > INLINE_CHARACTERS
    assert characters([{"role": "user", "content": "", "name": "n" * 256}] * 8) > INLINE_CHARACTERS
    assert characters([{"role": "user", "content": "hi"}]) < 100

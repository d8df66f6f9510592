"""A body is checked, reduced to what its route allows, and written anew."""

import json
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvsteward_contract.policy import Backend
from kvsteward_sidecar.body import LOOKED_AT, BodyError, Room, read, reduce
from kvsteward_sidecar.routes import Route, find


def route(target: str = "/v1/chat/completions") -> Route:
    found = find(Backend.BUILTIN, "POST", target)
    assert found is not None
    return found


def reduced(data: bytes, target: str = "/v1/chat/completions") -> dict[str, object]:
    return dict(json.loads(reduce(data, route(target)).data))


def test_allowed_values_pass_unchanged() -> None:
    sent = {
        "model": "tiny",
        "messages": [{"role": "user", "content": 'ein "Gr\u00fc\u00dfe" \U0001f600 \\n'}],
        "seed": 7,
    }
    assert reduced(json.dumps(sent).encode()) == sent
    assert reduced(json.dumps(sent, ensure_ascii=False).encode()) == sent


@pytest.mark.parametrize(
    ("key", "label"),
    [
        ("cache_salt", "cache_salt"),
        ("kv_transfer_params", "kv_transfer_params"),
        ("request_id", "request_id"),
        ("X-KV-Directive", "other"),
        ("no such key", "other"),
        ("extra_body", "other"),
    ],
)
def test_a_foreign_key_is_dropped_and_named(key: str, label: str) -> None:
    body = reduce(json.dumps({"model": "tiny", key: "victim"}).encode(), route())
    assert json.loads(body.data) == {"model": "tiny"}
    assert body.dropped == (label,)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b'{"model":"tiny","cache_salt":"a","cache_salt":"b"}', id="twice"),
        pytest.param(b'{"model":"tiny","\\u0063ache_salt":"a"}', id="escaped"),
        pytest.param(b'{"cache_salt":"a","model":"tiny","\\u0063ache_\\u0073alt":"b"}', id="plain-and-escaped"),
    ],
)
def test_no_spelling_of_a_salt_gets_through(data: bytes) -> None:
    body = reduce(data, route())
    assert body.data == b'{"model":"tiny"}'
    assert body.dropped == ("cache_salt",)


def test_a_key_written_twice_is_one_key_with_the_last_value() -> None:
    assert reduce(b'{"model":"a","model":"b","mod\\u0065l":"c"}', route()).data == b'{"model":"c"}'


def test_the_user_is_read_for_the_cohort_and_not_passed_on() -> None:
    body = reduce(b'{"model":"tiny","user":"u-1"}', route())
    assert (body.user, body.data, body.dropped) == ("u-1", b'{"model":"tiny"}', ())


@pytest.mark.parametrize("user", [b"1", b"null", b'{"a":1}', b"[]", b"1e999", b"9" * 5000, b"[" * 800 + b"]" * 800])
def test_a_user_that_is_no_text_is_no_session(user: bytes) -> None:
    assert reduce(b'{"model":"tiny","user":%b}' % user, route()).user == ""


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"[]", id="array"),
        pytest.param(b'"text"', id="string"),
        pytest.param(b'{"model":"tiny"', id="cut"),
        pytest.param(b'{"model":"tiny"} {}', id="two-objects"),
        pytest.param(b'{"seed":NaN}', id="nan"),
        pytest.param(b'{"seed":Infinity}', id="infinity"),
        pytest.param(b'{"seed":-Infinity}', id="minus-infinity"),
        pytest.param(b'{"seed":01}', id="leading-zero"),
        pytest.param(b'{"prompt":"\\ud800"}', id="lone-surrogate"),
        pytest.param(b'{"messages":[{"content":"a\\udfffb"}]}', id="lone-low-surrogate-inside"),
        pytest.param(b'{"prompt":"\xff"}', id="not-utf-8"),
        pytest.param(b'{"prompt":"\xed\xa0\x80"}', id="surrogate-in-utf-8"),
        pytest.param(b'{"prompt":"\x00"}', id="control-character"),
        pytest.param(b"\xef\xbb\xbf{}", id="byte-order-mark"),
        pytest.param(b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", id="too-deep"),
        pytest.param('{"model":"tiny"}'.encode("utf-16"), id="utf-16"),
    ],
)
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(BodyError) as caught:
        reduce(data, route())
    assert caught.value.status == 400
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("target", "fields", "supported"),
    [
        pytest.param("/v1/completions", {"prompt": "a"}, True, id="plain"),
        pytest.param("/v1/completions", {"prompt_logprobs": 1}, False, id="prompt-logprobs"),
        pytest.param("/v1/completions", {"prompt_logprobs": 0}, False, id="prompt-logprobs-0-asks-too"),
        pytest.param("/v1/completions", {"prompt_logprobs": None}, True, id="prompt-logprobs-null"),
        pytest.param("/v1/completions", {"echo": True, "logprobs": 1}, False, id="echo-with-logprobs"),
        pytest.param("/v1/completions", {"echo": True, "logprobs": 0}, False, id="echo-with-logprobs-0"),
        pytest.param("/v1/completions", {"echo": 1, "logprobs": 1}, False, id="echo-1"),
        pytest.param("/v1/completions", {"echo": False, "logprobs": 1}, True, id="logprobs-alone"),
        pytest.param("/v1/completions", {"echo": True}, True, id="echo-alone"),
        pytest.param("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2}, True, id="chat-logprobs"),
        pytest.param("/v1/chat/completions", {"prompt_logprobs": 2}, False, id="chat-prompt-logprobs"),
    ],
)
def test_log_probabilities_of_the_prompt_need_a_cold_run(
    target: str, fields: dict[str, object], supported: bool
) -> None:
    assert reduce(json.dumps(fields).encode(), route(target)).supported is supported


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(["model", "messages", "seed", "stop", "cache_salt", "kv_transfer_params", "nope", "user", ""])


@given(st.dictionaries(KEYS, JSON))
def test_the_engine_gets_the_allowed_keys_with_their_values_and_no_other(fields: dict[str, object]) -> None:
    body = reduce(msgspec.json.encode(fields), route())
    assert json.loads(body.data) == {key: value for key, value in fields.items() if key in route().keys}
    assert len(body.dropped) == len(fields.keys() - route().keys - {"user"})


@given(st.dictionaries(KEYS, JSON))
def test_a_long_body_is_reduced_as_a_short_one_is(fields: dict[str, object]) -> None:
    short = reduce(msgspec.json.encode(fields), route())
    long = reduce(msgspec.json.encode(fields) + b" " * LOOKED_AT, route())
    assert json.loads(long.data) == json.loads(short.data)
    assert (long.user, long.supported, set(long.dropped)) == (short.user, short.supported, set(short.dropped))


def test_a_body_of_nothing_but_keys_is_reduced_soon() -> None:
    keys = ",".join(f'"{number:x}":1' for number in range(300_000))
    began = time.process_time()
    body = reduce(b'{"model":"tiny","cache_salt":"x",%b}' % keys.encode(), route())
    assert time.process_time() - began < 0.25
    assert (body.data, sorted(body.dropped)) == (b'{"model":"tiny"}', ["cache_salt", "other"])


@pytest.mark.parametrize("data", [b"[]", b'{"a":1', b'{"model":"\\ud800"}', b'{"user":' + b"[" * 5_000])
def test_a_long_body_that_is_no_json_object_is_refused_too(data: bytes) -> None:
    with pytest.raises(BodyError) as caught:
        reduce(data + b" " * LOOKED_AT, route())
    assert caught.value.status == 400


async def test_a_body_is_read_to_its_end_and_no_further_than_its_limit() -> None:
    taken = []

    async def chunks():  # type: ignore[no-untyped-def]
        for size in (4, 4, 4):
            taken.append(size)
            yield b"x" * size

    assert await read(chunks(), 12, Room(12)) == b"x" * 12
    taken.clear()
    with pytest.raises(BodyError) as caught:
        await read(chunks(), 7, Room(12))
    assert caught.value.status == 413
    assert len(taken) == 2

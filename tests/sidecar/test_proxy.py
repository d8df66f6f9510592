"""A request's whole way, over real sockets: a real Control, an engine that answers as a script says, raw clients."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvsteward_contract.decision import Reason
from kvsteward_contract.directive import Mode, Outcome
from kvsteward_contract.policy import IdentitySource, WhenMissing
from kvsteward_sidecar import proxy, relay
from kvsteward_sidecar.control import Control
from support.control_plane import TOKEN, document, until
from support.traffic import (
    ACME,
    GLOBEX,
    TAIL,
    Cut,
    ScriptedEngine,
    Seen,
    Sidecar,
    answer,
    chat,
    event,
    get,
    running_sidecar,
    stream,
    stream_head,
    whole,
    write_chunk,
)

SALT_OF_ANOTHER = "f" * 64


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    made = ScriptedEngine()
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def sidecar(tmp_path: Path, engine: ScriptedEngine) -> AsyncIterator[Sidecar]:
    async with running_sidecar(tmp_path, engine) as running:
        yield running


# What reaches the engine.


async def test_an_answer_comes_back_with_a_receipt_and_without_the_outcome(
    sidecar: Sidecar, engine: ScriptedEngine
) -> None:
    got = await sidecar.ask(chat())
    assert (got.status, got.body) == (200, b'{"ok":true}')
    assert got.header("x-kv-outcome") is None
    receipt = await sidecar.receipt(got.header("x-kv-receipt"))
    assert (receipt.decision, receipt.ending, receipt.reused_tokens) == ("Reuse", "completed", 16)


async def test_the_engine_gets_headers_made_here_and_none_of_the_clients(
    sidecar: Sidecar, engine: ScriptedEngine
) -> None:
    trace = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    sent = {
        "X-KV-Directive": '{"request":"'
        + "0" * 32
        + '","mode":"Reuse","epoch":1,"namespace":"'
        + SALT_OF_ANOTHER
        + '"}',
        "X-KV-Outcome": "{}",
        "X-Request-Id": "mine",
        "X-KV-Namespace": SALT_OF_ANOTHER,
        "Cookie": "a=b",
        "Accept-Encoding": "gzip",
        "User-Agent": "curl",
        "X-Forwarded-For": "10.0.0.1",
        "Accept": "text/evil",
        "traceparent": trace,
        "tracestate": "vendor=1",
    }
    assert (await sidecar.ask(chat(headers=sent))).status == 200
    (seen,) = engine.seen
    assert seen.line == "POST /v1/chat/completions HTTP/1.1"
    assert sorted(name.lower() for name, _ in seen.headers) == [
        "accept",
        "authorization",
        "content-length",
        "content-type",
        "host",
        "traceparent",
        "tracestate",
        "x-kv-directive",
    ]
    assert seen.values("authorization") == [f"Bearer {TOKEN}"]
    assert seen.values("traceparent") == [trace]
    assert seen.directive.namespace != SALT_OF_ANOTHER
    assert seen.directive.request != "0" * 32
    assert sidecar.dropped() == {"x-kv-directive": 1, "x-kv-outcome": 1, "x-request-id": 1, "x-kv-other": 1}


@pytest.mark.parametrize(
    "headers",
    [
        [("traceparent", "garbage")],
        [("traceparent", "00-" + "1" * 32 + "-" + "2" * 16 + "-01")] * 2,
        [("tracestate", "vendor=1")],
    ],
    ids=["malformed", "twice", "state-alone"],
)
async def test_a_trace_context_that_is_not_well_formed_is_dropped(
    sidecar: Sidecar, engine: ScriptedEngine, headers: list[tuple[str, str]]
) -> None:
    assert (await sidecar.ask(chat(headers=headers))).status == 200
    assert not {"traceparent", "tracestate"} & {name for name, _ in engine.seen[0].headers}


async def test_a_clients_salt_and_unknown_keys_are_dropped_and_counted(
    sidecar: Sidecar, engine: ScriptedEngine
) -> None:
    body = b'{"model":"tiny","messages":[],"cache_salt":"v","\\u0063ache_salt":"w",'
    body += b'"kv_transfer_params":{},"frob":1,"user":"u"}'
    assert (await sidecar.ask(chat(body))).status == 200
    assert engine.seen[0].json == {"model": "tiny", "messages": []}
    assert sidecar.dropped() == {"cache_salt": 1, "kv_transfer_params": 1, "other": 1}


async def test_two_tenants_get_different_scopes_and_one_tenant_the_same(
    sidecar: Sidecar, engine: ScriptedEngine
) -> None:
    for key in (ACME, GLOBEX, ACME):
        await sidecar.ask(chat(key=key))
    one, other, again = (seen.directive for seen in engine.seen)
    assert one.mode is other.mode is Mode.REUSE
    assert one.namespace == again.namespace != other.namespace
    assert one.scope == again.scope != other.scope
    assert one.request != again.request
    assert "acme" not in engine.seen[0].values("x-kv-directive")[0]


@pytest.mark.parametrize(
    "request_bytes",
    [
        get("/kv/v1/policy"),
        get("/kv/v1/ledger"),
        get("/metrics"),
        get("/reset_prefix_cache", "POST"),
        get("//v1/models"),
        get("/v1/%6dodels"),
        get("/%2e/v1/models"),
        get("/v1/models/../../kv/v1/policy"),
        get("http://127.0.0.1/kv/v1/policy"),
        get("/v1/models", "DELETE"),
        chat(target="/v1/chat/completions/"),
        chat(target="http://engine/v1/chat/completions"),
    ],
    ids=lambda data: data.split(b"\r\n")[0].decode(),
)
async def test_everything_else_is_404_and_never_reaches_the_engine(
    sidecar: Sidecar, engine: ScriptedEngine, request_bytes: bytes
) -> None:
    got = await sidecar.ask(request_bytes)
    assert got.status == 404
    assert got.error["code"] == "not_found"
    assert engine.seen == []
    assert (await sidecar.ask(get("/v1/models"))).status == 200  # beside it, a control


async def test_models_and_tokenize_pass_without_a_directive(sidecar: Sidecar, engine: ScriptedEngine) -> None:
    assert (await sidecar.ask(get("/v1/models?limit=1"))).body == b'{"ok":true}'
    got = await sidecar.ask(chat({"prompt": "a", "cache_salt": "x"}, target="/tokenize"))
    assert got.status == 200
    assert got.header("x-kv-receipt") is None
    models, tokenize = engine.seen
    assert models.line == "GET /v1/models HTTP/1.1"
    assert tokenize.json == {"prompt": "a"}
    assert models.values("x-kv-directive") == tokenize.values("x-kv-directive") == []
    assert models.values("authorization") == [f"Bearer {TOKEN}"]


# Smuggling.


@pytest.mark.parametrize(
    "headers",
    [
        [("Transfer-Encoding", "chunked")],
        [("Content-Length", "7")],
        [("Transfer-Encoding", "xchunked")],
        [("X-A", "b\nX-KV-Directive: {}")],
    ],
    ids=["two-framings", "two-lengths", "unknown-coding", "bare-line-feed"],
)
async def test_a_request_that_could_be_framed_two_ways_is_refused_and_its_connection_closed(
    sidecar: Sidecar, engine: ScriptedEngine, headers: list[tuple[str, str]]
) -> None:
    client = await sidecar.connect()
    got = await client.ask(chat(headers=headers))
    assert got.status == 400
    assert await client.reader.read() == b""
    assert engine.seen == []


async def test_a_body_with_a_request_in_it_stays_a_body(sidecar: Sidecar, engine: ScriptedEngine) -> None:
    inner = "GET /kv/v1/policy HTTP/1.1\r\n\r\n"
    assert (await sidecar.ask(chat({"messages": [{"content": inner}]}))).status == 200
    assert [seen.line for seen in engine.seen] == ["POST /v1/chat/completions HTTP/1.1"]
    assert engine.seen[0].json["messages"] == [{"content": inner}]


async def test_requests_in_one_packet_are_answered_in_order(sidecar: Sidecar, engine: ScriptedEngine) -> None:
    client = await sidecar.connect()
    await client.send(chat({"seed": 1}) + chat({"seed": 2}, target="/v1/completions") + get("/nothing"))
    assert [(await client.answer()).status for _ in range(3)] == [200, 200, 404]
    assert [seen.json["seed"] for seen in engine.seen] == [1, 2]


# Who.


async def run_one(sidecar: Sidecar, engine: ScriptedEngine, data: bytes) -> tuple[str, Mode]:
    """The decision and the mode that the engine was told."""
    got = await sidecar.ask(data)
    assert got.status == 200
    receipt = await sidecar.receipt(got.header("x-kv-receipt"))
    return receipt.decision, engine.seen[-1].directive.mode


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(chat(), Reason.REUSE, id="a-known-key"),
        pytest.param(chat(key=None), Reason.NO_TENANT, id="no-key"),
        pytest.param(chat(key="x" * 32), Reason.NO_TENANT, id="an-unknown-key"),
        pytest.param(chat(headers={"X-KV-Tenant": "acme"}, key=None), Reason.NO_TENANT, id="a-header-is-no-key"),
        pytest.param(
            chat(headers=[("X-KV-Session", "a"), ("X-KV-Session", "b")]), Reason.AMBIGUOUS_METADATA, id="two-sessions"
        ),
        pytest.param(
            chat(headers=[("X-KV-Workload", "a"), ("X-KV-Workload", "b")]),
            Reason.AMBIGUOUS_METADATA,
            id="two-workloads",
        ),
        pytest.param(chat(headers={"X-KV-Session": "s" * 300}), Reason.AMBIGUOUS_METADATA, id="oversized-session"),
        pytest.param(chat(key="a" * 600), Reason.AMBIGUOUS_METADATA, id="oversized-key"),
        pytest.param(
            chat({"prompt": "a", "prompt_logprobs": 1}, target="/v1/completions"),
            Reason.UNSUPPORTED_REQUEST,
            id="prompt-logprobs",
        ),
        pytest.param(
            chat({"prompt": "a", "echo": True, "logprobs": 1}, target="/v1/completions"),
            Reason.UNSUPPORTED_REQUEST,
            id="echo-with-logprobs",
        ),
    ],
)
async def test_a_request_is_decided_by_what_it_is(
    sidecar: Sidecar, engine: ScriptedEngine, data: bytes, reason: Reason
) -> None:
    decided, mode = await run_one(sidecar, engine, data)
    assert decided == reason.value
    assert mode is (Mode.REUSE if reason is Reason.REUSE else Mode.COLD)
    if mode is Mode.COLD:
        assert engine.seen[-1].directive.namespace == engine.seen[-1].directive.scope == ""


async def test_two_credentials_never_reuse(sidecar: Sidecar, engine: ScriptedEngine) -> None:
    """Refused by the parser or run cold: in neither case does the second one have an effect."""
    got = await sidecar.ask(chat(headers=[("Authorization", f"Bearer {GLOBEX}")]))
    assert got.status in (200, 400)
    assert all(seen.directive.mode is Mode.COLD for seen in engine.seen)


@pytest.mark.parametrize(
    ("policy", "reason", "mode"),
    [
        pytest.param({"stage": "Cold"}, Reason.COLD_STAGE, Mode.COLD, id="cold"),
        pytest.param({"stage": "Shadow", "protectedPercent": 0}, Reason.SHADOW_STAGE, Mode.SHADOW, id="shadow"),
        pytest.param({"stage": "Canary", "protectedPercent": 0}, Reason.NOT_IN_COHORT, Mode.SHADOW, id="canary-0"),
        pytest.param(
            {"stage": "Canary", "canary": {"percent": 100}, "protectedPercent": 0},
            Reason.REUSE,
            Mode.REUSE,
            id="canary-100",
        ),
        pytest.param({"stage": "Full", "protectedPercent": 100}, Reason.PROTECTED, Mode.COLD, id="protected"),
        pytest.param({"stage": "Full", "killSwitch": "Engaged"}, Reason.KILL_SWITCH, Mode.COLD, id="switch"),
    ],
)
async def test_the_stage_decides(
    tmp_path: Path, engine: ScriptedEngine, policy: dict[str, Any], reason: Reason, mode: Mode
) -> None:
    made = document(**policy)
    async with running_sidecar(tmp_path, engine, made) as sidecar:
        if "killSwitch" in policy:
            sidecar.control.hold_cold()
        assert await run_one(sidecar, engine, chat()) == (reason.value, mode)


async def test_the_canary_is_for_its_workload_and_a_session_stays_on_one_side(
    tmp_path: Path, engine: ScriptedEngine
) -> None:
    made = document(stage="Canary", protectedPercent=0, canary={"percent": 50, "workloads": ["summaries"]})
    async with running_sidecar(tmp_path, engine, made) as sidecar:
        sides: dict[str, set[Mode]] = {}
        for number in range(24):
            session = f"session-{number % 12}"
            data = (
                chat(headers={"X-KV-Session": session, "X-KV-Workload": "summaries"})
                if number < 12
                else chat({"model": "tiny", "user": session}, headers={"X-KV-Workload": "summaries"})
            )
            _, mode = await run_one(sidecar, engine, data)
            sides.setdefault(session, set()).add(mode)
        assert {len(modes) for modes in sides.values()} == {1}  # the header and `user` name the same session
        assert set.union(*sides.values()) == {Mode.REUSE, Mode.SHADOW}
        for session in sides:
            other = chat(headers={"X-KV-Session": session, "X-KV-Workload": "else"})
            assert (await run_one(sidecar, engine, other))[1] is Mode.SHADOW


def with_identity(source: IdentitySource, missing: WhenMissing) -> Any:
    made = document(stage="Full", protectedPercent=0)
    identity = msgspec.structs.replace(made.identity, source=source, when_missing=missing)
    return msgspec.structs.replace(made, identity=identity)


@pytest.mark.parametrize("key", [None, "x" * 32, "a" * 600], ids=["missing", "unknown", "oversized"])
async def test_when_missing_is_reject_nobody_unidentified_gets_in(
    tmp_path: Path, engine: ScriptedEngine, key: str | None
) -> None:
    made = with_identity(IdentitySource.API_KEY, WhenMissing.REJECT)
    async with running_sidecar(tmp_path, engine, made) as sidecar:
        for target in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
            got = await sidecar.ask(chat(key=key, target=target))
            assert (got.status, got.error["code"]) == (401, "invalid_api_key")
        assert engine.seen == []
        assert (await sidecar.ask(chat())).status == 200


async def test_a_gateways_header_names_the_tenant_and_a_key_does_not(tmp_path: Path, engine: ScriptedEngine) -> None:
    made = with_identity(IdentitySource.HEADER, WhenMissing.COLD)
    async with running_sidecar(tmp_path, engine, made) as sidecar:
        decided, _ = await run_one(sidecar, engine, chat(headers={"X-KV-Tenant": "acme"}))
        assert decided == "NoTenant"  # no gateway secret here: the header proves nothing
        assert sidecar.dropped() == {}


async def test_a_key_revoked_while_its_body_is_on_the_way_does_not_count(
    sidecar: Sidecar, engine: ScriptedEngine, tmp_path: Path
) -> None:
    data = chat()
    client = await sidecar.connect()
    await client.send(data[:-5])
    await asyncio.sleep(0.05)
    (tmp_path / "tenants" / "acme").unlink()
    sidecar.control.refresh()
    await client.send(data[-5:])
    got = await client.answer()
    assert (await sidecar.receipt(got.header("x-kv-receipt"))).decision == "NoTenant"


# Bodies.


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"seed":NaN}', b'{"prompt":"\\ud800"}', b'{"a":', b'{"prompt":"\xff"}'],
    ids=["empty", "array", "nan", "lone-surrogate", "cut", "not-utf-8"],
)
async def test_a_bad_body_is_a_400_in_openais_shape(sidecar: Sidecar, engine: ScriptedEngine, body: bytes) -> None:
    client = await sidecar.connect()
    got = await client.ask(chat(body))
    assert got.status == 400
    assert got.error["type"] == "invalid_request_error"
    assert set(got.error) == {"message", "type", "param", "code"}
    assert engine.seen == []
    assert (await client.ask(chat())).status == 200  # the connection goes on


async def test_a_body_of_200_kb_goes_through(sidecar: Sidecar, engine: ScriptedEngine) -> None:
    content = "\u00e4b " * 70_000
    assert (await sidecar.ask(chat({"messages": [{"content": content}]}))).status == 200
    assert engine.seen[0].json["messages"][0]["content"] == content


async def test_a_chunked_body_goes_through(sidecar: Sidecar, engine: ScriptedEngine) -> None:
    client = await sidecar.connect()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: s\r\nAuthorization: Bearer {ACME}\r\n"
    await client.send(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
    for piece in (b'{"prompt"', b':"a"', b"}"):
        await client.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        await asyncio.sleep(0.01)
    await client.send(b"0\r\n\r\n")
    assert (await client.answer()).status == 200
    assert engine.seen[0].body == b'{"prompt":"a"}'


@pytest.mark.parametrize("chunked", [False, True], ids=["by-its-length", "as-it-comes"])
async def test_a_body_that_is_too_large_is_413(tmp_path: Path, engine: ScriptedEngine, chunked: bool) -> None:
    async with running_sidecar(tmp_path, engine, max_body=10_000) as sidecar:
        client = await sidecar.connect()
        if chunked:
            await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: s\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(20):
                await client.send(b"3e8\r\n" + b" " * 1000 + b"\r\n")
        else:
            await client.send(chat(b" " * 10_001)[:500])
        got = await client.answer()
        assert got.status == 413
        assert got.header("connection") == "close"
        assert engine.seen == []
        assert (await sidecar.ask(chat())).status == 200


async def test_a_compressed_body_is_refused(sidecar: Sidecar, engine: ScriptedEngine) -> None:
    assert (await sidecar.ask(chat(headers={"Content-Encoding": "gzip"}))).status == 415
    assert engine.seen == []


async def test_a_client_that_waits_for_leave_to_send_gets_it(sidecar: Sidecar) -> None:
    data = chat(headers={"Expect": "100-continue"})
    head, _, body = data.partition(b"\r\n\r\n")
    client = await sidecar.connect()
    assert (await client.ask(head + b"\r\n\r\n")).status == 100
    assert (await client.ask(body)).status == 200


async def test_a_body_that_never_comes_is_given_up(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "BODY_SECONDS", 0.05)
    client = await sidecar.connect()
    await client.send(chat()[:-4])
    assert (await client.answer()).status == 408


# Streams.


async def test_a_stream_passes_chunk_by_chunk_without_the_outcome(sidecar: Sidecar, engine: ScriptedEngine) -> None:
    engine.script = stream
    got = await sidecar.ask(chat({"stream": True}))
    assert got.header("content-type") == "text/event-stream"
    assert got.body == event("a") + event("b") + event("c") + TAIL
    receipt = await sidecar.receipt(got.header("x-kv-receipt"))
    assert (receipt.prompt_tokens, receipt.reused_tokens, receipt.ending) == (32, 16, "completed")
    assert receipt.time_to_first_token_seconds is not None


async def test_each_chunk_is_passed_on_before_the_next_is_made(sidecar: Sidecar, engine: ScriptedEngine) -> None:
    go = asyncio.Event()

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(stream_head())
        for text in "abcd":
            await write_chunk(writer, event(text))
            await go.wait()
            go.clear()
        await write_chunk(writer, TAIL)
        await write_chunk(writer, b"")

    engine.script = script
    client = await sidecar.connect()
    await client.send(chat({"stream": True}))
    async with asyncio.timeout(2):
        await client.head()
        for text in "abcd":
            assert await client.chunk() == event(text)
            go.set()
        assert await client.chunk() == TAIL
        assert await client.chunk() == b""


async def test_usage_with_cached_tokens_reaches_the_client(sidecar: Sidecar, engine: ScriptedEngine) -> None:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens_details":{"cached_tokens":16}}}\n\n'

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        """Everything in one write, as a loaded machine may deliver it."""
        parts = [event(), usage, b": kv-outcome " + seen.outcome(reused_tokens=16) + b"\n\n", TAIL]
        writer.write(stream_head() + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in [*parts, b""]))

    engine.script = script
    got = await sidecar.ask(chat({"stream": True}))
    assert got.body == event() + usage + TAIL
    assert (await sidecar.receipt(got.header("x-kv-receipt"))).reused_tokens == 16


async def test_time_to_first_token_ends_at_the_first_data_event(sidecar: Sidecar, engine: ScriptedEngine) -> None:
    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(stream_head())
        await write_chunk(writer, b": ping\n\n")
        await asyncio.sleep(0.15)
        await write_chunk(writer, event())
        await asyncio.sleep(0.3)
        await write_chunk(writer, b": kv-outcome " + seen.outcome() + b"\n\n" + TAIL)
        await write_chunk(writer, b"")

    engine.script = script
    got = await sidecar.ask(chat({"stream": True}))
    receipt = await sidecar.receipt(got.header("x-kv-receipt"))
    assert 0.15 <= receipt.time_to_first_token_seconds < 0.4


async def test_a_connection_carries_one_request_after_another(sidecar: Sidecar, engine: ScriptedEngine) -> None:
    engine.script = stream
    client = await sidecar.connect()
    for _ in range(5):
        got = await client.ask(chat({"stream": True}))
        assert got.header("connection") is None
        assert got.body.endswith(TAIL)
    assert engine.connections == 1


async def test_an_http_10_client_gets_its_stream_unframed_and_closed(sidecar: Sidecar, engine: ScriptedEngine) -> None:
    engine.script = stream
    got = await sidecar.ask(chat({"stream": True}, version="1.0"))
    assert got.header("transfer-encoding") is None
    assert got.body == event("a") + event("b") + event("c") + TAIL


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
async def test_the_engines_own_errors_pass_with_their_retry_after(
    sidecar: Sidecar, engine: ScriptedEngine, status: int
) -> None:
    body = json.dumps({"error": {"message": "no", "type": "x", "param": None, "code": None}}).encode()

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(status, body, {"Retry-After": "7", "Set-Cookie": "a=b", "Server": "engine"}))

    engine.script = script
    got = await sidecar.ask(chat())
    assert (got.status, got.body, got.header("retry-after")) == (status, body, "7")
    assert got.header("set-cookie") is None
    receipt = await sidecar.receipt(got.header("x-kv-receipt"))
    assert receipt.ending == ("refused" if status < 500 else "failed")


async def test_an_outcome_of_another_request_is_not_believed(sidecar: Sidecar, engine: ScriptedEngine) -> None:
    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        other = Outcome(request="0" * 32, mode=Mode.REUSE, epoch=1, reused_tokens=99)
        writer.write(answer(200, b"{}", {"X-KV-Outcome": msgspec.json.encode(other).decode()}))

    engine.script = script
    got = await sidecar.ask(chat())
    assert (await sidecar.receipt(got.header("x-kv-receipt"))).reused_tokens == 0


# Failures.


async def test_an_engine_that_dies_within_a_stream_cuts_it(sidecar: Sidecar, engine: ScriptedEngine) -> None:
    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(stream_head())
        await write_chunk(writer, event())
        writer.transport.abort()

    engine.script = script
    client = await sidecar.connect()
    await client.send(chat({"stream": True}))
    head = await client.head()
    assert await client.chunk() == event()
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await client.chunk()
    receipt = await sidecar.receipt(head.header("x-kv-receipt"))
    assert receipt.ending == "failed"


@pytest.mark.parametrize("how", ["engine-dies", "sidecar-stops"])
async def test_a_cut_stream_does_not_look_whole_to_a_client_that_knows_no_chunks(
    tmp_path: Path, engine: ScriptedEngine, how: str
) -> None:
    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(stream_head())
        await write_chunk(writer, event())
        if how == "sidecar-stops":
            await seen.left.wait()
        await asyncio.sleep(0.1)
        writer.transport.abort()

    engine.script = script
    async with running_sidecar(tmp_path, engine) as sidecar:
        client = await sidecar.connect()
        await client.send(chat({"stream": True}, version="1.0"))
        await client.head()
        assert await client.reader.readexactly(len(event())) == event()
        rest = asyncio.create_task(client.reader.read())
        if how == "engine-dies":
            await asyncio.wait([rest], timeout=5)
        else:
            sidecar.forget(client)  # it stays when the sidecar goes
    try:
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(rest, 5)
    finally:
        client.leave()


async def test_an_engine_that_dies_within_a_json_answer_cuts_it(sidecar: Sidecar, engine: ScriptedEngine) -> None:
    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
        await asyncio.sleep(0.05)
        writer.transport.abort()

    engine.script = script
    with pytest.raises(Cut):
        await sidecar.ask(chat())
    engine.script = whole
    assert (await sidecar.ask(chat())).status == 200


async def test_an_engine_that_dies_before_its_answer_gives_503(sidecar: Sidecar, engine: ScriptedEngine) -> None:
    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    engine.script = script
    got = await sidecar.ask(chat())
    assert (got.status, got.header("retry-after")) == (503, "1")
    assert (await sidecar.receipt(got.header("x-kv-receipt"))).ending == "failed"


async def test_an_engine_that_is_gone_gives_503_and_comes_back(sidecar: Sidecar, engine: ScriptedEngine) -> None:
    assert (await sidecar.ask(chat())).status == 200
    await engine.stop()
    got = await sidecar.ask(chat())
    assert got.status == 503
    assert got.header("retry-after")
    assert got.error["type"] == "server_error"
    await engine.start()
    await until(sidecar.control.engine_ready)
    assert (await sidecar.ask(chat())).status == 200


async def test_an_engine_that_closed_its_idle_connections_is_asked_again_unnoticed(
    sidecar: Sidecar, engine: ScriptedEngine
) -> None:
    for _ in range(3):
        assert (await sidecar.ask(chat())).status == 200
        engine.close_idle()
    assert len(engine.seen) == 3


async def test_no_request_is_refused_for_want_of_a_policy(tmp_path: Path, engine: ScriptedEngine) -> None:
    async with running_sidecar(tmp_path, engine) as sidecar:
        sidecar.control.policy.document = None
        sidecar.control.refresh()
        assert await run_one(sidecar, engine, chat()) == ("PolicyUnavailable", Mode.COLD)


# Clients that leave.


@pytest.mark.parametrize("polite", [False, True], ids=["reset", "closed"])
@pytest.mark.parametrize("streaming", [False, True], ids=["before-the-first-token", "within-the-stream"])
async def test_the_engine_hears_at_once_that_a_client_has_gone(
    sidecar: Sidecar, engine: ScriptedEngine, streaming: bool, polite: bool
) -> None:
    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        if streaming:
            writer.write(stream_head())
            await write_chunk(writer, event())
        await seen.left.wait()

    engine.script = script
    client = await sidecar.connect()
    await client.send(chat({"stream": True}))
    await until(lambda: engine.seen)
    if streaming:
        await client.head()
        await client.chunk()
    (seen,) = engine.seen
    request = seen.directive.request
    engine.outcomes[request] = Outcome(request=request, mode=Mode.REUSE, epoch=1, prompt_tokens=9, finish="cancelled")
    begun = time.perf_counter()
    if polite:
        client.writer.close()
    else:
        client.leave()
    async with asyncio.timeout(1):
        await seen.left.wait()
    assert time.perf_counter() - begun < 0.1  # bench-sidecar measures it; here the machine may be busy
    receipt = await sidecar.receipt(request)
    assert (receipt.ending, receipt.prompt_tokens, receipt.finish) == ("cancelled", 9, "cancelled")
    assert sidecar.control.in_flight == 0


async def test_a_client_that_leaves_while_it_sends_its_body_leaves_nothing_behind(
    sidecar: Sidecar, engine: ScriptedEngine
) -> None:
    client = await sidecar.connect()
    await client.send(chat()[:-4])
    await asyncio.sleep(0.05)
    client.leave()
    await asyncio.sleep(0.05)
    assert engine.seen == []
    assert sidecar.control.in_flight == 0


async def test_a_client_that_reads_slowly_slows_the_engine_and_loses_nothing(
    sidecar: Sidecar, engine: ScriptedEngine
) -> None:
    chunks, sent = 400, 0
    body = event("x" * 65_000)

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(stream_head())
        for _ in range(chunks):
            writer.write(b"%x\r\n%b\r\n" % (len(body), body))
            await writer.drain()
            sent += 1
        await write_chunk(writer, b": kv-outcome " + seen.outcome() + b"\n\n" + TAIL)
        await write_chunk(writer, b"")

    engine.script = script
    client = await sidecar.connect()
    await client.send(chat({"stream": True}))
    await client.head()
    await asyncio.sleep(0.3)
    held = sent
    await asyncio.sleep(0.2)
    assert sent == held < chunks
    received = 0
    while chunk := await client.chunk():
        received += len(chunk)
    assert received == chunks * len(body) + len(TAIL)


async def test_a_client_that_takes_nothing_for_too_long_is_given_up(
    sidecar: Sidecar, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "STALL_SECONDS", 0.1)
    body = event("x" * 65_000)

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(stream_head())
        while True:
            writer.write(b"%x\r\n%b\r\n" % (len(body), body))
            await writer.drain()

    engine.script = script
    client = await sidecar.connect()
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await client.send(chat({"stream": True}))
    await until(lambda: engine.seen)
    request = engine.seen[0].directive.request
    engine.outcomes[request] = Outcome(request=request, mode=Mode.REUSE, epoch=1, finish="cancelled")
    assert (await sidecar.receipt(request)).ending == "cancelled"
    assert sidecar.control.in_flight == 0


# The end.


async def test_a_drain_first_asks_clients_to_go_and_then_refuses(tmp_path: Path, engine: ScriptedEngine) -> None:
    async with running_sidecar(tmp_path, engine) as sidecar:
        engine.script = stream
        control: Control = sidecar.control
        waiting = await sidecar.connect()
        assert (await waiting.ask(chat({"stream": True}))).header("connection") is None
        control.drain._closing_seconds = 0.3
        draining = asyncio.create_task(control.drain.run(5))
        await asyncio.sleep(0.05)
        got = await waiting.ask(chat({"stream": True}))
        assert (got.status, got.header("connection")) == (200, "close")
        assert got.body.endswith(TAIL)
        assert await waiting.reader.read() == b""
        await draining
        got = await sidecar.ask(chat())
        assert got.status == 503
        assert got.header("retry-after")
        assert got.header("connection") == "close"


async def test_a_connection_that_was_promised_to_go_on_is_served_once_more_while_others_are_refused(
    tmp_path: Path, engine: ScriptedEngine
) -> None:
    """Its client may be sending already when the drain's second phase begins, and can't know."""
    go = asyncio.Event()

    async def slow(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        await stream(seen, writer)

    async with running_sidecar(tmp_path, engine) as sidecar:
        engine.script = stream
        kept = await sidecar.connect()
        assert (await kept.ask(chat({"stream": True}))).header("connection") is None
        engine.script = slow
        running = asyncio.create_task(sidecar.ask(chat({"stream": True})))
        await until(lambda: sidecar.control.in_flight == 1)
        engine.script = stream
        sidecar.control.drain._closing_seconds = 0.05
        draining = asyncio.create_task(sidecar.control.drain.run(30))
        await until(lambda: sidecar.control.refusal() is not None)
        got = await kept.ask(chat({"stream": True}))
        assert (got.status, got.header("connection")) == (200, "close")
        assert (await sidecar.ask(chat({"stream": True}))).status == 503
        go.set()
        assert (await running).status == 200
        await draining
        assert (await sidecar.ask(chat({"stream": True}))).status == 503


async def test_health_says_whether_a_request_can_be_served_now(sidecar: Sidecar, engine: ScriptedEngine) -> None:
    assert (await sidecar.ask(b"GET /health HTTP/1.1\r\nHost: s\r\n\r\n")).status == 200
    await engine.stop()
    await until(lambda: not sidecar.control.engine_ready())
    got = await sidecar.ask(b"GET /health HTTP/1.1\r\nHost: s\r\n\r\n")
    assert (got.status, got.header("retry-after")) == (503, "2")


async def test_every_request_ends_in_exactly_one_receipt(
    sidecar: Sidecar, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever becomes of them: answered, refused, cut, left, broken before the head."""
    finished: list[str] = []
    finish = sidecar.control.finish

    def counted(ticket: Any, *rest: Any) -> str:
        finished.append(ticket.request)
        return finish(ticket, *rest)

    monkeypatch.setattr(sidecar.control, "finish", counted)

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        kind = seen.json["seed"] % 5
        if kind == 0:
            await stream(seen, writer)
        elif kind == 1:
            writer.write(answer(429, b"{}"))
        elif kind == 2:
            writer.transport.abort()
        elif kind == 3:
            writer.write(stream_head())
            await write_chunk(writer, event())
            writer.transport.abort()
        else:
            await seen.left.wait()

    engine.script = script

    async def one(number: int) -> None:
        client = await sidecar.connect()
        await client.send(chat({"stream": True, "seed": number}))
        if number % 5 == 4:
            await asyncio.sleep(0.1)
            client.leave()
            return
        try:
            await client.answer()
        except Cut:
            pass

    await asyncio.gather(*(one(number) for number in range(40)))
    await until(lambda: sidecar.control.in_flight == 0)
    assert len(finished) == len(set(finished)) == 40
    assert {seen.directive.request for seen in engine.seen} <= set(
        finished
    )  # a client may leave before the engine hears

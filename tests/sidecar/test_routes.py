"""Only what stands in the table reaches the engine."""

import msgspec
import pytest
from kvsteward_contract.policy import Backend
from kvsteward_engine.openai import ChatRequest, CompletionRequest, TokenizeRequest
from kvsteward_sidecar.routes import Kind, find


@pytest.mark.parametrize(
    ("method", "target", "kind"),
    [
        pytest.param("POST", "/v1/chat/completions", Kind.GENERATE, id="chat"),
        pytest.param("POST", "/v1/completions", Kind.GENERATE, id="completions"),
        pytest.param("POST", "/tokenize", Kind.PLAIN, id="tokenize"),
        pytest.param("GET", "/v1/models", Kind.PLAIN, id="models"),
        pytest.param("GET", "/health", Kind.HEALTH, id="health"),
        pytest.param("POST", "/v1/chat/completions?api-version=1", Kind.GENERATE, id="a-query-is-ignored"),
    ],
)
def test_an_allowed_route_is_found(method: str, target: str, kind: Kind) -> None:
    route = find(Backend.BUILTIN, method, target)
    assert route is not None
    assert route.kind is kind
    assert "?" not in route.path


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("GET", "/kv/v1/policy"),
        ("POST", "/kv/v1/policy"),
        ("GET", "/kv/v1/ledger"),
        ("GET", "/kv/v1/stats"),
        ("GET", "/kv/v1/outcomes/00000000000000000000000000000000"),
        ("POST", "/kv/v1/drain"),
        ("GET", "/metrics"),
        ("POST", "/reset_prefix_cache"),
        ("GET", "/v1/chat/completions"),
        ("OPTIONS", "/v1/chat/completions"),
        ("HEAD", "/v1/models"),
        ("POST", "//v1/chat/completions"),
        ("POST", "/v1//chat/completions"),
        ("POST", "/v1/chat/completions/"),
        ("POST", "/v1/./chat/completions"),
        ("POST", "/v1/chat/%63ompletions"),
        ("GET", "/v1/%2e%2e/kv/v1/policy"),
        ("GET", "/v1/models/../../kv/v1/policy"),
        ("GET", "/v1/models/tiny"),
        ("GET", "http://engine/kv/v1/policy"),
        ("POST", "http://engine/v1/chat/completions"),
        ("POST", "/V1/chat/completions"),
        ("POST", "/v1/chat/completions;x"),
        ("POST", "/v1/chat/completions#x"),
        ("POST", "/v1/embeddings"),
        ("GET", "/docs"),
        ("GET", "/"),
        ("GET", ""),
        ("GET", "?/v1/models"),
        ("OPTIONS", "*"),
    ],
)
def test_anything_else_is_not(method: str, target: str) -> None:
    assert find(Backend.BUILTIN, method, target) is None


def test_no_route_passes_a_key_that_steers_the_cache() -> None:
    for target in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
        route = find(Backend.BUILTIN, "POST", target)
        assert route is not None
        assert not route.keys & {"cache_salt", "kv_transfer_params", "extra_body", "vllm_xargs", "user", "request_id"}


@pytest.mark.parametrize(
    ("target", "request_type"),
    [
        ("/v1/chat/completions", ChatRequest),
        ("/v1/completions", CompletionRequest),
        ("/tokenize", TokenizeRequest),
    ],
)
def test_what_passes_is_what_the_engine_knows(target: str, request_type: type[msgspec.Struct]) -> None:
    route = find(Backend.BUILTIN, "POST", target)
    assert route is not None
    known = {field.encode_name for field in msgspec.structs.fields(request_type)}
    assert route.keys == known - {"user", "service_tier", "metadata", "store"}

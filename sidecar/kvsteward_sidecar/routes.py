"""What may reach the engine: one table a backend. Everything that is not in it is answered 404.

The request target is compared as it came on the wire, before any decoding, and the engine is asked for the path that
stands in the table: no spelling of a client's (`//v1`, `%2e`, `/v1/../kv`, an absolute URL) reaches the engine.
"""

from dataclasses import dataclass
from enum import Enum

from kvsteward_contract.policy import Backend


class Kind(str, Enum):
    """How a route is served."""

    GENERATE = "generate"  # a cache decision, a Directive, a receipt
    PLAIN = "plain"  # passed on without a Directive: nothing of it touches the cache
    HEALTH = "health"  # answered here, for load balancers: can a request be served right now?


@dataclass(frozen=True, slots=True)
class Route:
    kind: Kind
    method: str
    path: str
    keys: frozenset[str] = frozenset()  # of the JSON body that are passed on; every other one is dropped and counted


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# All that the engine knows, also what it refuses by name: a client is to hear that a feature isn't there. Left out is
# what says nothing to it: user (read here, for the cohort), service_tier, metadata, store.
_COMMON = _words(
    "model stream stream_options max_tokens temperature top_p top_k min_p seed stop stop_token_ids ignore_eos "
    "frequency_penalty presence_penalty repetition_penalty logit_bias logprobs prompt_logprobs n best_of "
    "response_format"
)
_CHAT = _COMMON | _words(
    "messages max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls functions function_call "
    "modalities audio prediction reasoning_effort verbosity web_search_options"
)
_COMPLETION = _COMMON | _words("prompt suffix echo add_special_tokens")
_TOKENIZE = _words("model prompt messages add_special_tokens add_generation_prompt")

_ROUTES: dict[Backend, tuple[Route, ...]] = {
    Backend.BUILTIN: (
        Route(Kind.GENERATE, "POST", "/v1/chat/completions", _CHAT),
        Route(Kind.GENERATE, "POST", "/v1/completions", _COMPLETION),
        Route(Kind.PLAIN, "POST", "/tokenize", _TOKENIZE),
        Route(Kind.PLAIN, "GET", "/v1/models"),
        Route(Kind.HEALTH, "GET", "/health"),
    ),
}
_TABLES = {backend: {(route.method, route.path): route for route in routes} for backend, routes in _ROUTES.items()}


def find(backend: Backend, method: str, target: str) -> Route | None:
    """The route of a request target as it stood in the request line; None: 404. A query is ignored."""
    return _TABLES[backend].get((method, target.partition("?")[0]))

"""What the routes share: the engine behind them, its tokenizer, and whether requests are taken."""

import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeVar

import msgspec
from aiohttp import web
from kvsteward_contract.directive import Directive, EnginePolicy, EngineState, Outcome

from kvsteward_engine.engine import Delta
from kvsteward_engine.metrics import Metrics
from kvsteward_engine.openai import ApiError
from kvsteward_engine.sequence import SamplingParams
from kvsteward_engine.tokenizer import Tokenizer
from kvsteward_engine.turns import Turns

KEPT_TOKENISATIONS = 4096  # as many as the engine keeps outcomes
Result = TypeVar("Result")
LOADING_RETRY_SECONDS = 2
DRAINING_RETRY_SECONDS = 5
TOKENISING_THREADS = 3  # two for any one owner
MAX_OFF_LOOP = 64
NOBODYS = ""  # the queue of requests that no tenant is known for
# Text up to this long is handled on the event loop: about 0.3 ms, less than two thread switches under load cost.
INLINE_CHARACTERS = 2_000


class Phase(Enum):
    """Whether requests are taken. It only ever moves down this list."""

    LOADING = "loading"  # weights are being read; left when the engine has answered its first request
    READY = "ready"  # left by POST /kv/v1/drain, SIGTERM, or a failure of the engine
    DRAINING = "draining"  # what runs finishes, nothing new starts; left when the process ends
    FAILED = "failed"  # the engine's thread is dead; the process is about to end


class Engine(Protocol):
    """What the routes need of the engine; `core.EngineThread` is it."""

    def generate(
        self,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams,
        directive: Directive | None,
        stop: Callable[[int], bool] | None = None,
    ) -> AsyncGenerator[Delta, None]: ...
    def set_policy(self, policy: EnginePolicy) -> EngineState: ...
    def state(self) -> EngineState: ...
    def stats(self) -> dict[str, Any]: ...
    def ledger(self, limit: int, cursor: str) -> dict[str, Any]: ...
    def outcome(self, request_id: str) -> Outcome | None: ...
    def in_flight(self, request_id: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """What becomes available once the weights are in memory."""

    engine: Engine
    tokenizer: Tokenizer
    vocab_size: int  # token ids below it are valid
    max_tokens: int  # context length served, prompt and output


class Tokenisations:
    """Seconds that tokenising took, by request id: the engine doesn't know, and outcomes are asked for later."""

    def __init__(self) -> None:
        self._seconds: OrderedDict[str, float] = OrderedDict()

    def note(self, request_id: str, seconds: float) -> None:
        self._seconds[request_id] = seconds
        if len(self._seconds) > KEPT_TOKENISATIONS:
            self._seconds.popitem(last=False)

    def fill_in(self, outcome: Outcome) -> Outcome:
        """The outcome with its tokenize_seconds."""
        seconds = self._seconds.get(outcome.request, 0.0)
        return msgspec.structs.replace(outcome, tokenize_seconds=round(seconds, 6))


class Service:
    """State of one server process; lives on the event loop's thread."""

    def __init__(self, model: str, token: bytes | None, metrics: Metrics) -> None:
        self.model = model
        self.token = token
        self.metrics = metrics
        self.phase = Phase.LOADING
        self.created = int(time.time())
        self.in_flight = 0  # generations being answered
        self.tokenisations = Tokenisations()
        self._loaded: Loaded | None = None
        # Few threads: long prompts may delay other long ones, never the event loop or all cores.
        self._tokenising = Turns(TOKENISING_THREADS, MAX_OFF_LOOP, "tokenise")

    def ready(self, loaded: Loaded) -> None:
        """The engine serves. A drain that came while it was loading stays in force."""
        self._loaded = loaded
        self.metrics.observe(loaded.engine.stats)
        if self.phase is Phase.LOADING:
            self.phase = Phase.READY

    def drain(self) -> None:
        """Take no more requests; what runs finishes."""
        if self.phase is not Phase.FAILED:
            self.phase = Phase.DRAINING

    def fail(self) -> None:
        """The engine is beyond repair."""
        self.phase = Phase.FAILED

    def loaded(self) -> Loaded:
        """For routes that work while draining too. Raises ApiError 503 while the engine is loading."""
        if self._loaded is None:
            raise _unavailable("the model is still loading", LOADING_RETRY_SECONDS)
        if self.phase is Phase.FAILED:
            raise _unavailable("the engine has failed and is about to restart", DRAINING_RETRY_SECONDS)
        return self._loaded

    def open(self) -> Loaded:
        """For routes that start work. Raises ApiError 503 unless ready."""
        if self.phase is Phase.DRAINING:
            raise _unavailable("this engine is shutting down", DRAINING_RETRY_SECONDS)
        return self.loaded()

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that isn't served; None stands for the one that is."""
        if name is not None and name != self.model:
            message = f"the model {name!r} does not exist; this engine serves {self.model!r}"
            raise ApiError(404, message, "not_found_error", param="model", code="model_not_found")

    async def off_loop(self, owner: str, size: int, work: Callable[[], Result]) -> Result:
        """`work()`, in a thread if `size` characters of text would hold up the event loop, when it is the turn of
        `owner` (a Directive's queue). Raises `QueueFull` when too many wait for that: their bodies, of megabytes
        perhaps, would wait in memory."""
        if size <= INLINE_CHARACTERS:
            return work()
        return await self._tokenising.run(owner, work)

    def close(self) -> None:
        """Ends the threads for tokenising; waiting work is dropped."""
        self._tokenising.close()


def _unavailable(message: str, retry_after: int) -> ApiError:
    return ApiError(503, message, "service_unavailable_error", retry_after=retry_after)


SERVICE: web.AppKey[Service] = web.AppKey("service", Service)

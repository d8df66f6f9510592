"""One request's state as scheduler, block manager and runner share it, and the unit of work between them.

Knows nothing of torch, of page keys, or of how a request came in.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from kvsteward_engine.errors import InvalidRequest

if TYPE_CHECKING:
    from kvsteward_contract.directive import Directive

NO_TOKEN = -1  # in place of a sampled token: the model produced no finite logits for this sequence
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1


class State(Enum):
    """Where a sequence is; only the scheduler moves it."""

    WAITING = "waiting"  # queued, or preempted and queued again; holds no pages. Left when scheduled or cancelled
    RUNNING = "running"  # holds pages; in every step's choice. Left when finished, cancelled or preempted
    FINISHED = "finished"  # holds no pages; never leaves


class Finish(str, Enum):
    """Why a sequence ended; the values are those of `Outcome.finish`."""

    STOP = "stop"  # an end-of-sequence or stop token, or the server met a stop string
    LENGTH = "length"  # max_tokens, or the model's last position
    CANCELLED = "cancelled"  # the client went away
    ERROR = "error"  # the engine failed underneath it


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose each next token. `temperature` 0 is greedy. Raises `InvalidRequest` on values out of range."""

    max_tokens: int = 16
    temperature: float = 0.0  # 0..2
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 = no limit
    min_p: float = 0.0  # [0, 1]: drop tokens less likely than min_p x the likeliest
    seed: int | None = None  # None: the engine draws one per request, so a recompute still gives the same tokens
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; 0: the chosen token's; n: also those of the n likeliest tokens
    frequency_penalty: float = 0.0  # -2..2, times the count of the token in the output so far
    presence_penalty: float = 0.0  # -2..2, once if the token is in the output so far

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, f"max_tokens is {self.max_tokens}; it must be at least 1")
        _require(0.0 <= self.temperature <= 2.0, f"temperature is {self.temperature}; it must be from 0 to 2")
        _require(0.0 < self.top_p <= 1.0, f"top_p is {self.top_p}; it must be above 0 and at most 1")
        _require(self.top_k >= 0, f"top_k is {self.top_k}; it must be 0 (no limit) or more")
        _require(0.0 <= self.min_p <= 1.0, f"min_p is {self.min_p}; it must be from 0 to 1")
        _require(self.seed is None or 0 <= self.seed <= MAX_SEED, f"seed must be from 0 to {MAX_SEED}")
        _require(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            f"logprobs is {self.logprobs}; it must be from 0 to {MAX_LOGPROBS}",
        )
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _require(-2.0 <= value <= 2.0, f"{name} is {value}; it must be from -2 to 2")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvalidRequest(message)


@dataclass(slots=True, eq=False)
class Sequence:
    """One request: its tokens (prompt, then output) and the pages that hold their keys and values.

    Position p lives in `pages[p // block_tokens]`. `computed` positions are in the pages already (computed or
    reused); a preemption sets it to 0 and gives the pages back, the tokens stay.
    """

    id: str
    tokens: list[int]
    prompt_len: int
    sampling: SamplingParams
    directive: Directive | None = None  # None: Cold
    arrival: float = 0.0  # seconds, the scheduler's clock
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    state: State = State.WAITING
    finish: Finish | None = None
    random_key: int = -1  # what its random numbers are made of: the seed, or drawn once

    def __post_init__(self) -> None:
        if self.random_key < 0:
            seed = self.sampling.seed
            self.random_key = secrets.randbits(63) if seed is None else seed

    @property
    def output_len(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def output(self) -> list[int]:
        """A copy of the tokens sampled so far."""
        return self.tokens[self.prompt_len :]

    @property
    def pending(self) -> int:
        """Positions known but not computed yet: the rest of the prompt, or 1 while decoding."""
        return len(self.tokens) - self.computed


@dataclass(frozen=True, slots=True)
class Work:
    """Compute positions [start, start + count) of `sequence.tokens`; `sample` the next token from the last one."""

    sequence: Sequence
    start: int
    count: int
    sample: bool


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward pass does; works of one step belong to different sequences."""

    works: tuple[Work, ...]


class Sampled(NamedTuple):
    """A token chosen for one work, with its log probability and the likeliest alternatives if they were asked for."""

    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None

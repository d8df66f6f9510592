"""Observation: what one sidecar has seen since it started, so that the operator can difference, notice restarts and
merge replicas."""

import math
from typing import Literal

import msgspec

from .policy import Stage

OBSERVATION_VERSION: Literal["kvsteward.dev/observation.v1"] = "kvsteward.dev/observation.v1"

RELATIVE_ERROR = 0.01
# DDSketch (Masson, Rim, Lee, VLDB 2019): bucket i holds (GAMMA**(i-1), GAMMA**i], so that answering its middle
# 2 * GAMMA**i / (GAMMA + 1) is never off by more than RELATIVE_ERROR.
GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_GAMMA = math.log(GAMMA)
SMALLEST = 1e-6  # seconds; anything below counts as this


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """A piece of an observation."""


class Histogram(_Part, frozen=True):
    """Counts by logarithmic bucket; JSON object keys are the bucket numbers. Merging and differencing are exact."""

    buckets: dict[int, int] = {}
    total: float = 0.0  # sum of the values, seconds

    @property
    def count(self) -> int:
        return sum(self.buckets.values())

    def merge(self, other: "Histogram") -> "Histogram":
        buckets = dict(self.buckets)
        for number, count in other.buckets.items():
            buckets[number] = buckets.get(number, 0) + count
        return Histogram(buckets, self.total + other.total)

    def difference(self, earlier: "Histogram") -> "Histogram":
        """What was added since `earlier`. Raises ValueError when a count has fallen: the sidecar restarted."""
        buckets = {}
        for number in self.buckets.keys() | earlier.buckets.keys():
            count = self.buckets.get(number, 0) - earlier.buckets.get(number, 0)
            if count < 0:
                raise ValueError("a histogram's count fell: it is of another start")
            if count:
                buckets[number] = count
        return Histogram(buckets, max(0.0, self.total - earlier.total))

    def quantile(self, share: float) -> float | None:
        """The value that `share` (0 .. 1) of all are at or below, within RELATIVE_ERROR; None without values."""
        rank = share * (self.count - 1)
        seen = 0
        for number in sorted(self.buckets):
            seen += self.buckets[number]
            if seen > rank:
                return 2 * GAMMA**number / (GAMMA + 1)
        return None


def bucket_of(seconds: float) -> int:
    """The number of the bucket that a value belongs to."""
    return math.ceil(math.log(max(seconds, SMALLEST)) / _LOG_GAMMA)


class Recorder:
    """A histogram being filled; `snapshot()` is what an observation carries."""

    __slots__ = ("_buckets", "_total")

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self._total = 0.0

    def add(self, seconds: float) -> None:
        number = bucket_of(seconds)
        self._buckets[number] = self._buckets.get(number, 0) + 1
        self._total += seconds

    def snapshot(self) -> Histogram:
        return Histogram(dict(self._buckets), self._total)


class Latch(_Part, frozen=True):
    """Why a pod is held on the cold path, and under which attempt it was latched."""

    reason: str
    attempt: int
    since: float  # Unix time


class Observation(_Part, frozen=True):
    api_version: Literal["kvsteward.dev/observation.v1"]
    start_time: float  # Unix time of the sidecar's start: another one means that all counters began again
    time: float
    generation: str  # "" while no document was seen
    policy_version: str  # of the document in force here, "" while none
    acknowledged_version: str  # of the last one that the engine has confirmed, "" while none
    stage: Stage  # in force here
    canary_percent: int
    attempt: int
    cold_requested: bool  # the switch is engaged, or this pod is latched
    cold_confirmed: bool  # and the engine has confirmed the epoch that forbids new matches
    epoch: int
    engine_epoch: int  # the engine's last confirmed one; 0 while it hasn't answered
    engine_instance: str
    last_match_seconds: float  # Unix time of the engine's last new match, 0 = none
    in_flight: int
    resident_pages: int
    bytes_per_token: int
    pool_tokens: int
    policy_age_seconds: float
    resource_generation: int = 0  # metadata.generation of the resource that switch and stage were read from, 0 = none
    latch: Latch | None = None
    problems: tuple[str, ...] = ()  # sentences for a human: unreadable document, missing tenant keys
    counters: dict[str, int] = {}  # see metrics.py, OBSERVED_COUNTERS
    histograms: dict[str, Histogram] = {}  # "time_to_first_token/<path>": seconds


_decoder = msgspec.json.Decoder(Observation)
_encoder = msgspec.json.Encoder()


def encode_observation(observation: Observation) -> bytes:
    return _encoder.encode(observation)


def decode_observation(data: bytes) -> Observation:
    """Raises msgspec.ValidationError or msgspec.DecodeError, whose text names the field."""
    return _decoder.decode(data)

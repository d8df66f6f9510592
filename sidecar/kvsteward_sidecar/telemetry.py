"""What happened, in numbers: Prometheus metrics and the histograms and counters of the Observation, from one store.

Requests only add to plain dictionaries; exposition formats are made when somebody asks. Labels are bounded: decisions,
stages, scope kinds, miss reasons and bands are closed sets, workloads are those of the policy or "other".
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvsteward_contract.directive import Outcome
from kvsteward_contract.metrics import BY_NAME, SECONDS_BUCKETS, band
from kvsteward_contract.observation import Histogram, Recorder
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_BOUNDS = (*(str(bound) for bound in SECONDS_BUCKETS), "+Inf")
_PHASES = {
    "kvsteward_queue_seconds": "queue_seconds",
    "kvsteward_prefill_seconds": "prefill_seconds",
    "kvsteward_decode_seconds": "decode_seconds",
    "kvsteward_tokenize_seconds": "tokenize_seconds",
}


class Buckets:
    """A Prometheus histogram of seconds."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS_BUCKETS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS_BUCKETS, seconds)] += 1
        self.total += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        seen, pairs = 0, []
        for bound, count in zip(_BOUNDS, self.counts, strict=True):
            seen += count
            pairs.append((bound, float(seen)))
        return pairs


@dataclass(frozen=True, slots=True)
class Now:
    """What is read at the moment of a scrape."""

    in_flight: int
    policy_age_seconds: float
    policy_version: str
    stage: str
    resident_pages: Mapping[tuple[str, str], int]  # (scope kind, tier)


class Telemetry:
    """Counts since the sidecar's start. The engine's counters are added up over its restarts."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str, str], int] = defaultdict(int)
        self.tokens: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        self.misses: dict[str, int] = defaultdict(int)
        self.dropped: dict[str, int] = defaultdict(int)
        self.scope_violations = 0
        self._first_token: dict[tuple[str, str, str, str, str], Buckets] = defaultdict(Buckets)
        self._phases = {name: Buckets() for name in _PHASES}
        self._by_path: dict[str, Recorder] = defaultdict(Recorder)
        self._engine = Accumulated()

    def request(self, decision: str, workload: str, stage: str) -> None:
        self.requests[decision, workload, stage] += 1

    def outcome(self, outcome: Outcome, scope_kind: str, generation: str) -> None:
        tokens = self.tokens[scope_kind, generation]
        tokens[0] += outcome.prompt_tokens
        tokens[1] += outcome.eligible_tokens
        tokens[2] += outcome.resident_tokens
        tokens[3] += outcome.reused_tokens
        for reason, pages in outcome.misses.items():
            self.misses[reason] += pages
        for name, field in _PHASES.items():
            self._phases[name].add(getattr(outcome, field))
        self.scope_violations += outcome.scope_violation

    def first_token(
        self, seconds: float, path: str, workload: str, prompt_tokens: int, scope_kind: str, generation: str
    ) -> None:
        self._first_token[path, workload, band(prompt_tokens), scope_kind, generation].add(seconds)
        self._by_path[path].add(seconds)

    def engine_counters(self, instance: str, stats: Mapping[str, Any]) -> None:
        """Takes the engine's counters as of now; `instance` tells a restarted engine from one that went backwards."""
        counters = {f"evictions/{reason}": count for reason, count in (stats.get("evictions") or {}).items()}
        counters["oomRecoveries"] = stats.get("oomRecoveries", 0)
        counters["regretTokens"] = stats.get("regretTokens", 0)
        self._engine.take(instance, counters)

    def evictions(self) -> dict[str, int]:
        return {name.partition("/")[2]: count for name, count in self._engine.totals.items() if "/" in name}

    def observed_counters(self) -> dict[str, int]:
        """The counters of an Observation, see kvsteward_contract.metrics.OBSERVED_COUNTERS."""
        tokens = [sum(column) for column in zip(*self.tokens.values(), strict=True)] or [0, 0, 0, 0]
        return {
            "requests": sum(self.requests.values()),
            "promptTokens": tokens[0],
            "eligibleTokens": tokens[1],
            "residentTokens": tokens[2],
            "reusedTokens": tokens[3],
            "evictions": sum(self.evictions().values()),
            "oomRecoveries": self._engine.totals.get("oomRecoveries", 0),
            "scopeViolations": self.scope_violations,
        }

    def observed_histograms(self) -> dict[str, Histogram]:
        return {f"time_to_first_token/{path}": recorder.snapshot() for path, recorder in self._by_path.items()}

    def families(self, now: Now) -> Iterator[Metric]:
        """Every metric of the contract's table, in the state of this moment."""
        yield _counter("kvsteward_requests", self.requests.items())
        names = ("prompt", "eligible", "resident", "reused")
        for column, name in enumerate(names):
            yield _counter(f"kvsteward_{name}_tokens", [(labels, row[column]) for labels, row in self.tokens.items()])
        yield _counter("kvsteward_misses", _alone(self.misses))
        yield _histogram("kvsteward_time_to_first_token_seconds", self._first_token.items())
        for name, buckets in self._phases.items():
            yield _histogram(name, [((), buckets)])
        yield _gauge("kvsteward_resident_pages", now.resident_pages.items())
        yield _counter("kvsteward_evictions", _alone(self.evictions()))
        yield _counter("kvsteward_eviction_regret_tokens", [((), self._engine.totals.get("regretTokens", 0))])
        yield _counter("kvsteward_oom_recoveries", [((), self._engine.totals.get("oomRecoveries", 0))])
        yield _counter("kvsteward_scope_violations", [((), self.scope_violations)])
        yield _counter("kvsteward_dropped_fields", _alone(self.dropped))
        yield _gauge("kvsteward_policy_age_seconds", [((), now.policy_age_seconds)])
        yield _gauge("kvsteward_policy_info", [((now.policy_version, now.stage), 1)])
        yield _gauge("kvsteward_in_flight", [((), now.in_flight)])


class Accumulated:
    """Another process's counters, added up over its restarts."""

    def __init__(self) -> None:
        self.totals: dict[str, int] = {}
        self._instance = ""
        self._last: Mapping[str, int] = {}

    def take(self, instance: str, counters: Mapping[str, int]) -> None:
        last = self._last if instance == self._instance else {}
        for name, value in counters.items():
            self.totals[name] = self.totals.get(name, 0) + max(0, value - last.get(name, 0))
        self._instance, self._last = instance, dict(counters)


class Exposition(Collector):
    """The registry's one collector: whatever `families` gives at the time of a scrape."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.registry = CollectorRegistry()
        self._telemetry = telemetry
        self._now: Now | None = None
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def collect(self) -> Iterator[Metric]:
        if self._now is not None:
            yield from self._telemetry.families(self._now)

    def render(self, now: Now) -> bytes:
        """The text format, UTF-8."""
        self._now = now
        return generate_latest(self.registry)


def _alone(values: Mapping[str, int]) -> list[tuple[tuple[str], int]]:
    """Values under a single label."""
    return [((label,), value) for label, value in values.items()]


def _counter(name: str, values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    family = CounterMetricFamily(name, BY_NAME[name].help, labels=BY_NAME[name].labels)
    for labels, value in values:
        family.add_metric(labels, value)
    return family


def _gauge(name: str, values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    family = GaugeMetricFamily(name, BY_NAME[name].help, labels=BY_NAME[name].labels)
    for labels, value in values:
        family.add_metric(labels, value)
    return family


def _histogram(name: str, values: Iterable[tuple[tuple[str, ...], Buckets]]) -> Metric:
    family = HistogramMetricFamily(name, BY_NAME[name].help, labels=BY_NAME[name].labels)
    for labels, buckets in values:
        family.add_metric(labels, buckets.cumulative(), buckets.total)
    return family

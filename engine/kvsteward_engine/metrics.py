"""The engine's own Prometheus metrics, for whoever debugs one pod; the fleet's are the sidecar's.

Counted where a request ends; pool and queue figures are read from the engine when somebody scrapes.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvsteward_contract.directive import Outcome
from kvsteward_contract.metrics import SECONDS_BUCKETS
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

disable_created_metrics()  # a second series for each, that nobody asked for
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_GAUGES = {
    "running": ("kvsteward_engine_running", "Sequences that hold pages."),
    "waiting": ("kvsteward_engine_waiting", "Sequences that wait for their turn."),
    "freePages": ("kvsteward_engine_free_pages", "Pages that hold nothing."),
    "retainedPages": ("kvsteward_engine_retained_pages", "Pages that hold reusable state and no request uses."),
    "totalPages": ("kvsteward_engine_pages", "Pages of the pool."),
    "ghosts": ("kvsteward_engine_ghosts", "Keys remembered after their page was evicted."),
    "epoch": ("kvsteward_engine_epoch", "Epoch of permissions in force."),
}
_COUNTERS = {
    "oomRecoveries": ("kvsteward_engine_oom_recoveries", "Device allocation failures that were recovered from."),
    "regretTokens": ("kvsteward_engine_regret_tokens", "Tokens recomputed soon after their page was evicted."),
    "scopeViolations": ("kvsteward_engine_scope_violations", "Matches whose stored scope differed."),
    "preemptions": ("kvsteward_engine_preemptions", "Running sequences sent back to the queue."),
}
_LABELLED_GAUGES = {
    "residentPages": ("kvsteward_engine_resident_pages", "scope_kind", "Pages that hold reusable state."),
}
_LABELLED_COUNTERS = {"evictions": ("kvsteward_engine_evictions", "reason", "Pages evicted.")}


class Metrics:
    """A registry of its own, so that two servers in one process don't mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests answered, by route and status.", "route", "status")
        self._finished = self._counter("finished", "Generations ended, by reason.", "finish")
        self._tokens = self._counter("tokens", "Tokens of ended generations: prompt, reused, output.", "kind")
        self._bad_directives = self._counter("bad_directives", "Directives that could not be read; those ran Cold.")
        self._seconds = Histogram(
            "kvsteward_engine_phase_seconds",
            "Seconds a generation spent in each phase.",
            ("phase",),
            buckets=SECONDS_BUCKETS,
            registry=self.registry,
        )
        # A labelled child costs a lock and a lookup; these are used once a request.
        self._phases = {name: self._seconds.labels(name) for name in ("tokenize", "queue", "prefill", "decode")}

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"kvsteward_engine_{name}", help, labels, registry=self.registry)

    def answered(self, route: str, status: int) -> None:
        """One request has its status; `route` is the route's pattern, never a client's path."""
        self._requests.labels(route, str(status)).inc()

    def bad_directive(self) -> None:
        self._bad_directives.inc()

    def finished(self, outcome: Outcome) -> None:
        """One generation has come to its end."""
        self._finished.labels(outcome.finish).inc()
        self._tokens.labels("prompt").inc(outcome.prompt_tokens)
        self._tokens.labels("reused").inc(outcome.reused_tokens)
        self._tokens.labels("output").inc(outcome.output_tokens)
        self._phases["tokenize"].observe(outcome.tokenize_seconds)
        self._phases["queue"].observe(outcome.queue_seconds)
        self._phases["prefill"].observe(outcome.prefill_seconds)
        self._phases["decode"].observe(outcome.decode_seconds)

    def cut(self) -> None:
        """One generation had no proper end: its client left, or the engine failed."""
        self._finished.labels("cut").inc()

    def observe(self, stats: Callable[[], Mapping[str, Any]]) -> None:
        """Read the engine's stats at every scrape from now on."""
        self.registry.register(_EngineStats(stats))

    def render(self) -> bytes:
        """The text format."""
        return generate_latest(self.registry)


class _EngineStats(Collector):
    def __init__(self, stats: Callable[[], Mapping[str, Any]]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        for key, (name, text) in _GAUGES.items():
            yield GaugeMetricFamily(name, text, value=stats[key])
        for key, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(name, text, value=stats[key])
        for key, (name, label, text) in _LABELLED_GAUGES.items():
            yield _labelled(GaugeMetricFamily(name, text, labels=[label]), stats[key])
        for key, (name, label, text) in _LABELLED_COUNTERS.items():
            yield _labelled(CounterMetricFamily(name, text, labels=[label]), stats[key])


def _labelled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    for label, value in values.items():
        family.add_metric([label], value)
    return family

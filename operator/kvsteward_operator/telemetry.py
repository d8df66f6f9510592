"""The operator's own metrics, and how long ago a worker last finished a turn."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

# A turn comes round at least this often (the heartbeat); without one for LIVE_SECONDS the operator is stuck.
HEARTBEAT_SECONDS = 10.0
LIVE_SECONDS = 120.0


class Telemetry:
    """One process's metrics in a registry of their own. `clock` is any steady one, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._finished = clock()
        self.registry = CollectorRegistry()
        self._turns = Counter(
            "kvsteward_operator_turns", "Worker turns, by how they ended.", ("result",), registry=self.registry
        )
        self._seconds = Histogram("kvsteward_operator_turn_seconds", "Time of a worker turn.", registry=self.registry)
        self._applies = Counter(
            "kvsteward_operator_applies", "Objects created or changed, by kind.", ("kind",), registry=self.registry
        )
        self._wrong = Counter(
            "kvsteward_operator_resync_disagreements",
            "Objects that a list showed to be other than the watches had said.",
            ("kind",),
            registry=self.registry,
        )
        self._scrapes = Counter(
            "kvsteward_operator_scrapes", "Scrapes of sidecars, by result.", ("result",), registry=self.registry
        )
        self.policies = Gauge("kvsteward_operator_policies", "Policies watched.", registry=self.registry)
        self.queued = Gauge("kvsteward_operator_queue_length", "Policies waiting for a turn.", registry=self.registry)
        age = Gauge(
            "kvsteward_operator_last_turn_age_seconds", "Time since a worker last finished a turn.",
            registry=self.registry,
        )  # fmt: skip
        age.set_function(self.age)

    def age(self) -> float:
        """Seconds since a worker last finished a turn."""
        return self._clock() - self._finished

    def alive(self) -> bool:
        return self.age() < LIVE_SECONDS

    def finished(self, result: str, seconds: float) -> None:
        self._finished = self._clock()
        self._turns.labels(result).inc()
        self._seconds.observe(seconds)

    def beat(self) -> None:
        """A worker had nothing to do and could have done it."""
        self._finished = self._clock()

    def applied(self, kind: str) -> None:
        self._applies.labels(kind).inc()

    def disagreed(self, kind: str, count: int) -> None:
        self._wrong.labels(kind).inc(count)

    def scraped(self, result: str) -> None:
        self._scrapes.labels(result).inc()

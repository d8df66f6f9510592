"""What the pods measured in one window: differences of their observations, merged."""

from collections.abc import Mapping

from kvsteward_contract.observation import Histogram, Observation
from kvsteward_contract.status import Evidence

from .times import to_text

PROTECTED = "time_to_first_token/protected"


def measured(before: Mapping[str, Observation], after: Mapping[str, Observation], now: float) -> Evidence | None:
    """Evidence of the window from `before` to `after`, by pod; None when nothing was asked of the pods in it.

    A sidecar that has restarted since counts from its start; a pod without a `before` counts from its own.
    """
    protected, eligible, reused, requests = Histogram(), 0, 0, 0
    for pod, observation in after.items():
        earlier = before.get(pod)
        if earlier is not None and earlier.start_time != observation.start_time:
            earlier = None
        requests += _counted(observation, earlier, "requests")
        eligible += _counted(observation, earlier, "eligibleTokens")
        reused += _counted(observation, earlier, "reusedTokens")
        times = observation.histograms.get(PROTECTED, Histogram())
        if earlier is not None:
            try:
                times = times.difference(earlier.histograms.get(PROTECTED, Histogram()))
            except ValueError:  # counters that fell without a new start time: not evidence of anything
                times = Histogram()
        protected = protected.merge(times)
    if requests == 0:
        return None
    p95 = protected.quantile(0.95)
    return Evidence(
        samples=protected.count,
        cold_ttft_p95_milliseconds=None if p95 is None else round(p95 * 1000),
        eligible_tokens=eligible,
        reused_tokens=reused,
        reused_percent=100 * reused // eligible if eligible else None,
        window_end=to_text(now),
    )


def _counted(observation: Observation, earlier: Observation | None, counter: str) -> int:
    before = earlier.counters.get(counter, 0) if earlier is not None else 0
    return max(0, observation.counters.get(counter, 0) - before)

"""The sidecar's metrics as data: exporters, dashboards, alerts and docs are made from this table, or checked by it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Metric:
    name: str  # without the suffixes that Prometheus adds
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str


_SCOPE = ("scope_kind", "generation")
SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

METRICS: tuple[Metric, ...] = (
    Metric("kvsteward_requests", "counter", ("decision", "workload", "stage"), "Requests by decision reason."),
    Metric("kvsteward_prompt_tokens", "counter", _SCOPE, "Prompt tokens."),
    Metric("kvsteward_eligible_tokens", "counter", _SCOPE, "Prompt tokens that the policy allowed to be reused."),
    Metric("kvsteward_resident_tokens", "counter", _SCOPE, "Eligible tokens that were still resident."),
    Metric("kvsteward_reused_tokens", "counter", _SCOPE, "Prompt tokens that were reused."),
    Metric("kvsteward_misses", "counter", ("reason",), "Pages of prompts that were not reused, by reason."),
    Metric(
        "kvsteward_time_to_first_token_seconds",
        "histogram",
        ("path", "workload", "band", "scope_kind", "generation"),
        "Time to the first streamed token, by path: cold, reuse, shadow or protected.",
    ),
    Metric("kvsteward_queue_seconds", "histogram", (), "Time a request waited for its turn in the engine."),
    Metric("kvsteward_prefill_seconds", "histogram", (), "Time from a request's turn to its first token."),
    Metric("kvsteward_decode_seconds", "histogram", (), "Time from a request's first token to its last."),
    Metric("kvsteward_tokenize_seconds", "histogram", (), "Time to turn a request's text into tokens."),
    Metric("kvsteward_resident_pages", "gauge", ("scope_kind", "tier"), "Pages that hold reusable state."),
    Metric("kvsteward_evictions", "counter", ("reason",), "Pages evicted, by reason."),
    Metric("kvsteward_eviction_regret_tokens", "counter", (), "Tokens recomputed soon after their page was evicted."),
    Metric("kvsteward_oom_recoveries", "counter", (), "Device allocation failures that the engine recovered from."),
    Metric("kvsteward_scope_violations", "counter", (), "Matches whose stored scope differed; each latches the pod."),
    Metric("kvsteward_dropped_fields", "counter", ("field",), "Fields and headers of clients that were not forwarded."),
    Metric("kvsteward_policy_age_seconds", "gauge", (), "Time since the API server last confirmed the policy."),
    Metric("kvsteward_policy_info", "gauge", ("version", "stage"), "1 for the policy and stage in force."),
    Metric("kvsteward_in_flight", "gauge", (), "Requests being served."),
)
BY_NAME = {metric.name: metric for metric in METRICS}

# Counters that an Observation carries, with the metric each is the sum of.
OBSERVED_COUNTERS = {
    "requests": "kvsteward_requests",
    "promptTokens": "kvsteward_prompt_tokens",
    "eligibleTokens": "kvsteward_eligible_tokens",
    "residentTokens": "kvsteward_resident_tokens",
    "reusedTokens": "kvsteward_reused_tokens",
    "evictions": "kvsteward_evictions",
    "oomRecoveries": "kvsteward_oom_recoveries",
    "scopeViolations": "kvsteward_scope_violations",
}

# Prompt-length bands (tokens, upper bound exclusive), the label `band`.
BANDS: tuple[tuple[int, str], ...] = ((256, "0-255"), (1024, "256-1023"), (4096, "1024-4095"), (16384, "4096-16383"))


def band(prompt_tokens: int) -> str:
    for bound, name in BANDS:
        if prompt_tokens < bound:
            return name
    return "16384+"

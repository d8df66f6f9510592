"""One store, two ways out: Prometheus text and the observation."""

from __future__ import annotations

import pytest
from kvsteward_contract.directive import Mode, Outcome
from kvsteward_contract.metrics import METRICS, OBSERVED_COUNTERS
from kvsteward_sidecar.telemetry import Exposition, Now, Telemetry
from prometheus_client.parser import text_string_to_metric_families

NOW = Now(2, 3.5, "sha256:1", "Full", {("Private", "device"): 7})


def outcome(**fields: object) -> Outcome:
    return Outcome(request="0" * 32, mode=Mode.REUSE, epoch=1, **fields)


def samples(telemetry: Telemetry, now: Now = NOW) -> dict[tuple[str, ...], float]:
    """(sample name, label values in order of the label names) -> value."""
    found = {}
    for family in text_string_to_metric_families(Exposition(telemetry).render(now).decode()):
        for sample in family.samples:
            found[sample.name, *(value for _, value in sorted(sample.labels.items()))] = sample.value
    return found


def test_every_metric_of_the_table_is_exposed_and_no_other_of_ours() -> None:
    families = {family.name: family for family in Telemetry().families(NOW)}
    assert list(families) == [metric.name for metric in METRICS]
    assert all(families[metric.name].type == metric.kind for metric in METRICS)


def test_requests_and_tokens_are_counted_under_their_labels() -> None:
    telemetry = Telemetry()
    telemetry.request("Reuse", "checkout", "Full")
    telemetry.request("Reuse", "checkout", "Full")
    telemetry.outcome(
        outcome(prompt_tokens=100, eligible_tokens=90, resident_tokens=80, reused_tokens=64, misses={"Evicted": 2}),
        "Private",
        "g1",
    )
    found = samples(telemetry)
    assert found["kvsteward_requests_total", "Reuse", "Full", "checkout"] == 2
    assert found["kvsteward_prompt_tokens_total", "g1", "Private"] == 100
    assert found["kvsteward_eligible_tokens_total", "g1", "Private"] == 90
    assert found["kvsteward_resident_tokens_total", "g1", "Private"] == 80
    assert found["kvsteward_reused_tokens_total", "g1", "Private"] == 64
    assert found["kvsteward_misses_total", "Evicted"] == 2


def test_gauges_are_those_of_the_scrape() -> None:
    found = samples(Telemetry())
    assert found["kvsteward_in_flight",] == 2
    assert found["kvsteward_policy_age_seconds",] == 3.5
    assert found["kvsteward_policy_info", "Full", "sha256:1"] == 1
    assert found["kvsteward_resident_pages", "Private", "device"] == 7


def test_time_to_first_token_falls_into_cumulative_buckets() -> None:
    telemetry = Telemetry()
    for seconds in (0.004, 0.005, 0.3, 99.0):
        telemetry.first_token(seconds, "reuse", "other", 300, "Private", "g1")
    found = samples(telemetry)

    def at(bound: str) -> float:
        key = ("kvsteward_time_to_first_token_seconds_bucket", "256-1023", "g1", bound, "reuse", "Private", "other")
        return found[key]

    assert [at(bound) for bound in ("0.0025", "0.005", "0.25", "0.5", "60.0", "+Inf")] == [0, 2, 2, 3, 3, 4]


def test_the_observation_has_the_same_counts() -> None:
    telemetry = Telemetry()
    telemetry.request("Reuse", "other", "Full")
    telemetry.request("ColdStage", "other", "Cold")
    telemetry.outcome(outcome(prompt_tokens=10, reused_tokens=4, scope_violation=True), "Private", "g1")
    telemetry.outcome(outcome(prompt_tokens=5), "None", "g1")
    counters = telemetry.observed_counters()
    assert counters.keys() == OBSERVED_COUNTERS.keys()
    assert (counters["requests"], counters["promptTokens"], counters["reusedTokens"]) == (2, 15, 4)
    assert counters["scopeViolations"] == 1


def test_an_observation_before_any_request_is_all_zeros() -> None:
    assert set(Telemetry().observed_counters().values()) == {0}
    assert Telemetry().observed_histograms() == {}


def test_the_observed_histogram_is_right_within_a_percent() -> None:
    telemetry = Telemetry()
    for _ in range(100):
        telemetry.first_token(0.2, "protected", "other", 10, "Private", "g1")
    histogram = telemetry.observed_histograms()["time_to_first_token/protected"]
    assert histogram.count == 100
    assert histogram.quantile(0.95) == pytest.approx(0.2, rel=0.01)


def test_the_engines_counters_add_up_over_its_restarts() -> None:
    telemetry = Telemetry()
    telemetry.engine_counters("one", {"evictions": {"Capacity": 5}, "oomRecoveries": 1})
    telemetry.engine_counters("one", {"evictions": {"Capacity": 8}, "oomRecoveries": 1})
    telemetry.engine_counters("two", {"evictions": {"Capacity": 9, "Expired": 1}, "oomRecoveries": 0})
    found = samples(telemetry)
    assert found["kvsteward_evictions_total", "Capacity"] == 17
    assert found["kvsteward_evictions_total", "Expired"] == 1
    assert found["kvsteward_oom_recoveries_total",] == 1
    assert telemetry.observed_counters()["evictions"] == 18


def test_the_phases_of_a_request_are_timed() -> None:
    telemetry = Telemetry()
    telemetry.outcome(outcome(queue_seconds=0.2, prefill_seconds=3.0), "Private", "g1")
    found = samples(telemetry)
    assert found["kvsteward_queue_seconds_sum",] == pytest.approx(0.2)
    assert found["kvsteward_prefill_seconds_sum",] == pytest.approx(3.0)
    assert found["kvsteward_decode_seconds_count",] == 1

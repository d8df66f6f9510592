"""Conditions and events that tell of trouble, and evidence of what the pods measured."""

from typing import Any

import pytest
from kvsteward_contract.observation import Latch, Recorder
from kvsteward_contract.status import HISTORY_ENTRIES, HistoryEntry
from kvsteward_operator.history import Cause, is_paused, trimmed
from kvsteward_operator.times import to_seconds, to_text
from support.operating import Operating


async def serving(**spec: Any) -> tuple[Operating, list[str]]:
    """A policy that serves, and the names of its pods."""
    operating = Operating()
    operating.create(**spec)
    await operating.run()
    return operating, [pod["metadata"]["name"] for pod in operating.api.of_kind("Pod")]


async def observe(operating: Operating, pods: list[str], **fields: Any) -> None:
    for name in pods:
        operating.sidecars.changes.setdefault(name, {}).update(fields)
    operating.sidecars.scrape()
    await operating.turn()


@pytest.mark.parametrize(
    ("fields", "reason", "event"),
    [
        pytest.param({"latch": Latch("ScopeViolation", 1, 0.0)}, "ScopeViolation", "ScopeViolation", id="violation"),
        pytest.param({"latch": Latch("Requested", 1, 0.0)}, "PodLatched", None, id="latched by hand"),
        pytest.param({"pool_tokens": 100}, "CapacityWarning", "CapacityWarning", id="a pool below one request"),
        pytest.param({"problems": ("no tenant has an API key",)}, "IdentityUnavailable", None, id="no keys"),
        pytest.param({"problems": ("document unreadable",)}, "SidecarProblem", None, id="any other problem"),
    ],
)
async def test_what_a_pod_reports_degrades_the_policy(fields: dict[str, Any], reason: str, event: str | None) -> None:
    operating, pods = await serving()
    told = len(operating.events)
    await observe(operating, pods[:1], **fields)
    assert operating.condition("Degraded") == ("True", reason)
    assert operating.events[told:] == ([event] if event else [])
    operating.sidecars.changes.clear()
    operating.sidecars.scrape()
    await operating.turn()
    assert operating.condition("Degraded") == ("False", "AsExpected")


async def test_a_sidecar_that_does_not_answer_three_times_is_told_of() -> None:
    operating, pods = await serving()
    operating.sidecars.silent.add(pods[0])
    for expected in ("False", "False", "True"):
        operating.sidecars.scrape()
        await operating.turn()
        assert operating.condition("Degraded")[0] == expected
    assert operating.events[-1] == "SidecarUnreachable"
    # What it had confirmed before still counts: a lost scrape is no lost confirmation.
    assert operating.condition("Ready") == ("True", "Ready")


async def test_a_pod_without_a_node_for_want_of_an_accelerator_is_named() -> None:
    operating, _ = await serving()
    pod = operating.api.of_kind("Pod")[0]
    message = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    operating.api.put({**pod, "status": {"phase": "Pending", "conditions": [unscheduled]}})
    await operating.turn()
    assert operating.condition("Progressing") == ("False", "InsufficientAccelerator")
    assert operating.condition("Ready") == ("False", "InsufficientAccelerator")
    assert operating.condition("Available") == ("True", "PodsReady")


async def test_a_deployment_that_gave_up_is_named() -> None:
    operating, _ = await serving()
    deployment = operating.deployment
    gave_up = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    operating.api.put({**deployment, "status": {"conditions": [gave_up]}})
    await operating.turn()
    assert operating.condition("Progressing") == ("False", "ProgressDeadlineExceeded")


async def test_a_flip_moves_the_time_of_a_condition_and_nothing_else_does() -> None:
    operating, pods = await serving()
    times = {one.type: one.last_transition_time for one in operating.status.conditions}
    operating.now += 100
    await observe(operating, pods, problems=("no tenant has an API key",))
    after = {one.type: one.last_transition_time for one in operating.status.conditions}
    assert {kind for kind in times if times[kind] != after[kind]} == {"Degraded"}
    operating.now += 100
    await observe(operating, pods, problems=("no tenant at all",))
    assert {one.type: one.last_transition_time for one in operating.status.conditions} == after


async def test_a_confirmation_of_an_earlier_engagement_of_the_switch_does_not_count() -> None:
    operating, pods = await serving(rollout={"stage": "Full"})
    seen = operating.policy["metadata"]["generation"] + 1
    operating.edit(rollout={"killSwitch": "Engaged"})
    await observe(operating, pods, resource_generation=seen)
    assert operating.condition("ColdPath") == ("True", "Engaged")
    operating.edit(rollout={"killSwitch": "Released"})
    await operating.turn()
    operating.sidecars.deaf.update(pods)  # they go on saying what they said of the first one
    operating.edit(rollout={"killSwitch": "Engaged"})
    await operating.run()
    assert operating.condition("ColdPath") == ("Unknown", "Confirming")
    operating.sidecars.deaf.clear()
    await observe(operating, pods, resource_generation=operating.policy["metadata"]["generation"])
    assert operating.condition("ColdPath") == ("True", "Engaged")


async def test_a_pod_whose_engine_does_not_run_cannot_hold_the_switch_up() -> None:
    operating, pods = await serving(rollout={"stage": "Full"})
    operating.sidecars.silent.add(pods[0])
    pod = operating.api.find("Pod", pods[0])
    assert pod is not None
    waiting = [{"name": "engine", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}]
    stopped = {**pod, "status": {**pod["status"], "containerStatuses": waiting}}
    operating.workloads.step = lambda: None  # type: ignore[method-assign]
    operating.api.put(stopped)
    operating.edit(rollout={"killSwitch": "Engaged"})
    await operating.turn()
    operating.sidecars.scrape()
    await operating.turn()
    assert operating.condition("ColdPath") == ("True", "Engaged")


async def test_a_window_of_evidence_is_what_was_counted_in_it() -> None:
    operating, pods = await serving(rollout={"stage": "Full"})
    times = Recorder()
    times.add(9.0)
    path = "time_to_first_token/protected"
    before = {"requests": 100, "eligibleTokens": 1000, "reusedTokens": 0}
    await observe(operating, pods, counters=before, histograms={path: times.snapshot()})
    operating.now += 60
    await operating.turn()
    await operating.turn()
    for _ in range(20):
        times.add(0.2)
    after = {"requests": 150, "eligibleTokens": 1400, "reusedTokens": 300}
    await observe(operating, pods[:1], counters=after, histograms={path: times.snapshot()})
    operating.now += 60
    await operating.turn()
    evidence = operating.status.evidence
    assert (evidence.samples, evidence.eligible_tokens, evidence.reused_tokens) == (20, 400, 300)
    assert evidence.reused_percent == 75
    assert evidence.cold_ttft_p95_milliseconds == pytest.approx(200, rel=0.011)
    assert evidence.window_end == to_text(operating.now)
    writes = len(operating.api.writes)
    for _ in range(6):
        operating.now += 20
        await operating.turn()
    assert [call for call in operating.api.writes[writes:] if call[0] == "status"] == []
    assert operating.status.evidence == evidence


async def test_a_sidecar_that_restarted_counts_from_its_start() -> None:
    operating, pods = await serving()
    await observe(operating, pods, counters={"requests": 100, "eligibleTokens": 1000})
    operating.now += 60
    await operating.turn()
    await operating.turn()
    restarted = operating.now + 1
    await observe(operating, pods[:1], start_time=restarted, counters={"requests": 4, "eligibleTokens": 40})
    operating.now += 60
    await operating.turn()
    assert operating.status.evidence.eligible_tokens == 40


def test_the_history_keeps_the_newest_and_the_pause_that_still_holds() -> None:
    entries = [HistoryEntry(n, to_text(n), "Shadow", Cause.STAGE_RAISED.value) for n in range(1, 30)]
    entries[3] = HistoryEntry(4, to_text(4), "Shadow", Cause.PAUSED.value)
    kept = trimmed(entries)
    assert len(kept) == HISTORY_ENTRIES
    assert is_paused(kept)
    assert [entry.sequence for entry in kept] == [4, *range(21, 30)]
    entries[5] = HistoryEntry(6, to_text(6), "Shadow", Cause.RESUMED.value)
    assert [entry.sequence for entry in trimmed(entries)] == list(range(20, 30))


def test_times_are_whole_seconds_in_utc_and_nonsense_is_long_ago() -> None:
    assert to_text(1_735_689_600.9) == "2025-01-01T00:00:00Z"
    assert to_seconds("2025-01-01T00:00:00Z") == 1_735_689_600
    assert to_seconds("yesterday") == 0

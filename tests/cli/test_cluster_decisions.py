"""What the cluster commands decide and lay out: next stages, verdicts on pods, differences of specs, tables."""

from __future__ import annotations

import time
from typing import Any

import pytest
from kvsteward_cli.cluster.answers import Answer, gather
from kvsteward_cli.cluster.revisions import Change, Revision, differences, notes, proposed, revisions_of
from kvsteward_cli.cluster.stages import promotion
from kvsteward_cli.cluster.switch import confirms, runs, unconfirmed
from kvsteward_cli.cluster.tables import ago, cell, moment, short, since, table
from kvsteward_cli.errors import CommandFailed


def policy(status: dict[str, Any] | None = None, **rollout: Any) -> dict[str, Any]:
    """A policy whose status says that what is asked for is in force, unless `status` says else."""
    force = {"observedGeneration": 3, "stage": rollout.get("stage", "Shadow")}
    return {
        "metadata": {"name": "chat", "uid": "u", "generation": 3},
        "spec": {"rollout": rollout},
        "status": force | (status or {}),
    }


def condition(kind: str, status: str, reason: str, message: str) -> dict[str, Any]:
    return {"conditions": [{"type": kind, "status": status, "reason": reason, "message": message}]}


@pytest.mark.parametrize(
    ("stage", "to"),
    [("Cold", "Shadow"), ("Shadow", "Canary"), ("Canary", "Full"), pytest.param(None, "Canary", id="Shadow if unset")],
)
def test_a_promotion_is_one_step(stage: str | None, to: str) -> None:
    rollout = {"canary": {"percent": 5}} | ({"stage": stage} if stage else {})
    made = promotion(policy(**rollout))
    assert (made.before.value, made.to.value, made.notes) == (stage or "Shadow", to, ())


@pytest.mark.parametrize(
    ("resource", "status", "said"),
    [
        pytest.param(policy(stage="Full"), 2, "no stage beyond it", id="full"),
        pytest.param(policy(stage="Shadow", advance="Automatic"), 2, "advances by itself", id="automatic"),
        pytest.param(policy(stage="Half"), 2, "Half", id="a stage of another version"),
        pytest.param(policy({"observedGeneration": 2}, stage="Cold"), 1, "not seen the last edit", id="unseen"),
        pytest.param(policy({"stage": "Cold"}, stage="Shadow"), 1, "Shadow is asked for already", id="not yet"),
        pytest.param(
            policy({"stage": None} | condition("Available", "False", "NoPodReady", "none is ready"), stage="Shadow"),
            1,
            "none is ready",
            id="nothing serves",
        ),
        pytest.param(
            policy(condition("Accepted", "False", "CapacityTooSmall", "below 1Mi"), stage="Shadow"),
            1,
            "not accepted (CapacityTooSmall): below 1Mi",
            id="rejected",
        ),
    ],
)
def test_a_promotion_that_cannot_be_is_refused(resource: dict[str, Any], status: int, said: str) -> None:
    with pytest.raises(CommandFailed) as refused:
        promotion(resource)
    assert said in str(refused.value)
    assert refused.value.status == status


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        pytest.param({"stage": "Shadow"}, "nobody is in the canary", id="a canary of nobody"),
        pytest.param({"stage": "Canary", "progress": "Paused"}, "waits for `resume`", id="paused"),
        pytest.param({"stage": "Canary", "killSwitch": "Engaged"}, "before `release`", id="switch"),
    ],
)
def test_what_keeps_a_promotion_from_acting_is_said(rollout: dict[str, Any], said: str) -> None:
    (note,) = promotion(policy(**rollout)).notes
    assert said in note


def observation(**fields: Any) -> dict[str, Any]:
    return {"coldRequested": True, "coldConfirmed": True, "resourceGeneration": 7, "lastMatchSeconds": 90.0,
            "time": 100.0} | fields  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "confirmed", "why"),
    [
        pytest.param(Answer("p", observation()), True, "no new match", id="confirmed"),
        pytest.param(Answer("p", observation(resourceGeneration=8)), True, "no new match", id="a later edit"),
        pytest.param(Answer("p", observation(resourceGeneration=0)), True, "no new match", id="does not say which"),
        pytest.param(Answer("p", observation(resourceGeneration=6)), False, "not seen", id="an earlier engagement"),
        pytest.param(Answer("p", observation(coldRequested=False)), False, "not seen", id="not seen"),
        pytest.param(Answer("p", observation(coldConfirmed=False)), False, "engine has not confirmed", id="engine"),
        pytest.param(Answer("p", problem="does not answer"), False, "does not answer", id="silent"),
    ],
)
def test_a_pod_confirms_the_edit_it_was_asked_about(answer: Answer, confirmed: bool, why: str) -> None:
    verdict = confirms(answer, generation=7)
    assert verdict.confirmed is confirmed
    assert why in verdict.why
    if answer.body:
        assert (verdict.last_match, verdict.seconds_ago) == (90.0, 10.0)


def test_no_match_is_no_time_of_a_match() -> None:
    verdict = confirms(Answer("p", observation(lastMatchSeconds=0.0)), 7)
    assert (verdict.last_match, verdict.seconds_ago) == (None, None)


def test_the_sentence_names_those_that_are_missing_alone() -> None:
    verdicts = [confirms(Answer("good", observation()), 7), confirms(Answer("bad", problem="does not answer"), 7)]
    said = unconfirmed(verdicts, 5)
    assert said.endswith("1 of 2 pods have not confirmed within 5 s: bad (does not answer)")
    assert unconfirmed(verdicts[:1], 5) == ""


@pytest.mark.parametrize(
    ("state", "expected"),
    [({"running": {}}, True), ({"waiting": {}}, False), ({"terminated": {}}, False), ({}, False)],
    ids=["running", "waiting", "terminated", "unknown"],
)
def test_only_a_running_container_can_match(state: dict[str, Any], expected: bool) -> None:
    pod = {"status": {"containerStatuses": [{"name": "engine", "state": state}]}}
    assert runs(pod, "engine") is expected
    assert not runs(pod, "sidecar")


def test_gathering_asks_again_until_an_answer_will_do() -> None:
    asked: list[str] = []

    def ask(pod: str) -> Answer:
        asked.append(pod)
        return Answer(pod, asked.count(pod))

    found = gather(["a", "b"], ask, 10, lambda answer: answer.body >= (3 if answer.pod == "a" else 1))
    assert [(answer.pod, answer.body) for answer in found] == [("a", 3), ("b", 1)]
    assert asked.count("b") == 1


def test_gathering_does_not_wait_for_one_that_hangs() -> None:
    def ask(pod: str) -> Answer:
        if pod == "stuck":
            time.sleep(3)
        return Answer(pod, 1)

    begun = time.monotonic()
    found = gather(["stuck", "fine"], ask, 0.3)
    assert time.monotonic() - begun < 2
    assert [(answer.pod, answer.problem) for answer in found] == [("stuck", "does not answer"), ("fine", "")]


def test_gathering_from_nobody_ends_at_once() -> None:
    assert gather([], Answer, 60) == []


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        pytest.param({}, {}, [], id="nothing"),
        pytest.param({"a": {"b": 1, "c": 2}}, {"a": {"b": 3, "c": 2}}, [Change("a.b", 1, 3)], id="deep"),
        pytest.param({"a": 1}, {"b": 2}, [Change("a", 1, None), Change("b", None, 2)], id="added and removed"),
        pytest.param({"l": [{"n": 1}]}, {"l": []}, [Change("l", [{"n": 1}], [])], id="a list is one value"),
        pytest.param({"p": 0}, {"p": False}, [], id="as JSON compares in Python"),
        pytest.param({"m": {"x": "1"}}, {"m": {}}, [Change("m.x", "1", None)], id="a key of a map"),
    ],
)
def test_differences_are_listed_leaf_by_leaf(before: Any, after: Any, expected: list[Change]) -> None:
    assert list(differences(before, after)) == expected


def test_what_is_proposed_keeps_what_other_hands_hold() -> None:
    live = {
        "engine": {"replicas": 7, "image": "new"},
        "rollout": {"stage": "Full", "killSwitch": "Engaged", "progress": "Paused", "attempt": 3},
    }
    earlier = Revision(1, {"engine": {"image": "old"}, "rollout": {"stage": "Canary", "attempt": 2}}, "", "")
    assert proposed(live, earlier) == {
        "engine": {"replicas": 7, "image": "old"},
        "rollout": {"stage": "Canary", "killSwitch": "Engaged", "progress": "Paused", "attempt": 3},
    }
    assert earlier.spec["rollout"]["attempt"] == 2


def revision(number: int, uid: str = "u", data: Any = None) -> dict[str, Any]:
    return {
        "metadata": {"name": f"chat-{number}", "ownerReferences": [{"uid": uid, "controller": True}]},
        "revision": number,
        "data": {"spec": {"n": number}, "engineImage": "i"} if data is None else data,
    }


def test_revisions_are_those_of_this_policy_newest_first() -> None:
    bodies = [revision(2), revision(10), revision(3, uid="of an earlier policy"), revision(4, data={"template": {}})]
    assert [(one.number, one.spec) for one in revisions_of(policy(), bodies)] == [(10, {"n": 10}), (2, {"n": 2})]


@pytest.mark.parametrize(
    ("field", "before", "after", "said"),
    [
        ("engine.model.revision", "1", "2", "pods are replaced"),
        ("cache.capacity", "1Gi", "2Gi", "pods are replaced"),
        ("rollout.stage", "Shadow", "Full", "raises the stage"),
        ("rollout.stage", "Full", "Shadow", ""),
        ("scopes.private.quotaPercent", 1, 2, ""),
    ],
)
def test_what_a_rollback_costs_is_said(field: str, before: Any, after: Any, said: str) -> None:
    assert said in " ".join(notes([Change(field, before, after)]))
    assert bool(notes([Change(field, before, after)])) is bool(said)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0s"), (119.9, "119s"), (120, "2m"), (7199, "119m"), (7200, "2h"), (172_799, "47h"), (172_800, "2d")],
)
def test_ages_are_written_as_kubectl_does(seconds: float, text: str) -> None:
    assert ago(seconds) == text


def test_columns_are_as_wide_as_their_widest_cell_and_lines_end_in_no_spaces() -> None:
    assert table(("A", "LONG"), [("xyz", 1), ("", True)]) == "A     LONG\nxyz   1\n-     yes"


def test_text_from_the_cluster_cannot_steer_the_terminal() -> None:
    assert cell("a\x1b[2Jb\nc\td") == "a [2Jb c d"


def test_times_are_utc_to_the_millisecond() -> None:
    assert moment(1_735_689_600.0625) == "2025-01-01T00:00:00.062Z"
    assert since("2025-01-01T00:00:00Z", 1_735_689_660.0) == "60s"
    assert since(None, 0.0) == since("yesterday", 0.0) == ""


def test_digests_are_cut_and_keep_their_kind() -> None:
    assert short("Private/" + "a" * 64) == "Private/" + "a" * 10
    assert short("") == ""

"""`kubectl kvcache`, whole, against a policy that a real operator governs; the cluster is faked at its one seam."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from kvsteward_cli.cluster import api, reads
from kvsteward_cli.cluster.main import main
from kvsteward_cli.cluster.session import Session, setting
from kvsteward_cli.main import main as kvsteward
from support.operated_cluster import OperatedCluster

Command = Callable[..., tuple[int, str, str]]
STAGES = ("Cold", "Shadow", "Canary", "Full")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> OperatedCluster:
    made = OperatedCluster()
    monkeypatch.setattr(api, "connect", lambda kubeconfig, context, namespace: made)
    return made


@pytest.fixture
def kvcache(cluster: OperatedCluster, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the plugin: exit status, stdout, stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(list(words))
        told = capsys.readouterr()
        return status, told.out, told.err

    return run


def rollout(cluster: OperatedCluster) -> dict[str, Any]:
    found: dict[str, Any] = cluster.policy("chat")["spec"]["rollout"]
    return found


def pods(cluster: OperatedCluster) -> list[str]:
    return sorted(pod["metadata"]["name"] for pod in cluster.operating.api.of_kind("Pod"))


# --- status


async def test_status_shows_generation_stage_pods_and_conditions(cluster: OperatedCluster, kvcache: Command) -> None:
    await cluster.create(rollout={"stage": "Canary", "canary": {"percent": 25}})
    status, out, err = kvcache("status", "chat")
    assert (status, err) == (0, "")
    generation = cluster.operating.status.generations[0].name
    assert re.search(rf"^{generation} +Serving +Canary +25 % +2 +2 +0 +0 +1 +kvsteward/engine:1$", out, re.MULTILINE)
    assert re.search(r"^In force: +Canary at 25 %$", out, re.MULTILINE)
    assert re.search(r"^Asked for: +Canary at 25 %; Manual, Running, attempt 1, 5 % protected$", out, re.MULTILINE)
    for condition in cluster.operating.status.conditions:
        assert re.search(rf"^{condition.type} +{condition.status} +{condition.reason} .*", out, re.MULTILINE)
        assert condition.message in out


async def test_status_says_when_the_operator_has_not_seen_the_spec(cluster: OperatedCluster, kvcache: Command) -> None:
    await cluster.create()
    assert "generation 1, the operator has seen it" in kvcache("status", "chat")[1]
    kvcache("pause", "chat")
    assert "generation 2, the operator has seen 1 only" in kvcache("status", "chat")[1]


async def test_status_without_a_name_has_a_line_for_each_policy(cluster: OperatedCluster, kvcache: Command) -> None:
    assert "no policies in namespace serving" in kvcache("status")[1]
    await cluster.create(rollout={"stage": "Full"})
    lines = kvcache("status")[1].splitlines()
    assert lines[0].split()[:4] == ["NAME", "STAGE", "CANARY", "SWITCH"]
    assert re.match(r"chat +Full +- +Released +2/2 +2 +- +- +True +False +", lines[1])
    assert kvcache("status", "-A")[1].splitlines()[1].startswith("serving ")


async def test_status_for_scripts_is_one_json_value(cluster: OperatedCluster, kvcache: Command) -> None:
    await cluster.create(rollout={"stage": "Full"})
    one = json.loads(kvcache("status", "chat", "-o", "json")[1])
    assert (one["stage"], one["current"], one["generations"][0]["acknowledgedReplicas"]) == ("Full", True, 2)
    assert json.loads(kvcache("-o", "json", "status")[1]) == {"items": [one]}


async def test_watching_shows_each_change_and_outlives_a_lost_api_server(
    cluster: OperatedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    await cluster.create()
    real, turns = cluster.policy, []

    def lost(name: str) -> Any:
        raise api.Unreachable("the API server does not answer")

    def later(_: float) -> None:
        """In place of a second's sleep: the API server is gone for two turns, then the stage is raised."""
        turns.append(len(turns))
        cluster.policy = lost if len(turns) in (1, 2) else real  # type: ignore[method-assign]
        if len(turns) == 3:
            Session(cluster).edit("chat", lambda _: [setting("stage", "Canary")])
        if len(turns) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reads.status(Session(cluster, json=True, sleep=later), Namespace(name="chat", watch=True))
    told = capsys.readouterr()
    assert [json.loads(line)["wanted"]["stage"] for line in told.out.splitlines()] == ["Shadow", "Canary"]
    assert told.err == "note: the API server does not answer\n"


# --- pause, resume, release


async def test_pause_and_resume_write_progress_alone(cluster: OperatedCluster, kvcache: Command) -> None:
    await cluster.create()
    before = rollout(cluster)
    assert kvcache("pause", "chat")[0] == 0
    assert rollout(cluster) == {**before, "progress": "Paused"}
    assert "nothing was written" in kvcache("pause", "chat")[1]
    assert kvcache("resume", "chat")[0] == 0
    assert rollout(cluster) == before
    assert len(cluster.writes) == 2


async def test_a_paused_rollout_holds_a_promotion(cluster: OperatedCluster, kvcache: Command) -> None:
    await cluster.create(rollout={"canary": {"percent": 5}})
    kvcache("pause", "chat")
    await cluster.operating.run()
    status, out, err = kvcache("promote", "chat")
    assert (status, out) == (0, "chat promoted from Shadow to Canary\n")
    assert "waits for `resume`" in err
    await cluster.operating.run()
    status, out, err = kvcache("promote", "chat")
    assert status == 1
    assert "Canary is asked for already and Shadow is in force" in err
    kvcache("resume", "chat")
    await cluster.operating.run()
    assert cluster.operating.status.stage == "Canary"


async def test_release_can_release_latched_pods_too(cluster: OperatedCluster, kvcache: Command) -> None:
    await cluster.create(rollout={"killSwitch": "Engaged", "attempt": 3})
    kvcache("release", "chat")
    assert (rollout(cluster)["killSwitch"], rollout(cluster)["attempt"]) == ("Released", 3)
    done = json.loads(kvcache("release", "chat", "--latches", "-o", "json")[1])
    assert done["changes"] == [{"field": "rollout.attempt", "from": 3, "to": 4}]
    assert rollout(cluster)["attempt"] == 4


# --- kill


async def test_kill_writes_the_switch_before_it_asks_for_anything(cluster: OperatedCluster, kvcache: Command) -> None:
    await cluster.create(rollout={"stage": "Full"})
    cluster.policy = lambda name: pytest.fail("the switch waited for a look")  # type: ignore[method-assign]
    patched: list[Any] = []
    cluster.patch = lambda name, operations, dry_run=False: (  # type: ignore[method-assign,assignment]
        patched.append(operations) or {"metadata": {"name": name, "generation": 2}}
    )
    status, out, _ = kvcache("kill", "chat")
    assert (status, "kill switch engaged" in out) == (0, True)
    assert patched == [[{"op": "add", "path": "/spec/rollout/killSwitch", "value": "Engaged"}]]


async def test_kill_waits_for_every_pod_and_shows_its_last_match(cluster: OperatedCluster, kvcache: Command) -> None:
    await cluster.create(rollout={"stage": "Full"})
    first, second = pods(cluster)
    seen = {"last_match_seconds": cluster.operating.now - 1.25, "time": cluster.operating.now}
    cluster.operating.sidecars.changes[first] = seen
    status, out, err = kvcache("kill", "chat", "--wait")
    assert (status, err) == (0, "")
    assert re.search(rf"^{first} +yes +2025-01-01T\S+Z +1.25 s +its engine makes no new match$", out, re.MULTILINE)
    assert re.search(rf"^{second} +yes +- +- +its engine makes no new match$", out, re.MULTILINE)


@pytest.mark.slow  # waits out the time in which a pod may confirm
@pytest.mark.parametrize(
    ("unwilling", "why"),
    [
        pytest.param("deaf", "has not seen the switch yet", id="lost-its-watch"),
        pytest.param("hang", "connection refused", id="cannot-be-reached"),
        pytest.param("unconfirmed", "its engine has not confirmed yet", id="engine-does-not-confirm"),
        pytest.param("stale", "has not seen the switch yet", id="confirms-an-earlier-engagement"),
    ],
)
async def test_kill_names_the_pods_that_have_not_confirmed(
    cluster: OperatedCluster, kvcache: Command, unwilling: str, why: str
) -> None:
    await cluster.create(rollout={"stage": "Full"})
    bad, good = pods(cluster)
    if unwilling == "deaf":
        cluster.operating.sidecars.deaf.add(bad)
    elif unwilling == "hang":
        cluster.hang.add(bad)
    else:
        field = {"unconfirmed": {"cold_confirmed": False}, "stale": {"resource_generation": 1}}[unwilling]
        cluster.operating.sidecars.changes[bad] = field
    status, _, err = kvcache("kill", "chat", "--wait", "--timeout", "1")
    assert status == 1
    assert f"1 of 2 pods have not confirmed within 1 s: {bad} (" in err
    assert why in err
    assert good not in err
    assert rollout(cluster)["killSwitch"] == "Engaged"
    told = json.loads(kvcache("kill", "chat", "--wait", "--timeout", "1", "-o", "json")[1])
    assert {pod["name"]: pod["confirmed"] for pod in told["pods"]} == {bad: False, good: True}


async def test_a_pod_whose_engine_does_not_run_confirms(cluster: OperatedCluster, kvcache: Command) -> None:
    await cluster.create(rollout={"stage": "Full"})
    cluster.down.add(pods(cluster)[0])
    cluster.hang.add(pods(cluster)[0])
    assert kvcache("kill", "chat", "--wait")[0] == 0


async def test_an_unconfirmed_switch_is_said_to_be_engaged(cluster: OperatedCluster, kvcache: Command) -> None:
    await cluster.create(rollout={"stage": "Full"})

    def forbidden(name: str) -> str:
        raise api.refusal(403, "", '{"message": "secrets \\"chat-kvsteward\\" is forbidden"}')

    cluster.admin_token = forbidden  # type: ignore[method-assign]
    status, _, err = kvcache("kill", "chat", "--wait")
    assert status == 1
    assert "the kill switch is engaged, but could not be seen to be confirmed: you may not do this: secrets" in err


# --- promote


async def test_promote_goes_step_by_step_and_never_beyond_full(cluster: OperatedCluster, kvcache: Command) -> None:
    await cluster.create(rollout={"stage": "Cold", "canary": {"percent": 5}})
    for before, after in pairwise(STAGES):
        status, out, err = kvcache("promote", "chat")
        assert (status, out, err) == (0, f"chat promoted from {before} to {after}\n", "")
        await cluster.operating.run()
    status, out, err = kvcache("promote", "chat")
    assert (status, out) == (2, "")
    assert err == "kubectl kvcache: chat is at Full: there is no stage beyond it\n"
    assert len(cluster.writes) == 3


async def test_two_promotions_in_a_hurry_are_one_step(cluster: OperatedCluster, kvcache: Command) -> None:
    await cluster.create()
    assert kvcache("promote", "chat")[0] == 0
    status, _, err = kvcache("promote", "chat")
    assert (status, "has not seen the last edit" in err) == (1, True)
    assert rollout(cluster)["stage"] == "Canary"


async def test_a_status_written_meanwhile_does_not_stop_a_promotion(cluster: OperatedCluster, kvcache: Command) -> None:
    await cluster.create()

    def operator_writes() -> None:
        policy = cluster.operating.policy
        cluster.operating.api.put({**policy, "status": {**policy["status"], "replicas": 7}})

    cluster.before_patch = operator_writes
    assert kvcache("promote", "chat")[0] == 0
    assert rollout(cluster)["stage"] == "Canary"


async def test_a_spec_edited_meanwhile_is_not_promoted(cluster: OperatedCluster, kvcache: Command) -> None:
    await cluster.create()

    def somebody_edits() -> None:
        policy = cluster.operating.policy
        policy["spec"]["rollout"]["stage"] = "Cold"
        cluster.operating.api.put(policy)

    cluster.before_patch = somebody_edits
    status, _, err = kvcache("promote", "chat")
    assert (status, "edited by somebody else" in err) == (1, True)
    assert rollout(cluster)["stage"] == "Cold"


# --- rollback


async def test_rollback_goes_back_to_the_spec_before_and_says_what_changes(
    cluster: OperatedCluster, kvcache: Command
) -> None:
    await cluster.create(rollout={"stage": "Shadow"})
    first = cluster.policy("chat")["spec"]
    await cluster.edit(rollout={"stage": "Full"}, scopes={"private": {"quotaPercent": 30}})
    status, out, err = kvcache("rollback", "chat")
    assert status == 0
    assert "chat goes back to revision 1" in out
    assert re.search(r"^rollout.stage +Full +Shadow$", out, re.MULTILINE)
    assert re.search(r"^scopes.private.quotaPercent +30 +100$", out, re.MULTILINE)
    assert len(out.splitlines()) == 4
    assert cluster.policy("chat")["spec"] == first
    await cluster.operating.run()
    assert cluster.operating.condition("Accepted") == ("True", "Accepted")
    assert cluster.operating.status.stage == "Shadow"
    status, out, err = kvcache("rollback", "chat")  # and forth again
    assert (status, cluster.policy("chat")["spec"]["rollout"]["stage"]) == (0, "Full")
    assert "this raises the stage, from Shadow to Full" in err


async def test_rollback_to_a_revision_and_its_list(cluster: OperatedCluster, kvcache: Command) -> None:
    await cluster.create(cache={"capacity": "64Mi"})
    await cluster.edit(cache={"capacity": "96Mi"})
    await cluster.edit(cache={"capacity": "128Mi"})
    listed = json.loads(kvcache("rollback", "chat", "--list", "-o", "json")[1])["items"]
    assert [one["revision"] for one in listed] == [3, 2, 1]
    assert [one["changes"] for one in listed] == [
        [],
        [{"field": "cache.capacity", "from": "128Mi", "to": "96Mi"}],
        [{"field": "cache.capacity", "from": "128Mi", "to": "64Mi"}],
    ]
    assert "nothing: the spec is so now" in kvcache("rollback", "chat", "--list")[1]
    assert cluster.writes == []
    assert "would go back to revision 1" in kvcache("rollback", "chat", "--to-revision", "1", "--dry-run")[1]
    assert cluster.writes == []
    status, _, err = kvcache("rollback", "chat", "--to-revision", "1")
    assert (status, cluster.policy("chat")["spec"]["cache"]["capacity"]) == (0, "64Mi")
    assert "pods are replaced for this" in err
    status, _, err = kvcache("rollback", "chat", "--to-revision", "9")
    assert (status, "has no revision 9; kept are 3, 2, 1" in err) == (1, True)


async def test_rollback_leaves_what_other_hands_hold_alone(cluster: OperatedCluster, kvcache: Command) -> None:
    await cluster.create(rollout={"stage": "Shadow"})
    await cluster.edit(rollout={"stage": "Full"})
    held = {"killSwitch": "Engaged", "progress": "Paused", "attempt": 4}
    await cluster.edit(rollout=held, engine={"replicas": 5})
    assert kvcache("rollback", "chat")[0] == 0
    spec = cluster.policy("chat")["spec"]
    assert spec["engine"]["replicas"] == 5
    assert spec["rollout"] == {**rollout(cluster), "stage": "Shadow", **held}


async def test_rollback_undoes_an_edit_that_was_not_accepted(cluster: OperatedCluster, kvcache: Command) -> None:
    await cluster.create(cache={"capacity": "64Mi"})
    await cluster.edit(cache={"capacity": "1Ki"})
    assert cluster.operating.condition("Accepted")[0] == "False"
    assert kvcache("rollback", "chat")[0] == 0
    await cluster.operating.run()
    assert cluster.operating.condition("Accepted") == ("True", "Accepted")
    assert cluster.policy("chat")["spec"]["cache"]["capacity"] == "64Mi"


async def test_with_nothing_to_go_back_to_rollback_writes_nothing(cluster: OperatedCluster, kvcache: Command) -> None:
    await cluster.create()
    status, _, err = kvcache("rollback", "chat")
    assert (status, "nothing to go back to" in err) == (1, True)
    status, out, _ = kvcache("rollback", "chat", "--to-revision", "1")
    assert (status, "nothing was written" in out) == (0, True)
    assert cluster.writes == []


# --- receipts and ledger


def receipt(identity: str, time: float, **fields: Any) -> dict[str, Any]:
    return {"id": identity, "time": time, "decision": "Reuse", "stage": "Full", "cohort": "Canary", "tenant": "a" * 64,
            "workload": "other", "promptTokens": 1024, "eligibleTokens": 1008, "residentTokens": 896,
            "reusedTokens": 896, "timeToFirstTokenSeconds": 0.0123, "ending": "completed", "misses": {"Evicted": 7},
            **fields}  # fmt: skip


async def test_receipts_of_all_pods_come_newest_first(cluster: OperatedCluster, kvcache: Command) -> None:
    await cluster.create(rollout={"stage": "Full"})
    assert kvcache("receipts", "chat")[:2] == (0, "no receipts: nothing was asked since the sidecars started\n")
    first, second = pods(cluster)
    cluster.receipts = {first: [receipt("c", 30.0), receipt("a", 10.0)], second: [receipt("b", 20.0)]}
    status, out, _ = kvcache("receipts", "chat", "--limit", "2")
    rows = [line.split() for line in out.splitlines()[1:]]
    assert status == 0
    assert [(row[-1], row[1]) for row in rows] == [("c", first), ("b", second)]
    assert " ".join(rows[0][2:]) == f"Reuse Full Canary {'a' * 10} other 1024 1008 896 896 12.3 completed c"
    told = json.loads(kvcache("receipts", "chat", "-o", "json")[1])
    assert [one["id"] for one in told["items"]] == ["c", "b", "a"]


async def test_one_receipt_is_found_on_whichever_pod_has_it(cluster: OperatedCluster, kvcache: Command) -> None:
    await cluster.create(rollout={"stage": "Full"})
    second = pods(cluster)[1]
    cluster.receipts = {second: [receipt("b", 20.0)]}
    status, out, _ = kvcache("receipts", "chat", "--id", "b")
    assert status == 0
    assert re.search(rf"^pod: +{second}$", out, re.MULTILINE)
    assert re.search(r"^misses: +Evicted 7$", out, re.MULTILINE)
    status, _, err = kvcache("receipts", "chat", "--id", "z")
    assert (status, "no pod of chat has receipt z" in err) == (1, True)


async def test_pods_that_do_not_answer_are_named_after_what_the_others_said(
    cluster: OperatedCluster, kvcache: Command
) -> None:
    await cluster.create(rollout={"stage": "Full"})
    first, second = pods(cluster)
    cluster.receipts = {second: [receipt("b", 20.0)]}
    cluster.hang.add(first)
    status, out, err = kvcache("receipts", "chat")
    assert (status, second in out, f"not all pods of chat answered: {first}: no port-forward" in err) == (1, True, True)
    cluster.hang.clear()
    cluster.token = "of another operator key"
    status, _, err = kvcache("receipts", "chat")
    assert (status, "the bearer token is not this policy's" in err) == (1, True)


def page(number: int, **fields: Any) -> dict[str, Any]:
    return {"key": f"{number:064x}", "scope": "Private/" + "b" * 64, "state": "Retained", "refcount": 0, "created": 1.0,
            "lastUse": float(number), "uses": 1, "savedTokens": 16, "retention": "private", "evictionReason": "",
            **fields}  # fmt: skip


async def test_the_ledger_is_read_whole_and_shows_what_was_used_last(
    cluster: OperatedCluster, kvcache: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.create(rollout={"stage": "Full"})
    assert kvcache("ledger", "chat")[:2] == (0, "no pages: nothing was published, or all of it has gone\n")
    monkeypatch.setattr(reads, "LEDGER_SLICE", 3)
    first, second = pods(cluster)
    gone = [page(100, state="Evicted", evictionReason="Capacity")]
    cluster.pages = {first: [page(n) for n in range(1, 8)] + gone, second: [page(50)]}
    status, out, err = kvcache("ledger", "chat", "--limit", "3")
    assert status == 0
    assert [line.split()[1] for line in out.splitlines()[1:]] == [second, first, first]
    assert "3 of 8 pages" in err
    assert "Private/" + "b" * 10 + " " in out
    told = json.loads(kvcache("ledger", "chat", "--evicted", "-o", "json")[1])
    assert (told["total"], told["items"][0]["evictionReason"]) == (9, "Capacity")


# --- how it fails


@pytest.mark.parametrize("verb", "status receipts ledger pause resume kill release promote rollback".split())
async def test_a_policy_that_is_not_there_is_a_sentence(cluster: OperatedCluster, kvcache: Command, verb: str) -> None:
    status, out, err = kvcache(verb, "nobody")
    assert (status, out) == (1, "")
    assert err == "kubectl kvcache: kvcachepolicies 'nobody' was not found in this namespace; see -n\n"


@pytest.mark.parametrize(
    "words",
    [
        pytest.param([], id="no-command"),
        pytest.param(["kill"], id="no-name"),
        pytest.param(["drain", "chat"], id="unknown-command"),
        pytest.param(["status", "chat", "-o", "yaml"], id="unknown-output"),
        pytest.param(["receipts", "chat", "--limit", "0"], id="no-receipts"),
        pytest.param(["rollback", "chat", "--to-revision", "two"], id="no-number"),
        pytest.param(["kill", "../secrets/chat"], id="a-path-for-a-name"),
        pytest.param(["status", "-n", "a/b"], id="a-path-for-a-namespace"),
        pytest.param(["receipts", "chat", "--id", "a&limit=1"], id="a-query-for-an-id"),
    ],
)
def test_a_command_that_makes_no_sense_ends_with_two(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: kubectl kvcache" in capsys.readouterr().err


async def test_a_name_beside_all_namespaces_is_refused(cluster: OperatedCluster, kvcache: Command) -> None:
    assert kvcache("status", "chat", "-A")[0] == 2


async def test_kvsteward_cluster_is_the_same_command(
    cluster: OperatedCluster, kvcache: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    await cluster.create(rollout={"stage": "Full"})
    _, expected, _ = kvcache("status", "chat", "-o", "json")
    assert kvsteward(["cluster", "status", "chat", "-o", "json"]) == 0
    assert capsys.readouterr().out == expected
    assert kvsteward(["cluster", "promote", "chat"]) == 2
    assert capsys.readouterr().err == "kvsteward: chat is at Full: there is no stage beyond it\n"

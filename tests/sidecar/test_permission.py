"""What may be reused, from document, resource, latch and tenants."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvsteward_contract.policy import IdentitySource, KillSwitch, Stage
from kvsteward_sidecar.latch import Latch
from kvsteward_sidecar.permission import (
    Permission,
    ResourceView,
    UnreadableResource,
    loses,
    losses,
    permission_for,
    read_resource,
    succeed,
)
from support.control_plane import UID, document, resource

FULL = Permission(
    known=True,
    version="sha256:1",
    uid=UID,
    namespace="serving",
    stage=Stage.FULL,
    canary_percent=25,
    canary_workloads=frozenset({"summaries"}),
    protected_percent=5,
    workloads=frozenset({"summaries", "checkout"}),
    credentials=frozenset({"1=acme", "2=globex"}),
    epoch=7,
)


def made(resource_view: ResourceView | None, **rollout: object) -> Permission:
    return permission_for(document(**rollout), "sha256:1", resource_view, None, frozenset())


def view(switch: str = "Released", stage: str = "Full", uid: str = UID) -> ResourceView:
    return ResourceView(uid, KillSwitch(switch), Stage(stage))


@pytest.mark.parametrize("documented", list(Stage))
@pytest.mark.parametrize("asked", list(Stage))
def test_the_stage_in_force_is_the_lower_of_both(documented: Stage, asked: Stage) -> None:
    permission = made(view(stage=asked.value), stage=documented.value)
    assert permission.stage.rank == min(documented.rank, asked.rank)


@pytest.mark.parametrize(
    ("documented", "seen", "engaged"),
    [
        pytest.param("Released", None, False, id="document-alone-released"),
        pytest.param("Engaged", None, True, id="document-alone-engaged"),
        pytest.param("Released", "Engaged", True, id="resource-engages-before-the-operator-does"),
        pytest.param("Engaged", "Released", True, id="a-release-waits-until-it-is-accepted"),
        pytest.param("Engaged", "Engaged", True, id="both"),
    ],
)
def test_the_kill_switch_is_engaged_when_either_says_so(
    documented: str, seen: str | None, engaged: bool
) -> None:
    permission = made(view(switch=seen) if seen else None, stage="Full", killSwitch=documented)
    assert permission.kill_switch is engaged
    assert permission.stopped is engaged


@pytest.mark.parametrize("other", [pytest.param(None, id="none"), pytest.param(view(uid="another"), id="of-another")])
def test_without_the_resource_that_it_names_a_document_permits_nothing(other: ResourceView | None) -> None:
    permission = made(other, stage="Full")
    assert (permission.known, permission.stage, permission.version) == (False, Stage.COLD, "sha256:1")
    assert made(view(), stage="Full").known


def test_a_resource_with_another_uid_engages_nothing() -> None:
    assert not made(view("Engaged", "Cold", uid="another"), stage="Full").kill_switch


def test_without_a_document_nothing_is_known_and_the_stage_is_cold() -> None:
    permission = permission_for(None, "", view(), None, frozenset())
    assert not permission.known
    assert permission.stage is Stage.COLD


def test_a_latch_stops_whatever_the_policy_says() -> None:
    permission = permission_for(document(stage="Full"), "v", view(), Latch("ScopeViolation", 1.0, 1), frozenset())
    assert permission.stopped
    assert permission.latch == "ScopeViolation"


def test_both_conditions_of_the_canary_must_hold() -> None:
    permission = made(None, stage="Canary", canary={"percent": 10, "workloads": ["summaries"]})
    assert permission.in_cohort(999, "summaries")
    assert not permission.in_cohort(1000, "summaries")
    assert not permission.in_cohort(999, "checkout")


def test_a_canary_without_workloads_holds_all_of_them() -> None:
    permission = made(None, stage="Canary", canary={"percent": 10})
    assert permission.in_cohort(999, permission.workload("anything"))


def test_a_workload_that_the_policy_does_not_name_counts_as_other() -> None:
    permission = made(None)
    assert permission.workload("checkout") == "checkout"
    assert permission.workload("made-up") == "other"


def test_an_override_has_a_retention_class_of_its_own_that_does_not_name_the_tenant() -> None:
    permission = permission_for(document(), "v", None, None, frozenset(), b"key")
    name = permission.retention_class("acme")
    assert permission.retention[name].quota_percent == 30
    assert "acme" not in name
    assert permission.retention_class("globex") == "private"
    assert permission.retention["private"].quota_percent == 100


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        pytest.param({"kill_switch": True}, ("killSwitch",), id="switch-engaged"),
        pytest.param({"latch": "ColdRequested"}, ("latch",), id="latched"),
        pytest.param({"known": False}, ("document",), id="document-gone"),
        pytest.param({"stage": Stage.CANARY}, ("stage",), id="lower-stage"),
        pytest.param({"canary_percent": 24}, ("canary",), id="smaller-canary"),
        pytest.param({"canary_workloads": frozenset({"checkout"})}, ("canary",), id="other-canary-workload"),
        pytest.param({"canary_workloads": frozenset()}, (), id="canary-of-all-workloads"),
        pytest.param({"canary_workloads": frozenset({"summaries", "checkout"})}, (), id="wider-canary"),
        pytest.param({"protected_percent": 6}, ("protectedPercent",), id="more-protected"),
        pytest.param({"protected_percent": 4}, (), id="fewer-protected"),
        pytest.param({"uid": "another"}, ("policy",), id="another-policy"),
        pytest.param({"identity": IdentitySource.HEADER}, ("identity",), id="another-identity-source"),
        pytest.param({"credentials": frozenset({"1=acme"})}, ("credentials",), id="key-revoked"),
        pytest.param({"credentials": frozenset({"1=acme", "2=acme"})}, ("credentials",), id="key-moved"),
        pytest.param({"credentials": FULL.credentials | {"3=new"}}, (), id="key-added"),
        pytest.param({"workloads": frozenset({"summaries"})}, ("workloads",), id="workload-removed"),
        pytest.param({"version": "sha256:2"}, (), id="new-version-alone"),
        pytest.param({"attempt": 9}, (), id="higher-attempt"),
    ],
)
def test_what_a_change_takes_away_raises_the_epoch_and_nothing_else_does(
    change: dict[str, object], lost: tuple[str, ...]
) -> None:
    new = replace(FULL, epoch=0, **change)
    assert losses(FULL, new) == lost
    assert succeed(FULL, new).epoch == FULL.epoch + bool(lost)


def test_the_epoch_stays_unknown_until_the_engine_was_heard() -> None:
    silent = replace(FULL, epoch=0)
    assert succeed(silent, replace(silent, kill_switch=True)).epoch == 0


def test_a_canary_of_all_workloads_loses_when_it_is_narrowed_to_one() -> None:
    everyone = replace(FULL, canary_workloads=frozenset())
    assert losses(everyone, FULL) == ("canary",)


permissions = st.builds(
    Permission,
    known=st.booleans(),
    stage=st.sampled_from(list(Stage)),
    kill_switch=st.booleans(),
    latch=st.sampled_from(["", "ColdRequested"]),
    canary_percent=st.integers(0, 60),
    canary_workloads=st.frozensets(st.sampled_from(["a", "b"])),
    protected_percent=st.integers(0, 40),
    epoch=st.integers(1, 9),
)


def reuses(permission: Permission, bucket: int, workload: str) -> bool:
    if not permission.known or permission.stopped or permission.protects(bucket):
        return False
    if permission.stage is Stage.CANARY:
        return permission.in_cohort(bucket, workload)
    return permission.stage is Stage.FULL


@given(permissions, permissions, st.integers(0, 9999), st.sampled_from(["a", "b", "other"]))
def test_whoever_may_not_reuse_any_more_was_counted_as_a_loss(
    old: Permission, new: Permission, bucket: int, workload: str
) -> None:
    if reuses(old, bucket, workload) and not reuses(new, bucket, workload):
        assert loses(old, new)
        assert succeed(old, new).epoch > old.epoch


@pytest.mark.parametrize(
    ("spec", "switch", "stage"),
    [
        pytest.param({"rollout": {"stage": "Full", "killSwitch": "Engaged"}}, "Engaged", "Full", id="plain"),
        pytest.param({"rollout": {"killSwitch": "Engaged"}, "engine": 7}, "Engaged", "Shadow", id="rest-is-nonsense"),
        pytest.param({"rollout": {"stage": "Cold", "canary": "?"}}, "Released", "Cold", id="rollout-half-nonsense"),
        pytest.param({}, "Released", "Shadow", id="defaults"),
        pytest.param(None, "Released", "Shadow", id="no-spec"),
    ],
)
def test_only_switch_and_stage_are_read_from_a_resource(spec: object, switch: str, stage: str) -> None:
    assert read_resource({"metadata": {"uid": UID}, "spec": spec}) == view(switch, stage)


def test_the_generation_that_was_read_is_told() -> None:
    seen = {"metadata": {"uid": UID, "generation": 7}, "spec": {"rollout": {"killSwitch": "Engaged"}}}
    assert read_resource(seen) == ResourceView(UID, KillSwitch.ENGAGED, Stage.SHADOW, 7)


@pytest.mark.parametrize(
    ("rollout", "named"),
    [
        pytest.param({"killSwitch": True}, "killSwitch", id="a-boolean-switch"),
        pytest.param({"stage": "full"}, "stage", id="a-misspelt-stage"),
        pytest.param({"stage": ["Full"]}, "stage", id="a-list"),
        pytest.param("Full", "rollout", id="not-an-object"),
    ],
)
def test_an_unreadable_switch_or_stage_is_named(rollout: object, named: str) -> None:
    with pytest.raises(UnreadableResource, match=named):
        read_resource({**resource(), "spec": {"rollout": rollout}})

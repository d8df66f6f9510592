from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvsteward_contract.cohort import BUCKETS, bucket, in_canary, is_protected
from kvsteward_contract.decision import DECISIONS, Facts, Reason, decide
from kvsteward_contract.directive import Mode
from kvsteward_contract.policy import Stage

FULL = Facts(stage=Stage.FULL)

facts = st.builds(
    Facts,
    **{
        name: st.booleans()
        for name in (
            "verify_replay", "kill_switch", "policy_known", "ambiguous", "tenant_known", "supported", "protected",
            "in_cohort",
        )
    },
    stage=st.sampled_from(Stage),
)  # fmt: skip


@pytest.mark.parametrize(
    ("given_facts", "reason", "mode"),
    [
        pytest.param(replace(FULL, verify_replay=True, kill_switch=True), Reason.VERIFY_REPLAY, Mode.COLD, id="replay"),
        pytest.param(replace(FULL, kill_switch=True, policy_known=False), Reason.KILL_SWITCH, Mode.COLD, id="switch"),
        pytest.param(replace(FULL, policy_known=False), Reason.POLICY_UNAVAILABLE, Mode.COLD, id="no-policy"),
        pytest.param(replace(FULL, ambiguous=True), Reason.AMBIGUOUS_METADATA, Mode.COLD, id="ambiguous"),
        pytest.param(replace(FULL, tenant_known=False), Reason.NO_TENANT, Mode.COLD, id="no-tenant"),
        pytest.param(replace(FULL, supported=False), Reason.UNSUPPORTED_REQUEST, Mode.COLD, id="unsupported"),
        pytest.param(replace(FULL, stage=Stage.COLD), Reason.COLD_STAGE, Mode.COLD, id="cold-stage"),
        pytest.param(replace(FULL, protected=True), Reason.PROTECTED, Mode.COLD, id="protected"),
        pytest.param(replace(FULL, stage=Stage.SHADOW), Reason.SHADOW_STAGE, Mode.SHADOW, id="shadow"),
        pytest.param(replace(FULL, stage=Stage.CANARY), Reason.NOT_IN_COHORT, Mode.SHADOW, id="outside-canary"),
        pytest.param(
            replace(FULL, stage=Stage.CANARY, in_cohort=True), Reason.REUSE, Mode.REUSE, id="inside-canary"
        ),
        pytest.param(FULL, Reason.REUSE, Mode.REUSE, id="full"),
    ],
)
def test_the_first_reason_that_applies_wins(given_facts, reason, mode):
    decision = decide(given_facts)
    assert (decision.reason, decision.mode, decision.eligible) == (reason, mode, mode is Mode.REUSE)


@given(facts)
def test_reuse_needs_every_permission(given_facts):
    allowed = (
        given_facts.policy_known
        and given_facts.tenant_known
        and given_facts.supported
        and not given_facts.verify_replay
        and not given_facts.kill_switch
        and not given_facts.ambiguous
        and not given_facts.protected
        and (given_facts.stage is Stage.FULL or (given_facts.stage is Stage.CANARY and given_facts.in_cohort))
    )
    assert (decide(given_facts).mode is Mode.REUSE) == allowed


@given(facts)
def test_taking_a_permission_away_never_gives_more(given_facts):
    order = [Mode.COLD, Mode.SHADOW, Mode.REUSE]
    before = order.index(decide(given_facts).mode)
    for less in (
        {"kill_switch": True}, {"policy_known": False}, {"ambiguous": True}, {"tenant_known": False},
        {"supported": False}, {"protected": True}, {"stage": Stage.COLD}, {"verify_replay": True},
    ):  # fmt: skip
        assert order.index(decide(replace(given_facts, **less)).mode) <= before


def test_the_table_names_each_reason_once_and_in_order():
    assert [rule.reason for rule in DECISIONS] == list(Reason)


@given(st.binary(min_size=1, max_size=32), st.text(max_size=40), st.integers(0, 100), st.integers(0, 100))
def test_cohorts_are_nested_and_the_protected_group_is_disjoint(seed, session, percent, protected):
    place = bucket(seed, session)
    assert 0 <= place < BUCKETS
    assert place == bucket(seed, session)
    for wider in range(percent, 101, 10):
        assert not in_canary(place, percent) or in_canary(place, wider)
    if percent + protected <= 100:
        assert not (in_canary(place, percent) and is_protected(place, protected))


def test_cohorts_have_the_size_asked_for():
    places = [bucket(b"seed", str(number)) for number in range(20_000)]
    assert sum(in_canary(place, 25) for place in places) == pytest.approx(5_000, rel=0.05)
    assert sum(is_protected(place, 5) for place in places) == pytest.approx(1_000, rel=0.12)
    assert not any(in_canary(place, 0) or is_protected(place, 0) for place in places)
    assert all(in_canary(place, 100) and is_protected(place, 100) for place in places)

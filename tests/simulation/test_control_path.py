"""The whole control path in simulated time: edits by people, and everything that goes wrong, in any order.

A failure prints the scenario, which can be pasted into a test of its own, and what happened. The fast run draws the
same scenarios every time. `make search` (`SIMULATION_EXAMPLES=5000` for a night) draws others each time, and makes what
it finds as small as it can: a search, and so no part of `make test`, which must say the same of the same tree.
"""

import os

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from support.simulation.reference import expected_end
from support.simulation.scenario import TENANTS, Burst, Edit, PlantPage, RestartEngine, Scenario, Tenants
from support.simulation.simulation import run
from support.simulation.strategies import scenarios

EXAMPLES = os.environ.get("SIMULATION_EXAMPLES")
FAST = settings(
    max_examples=30,
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
LONG = settings(
    max_examples=int(EXAMPLES or "1"),
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@FAST
@given(scenarios(most=14))
def test_every_invariant_holds_whatever_happens(scenario: Scenario) -> None:
    run(scenario, expected_end(scenario.final)).check()


@pytest.mark.slow
@pytest.mark.skipif(EXAMPLES is None, reason="a search, see make search")
@LONG
@given(scenarios(most=14))
def test_every_invariant_holds_in_a_long_search(scenario: Scenario) -> None:
    run(scenario, expected_end(scenario.final)).check()


@settings(FAST, max_examples=5)
@given(scenarios())
def test_without_disturbances_all_edits_lead_to_what_the_last_one_says(scenario: Scenario) -> None:
    run(scenario.undisturbed(), expected_end(scenario.final)).check()


@pytest.mark.slow
@settings(FAST, max_examples=3)
@given(scenarios())
def test_a_run_is_a_function_of_its_scenario(scenario: Scenario) -> None:
    first, second = (run(scenario, calm=10.0) for _ in range(2))
    assert first.trace.lines == second.trace.lines
    assert first.seen == second.seen


def rollout(after: float = 2.0, **changes: object) -> Edit:
    return Edit(tuple((f"rollout.{name}", value) for name, value in changes.items()), after=after)


TOUR = Scenario(
    seed=7,
    actions=(
        Burst(30),
        rollout(stage="Cold"),
        rollout(stage="Shadow"),
        Burst(10),
        rollout(stage="Canary"),
        Burst(30),
        Edit((("scopes.private.quotaPercent", 5), ("scopes.private.maxAgeSeconds", 2))),
        rollout(stage="Full", protectedPercent=40),
        Burst(30),
        Tenants(("acme",), after=2.0),
        Tenants(TENANTS, after=3.0),
        Burst(30, after=1.5),
        rollout(killSwitch="Engaged", after=0.1),
        Burst(10, after=1.0),
        rollout(killSwitch="Released"),
        Edit((("cache.capacity", "512Ki"), ("rollout.stage", "Shadow")), after=1.0),
        Edit((("cache.capacity", "1Mi"), ("rollout.stage", "Full")), after=2.0),
        Burst(30),
        RestartEngine(0, 0.5, after=0.15),
        Burst(10, after=3.0),
        PlantPage(1),
        Burst(30),
        Burst(10, after=12.0),
    ),
    final=rollout(stage="Full", killSwitch="Released", protectedPercent=10, attempt=9),
)


def test_a_tour_meets_everything_that_the_invariants_are_about() -> None:
    """The control of every invariant: what it forbids could have happened here."""
    result = run(TOUR, calm=20.0)
    result.check()
    decisions = ("Reuse", "KillSwitch", "NoTenant", "ColdStage", "Protected", "ShadowStage", "NotInCohort")
    wanted = (
        *(f"decision {reason}" for reason in decisions),
        *("match", "prediction", "preemption", "violation"),
        *("eviction Expired", "eviction OverQuota", "eviction Capacity"),
        *("answer complete", "answer broken", "answer refused", "answer left"),
        *("ColdPath Unknown", "ColdPath True", "Accepted False", "Promoted True", "Degraded True"),
    )
    assert [one for one in wanted if not result.seen[one]] == []

"""The whole control path in simulated time: edits by people, and everything that goes wrong, in any order.

A failure prints the scenario, which can be pasted into a test of its own, and what happened. The fast run draws the
same scenarios every time; the long one (`pytest -m slow tests/simulation`) draws others each time, and makes what it
finds as small as it can.
"""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from support.simulation.reference import expected_end
from support.simulation.scenario import Scenario
from support.simulation.simulation import run
from support.simulation.strategies import scenarios

FAST = settings(
    max_examples=25,
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
LONG = settings(max_examples=1500, database=None, deadline=None, suppress_health_check=list(HealthCheck))


def play(scenario: Scenario) -> None:
    run(scenario, expected_end(scenario.final)).check()


@FAST
@given(scenarios())
def test_every_invariant_holds_whatever_happens(scenario: Scenario) -> None:
    play(scenario)


@pytest.mark.slow
@LONG
@given(scenarios(most=14))
def test_every_invariant_holds_in_a_long_search(scenario: Scenario) -> None:
    play(scenario)


@settings(FAST, max_examples=5)
@given(scenarios())
def test_without_disturbances_all_edits_lead_to_what_the_last_one_says(scenario: Scenario) -> None:
    play(scenario.undisturbed())


@settings(FAST, max_examples=3)
@given(scenarios())
def test_a_run_is_a_function_of_its_scenario(scenario: Scenario) -> None:
    first, second = (run(scenario, calm=10.0) for _ in range(2))
    assert first.trace.lines == second.trace.lines
    assert first.answers == second.answers

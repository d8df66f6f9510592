"""Faults that the simulation must find. A search that passes with one of them planted would prove nothing."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
from hypothesis import HealthCheck, Phase, find, settings
from support.simulation import faults
from support.simulation.reference import expected_end
from support.simulation.scenario import Scenario
from support.simulation.simulation import Result, run
from support.simulation.strategies import scenarios

SEARCH = settings(
    max_examples=60,
    database=None,
    deadline=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
TRAFFIC_SECONDS = 20.0  # after the last action, where an end isn't waited for

Fault = Callable[[], AbstractContextManager[None]]


def play(scenario: Scenario, to_the_end: bool) -> Result:
    """To where everything has settled, or only a little beyond the last edit: quicker, and enough for most faults."""
    if to_the_end:
        return run(scenario, expected_end(scenario.final))
    return run(scenario, calm=TRAFFIC_SECONDS)


@pytest.mark.parametrize(
    ("fault", "kinds", "to_the_end", "invariant"),
    [
        pytest.param(
            faults.skipped_epoch_check,
            ("Burst", "Switch", "Stage"),
            False,
            "no match under another epoch",
            id="the engine skips its epoch check",
        ),
        pytest.param(
            faults.lost_watch_never_relisted,
            ("LoseWatch", "Stage"),
            True,
            "the end is that of the undisturbed run",
            id="a watch that was lost is never begun again",
        ),
        pytest.param(
            faults.salt_left_out_of_the_key,
            ("Stage",),
            False,
            "no scope violation without a planted page",
            id="the salt is left out of the page keys",
        ),
        pytest.param(
            faults.salt_and_scope_left_out,
            ("Stage",),
            False,
            "no match across scopes",
            id="the salt is left out, and pages don't say whose they are",
        ),
        pytest.param(
            faults.publish_before_compute,
            ("Burst", "Edit"),
            False,
            "every answer is what a cold run gives",
            id="pages are published before they are computed",
        ),
        pytest.param(
            faults.latch_not_persisted,
            ("HoldCold", "RestartSidecar"),
            False,
            "no latch is lost",
            id="the latch is not persisted",
        ),
        pytest.param(
            faults.kill_switch_of_the_document,
            ("CrashOperator", "Switch"),
            False,
            "an undisturbed pod follows a loss of permission in a second",
            id="the kill switch is read from the document",
        ),
    ],
)
def test_the_simulation_finds_that(fault: Fault, kinds: tuple[str, ...], to_the_end: bool, invariant: str) -> None:
    def found(scenario: Scenario) -> bool:
        with fault():
            broken = play(scenario, to_the_end).broken
        return any(one.startswith(f"{invariant}:") for one in broken)

    scenario = find(scenarios(8, kinds), found, settings=SEARCH, random=random.Random(0))
    # The same scenario holds without the fault: it is the fault that was found.
    play(scenario, to_the_end).check()

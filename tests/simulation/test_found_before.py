"""What the search has found once, as small as it could be made, over a few seeds each."""

from support.simulation.scenario import Action, Burst, CrashOperator, Edit, PlantPage, RestartSidecar, Scenario, SlowApi
from support.simulation.simulation import run

LAST = Edit((("rollout.killSwitch", "Released"), ("rollout.attempt", 2)))
SEEDS = range(8)


def play(actions: tuple[Action, ...]) -> None:
    for seed in SEEDS:
        run(Scenario(seed, actions, LAST), calm=5.0).check()


def test_a_sidecar_that_restarts_under_an_engaged_switch_stays_cold_while_the_operator_is_down() -> None:
    """The document still says Released, and may be listed before the resource, which says Engaged."""
    play(
        (
            Burst(30, after=1.0),
            CrashOperator(20.0, after=0.5),
            Edit((("rollout.killSwitch", "Engaged"),), after=0.5),
            SlowApi(0, 5.0, 20.0, after=1.0),
            RestartSidecar(0, 0.5, after=0.3),
            Burst(10, after=2.5),
            Burst(10, after=1.0),
            Burst(10, after=1.0),
        )
    )


def test_a_scope_violation_latches_the_pod_even_if_its_sidecar_dies_before_it_hears_of_it() -> None:
    play(
        (
            Burst(30, after=1.0),
            PlantPage(0, after=0.5),
            Burst(10, after=0.0),
            RestartSidecar(0, 0.5, after=0.05),
            Burst(10, after=2.0),
        )
    )


def test_a_scope_violation_latches_the_pod_even_if_an_edit_raises_the_epoch_before_its_sidecar_hears_of_it() -> None:
    play(
        (
            Burst(30, after=1.0),
            PlantPage(0, after=0.5),
            Burst(10, after=0.0),
            Edit((("rollout.protectedPercent", 20),), after=0.05),
            Burst(20, after=0.05),
        )
    )

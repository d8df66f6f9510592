"""How many threads to compute with."""

import os

import pytest
from kvsteward_engine.cpus import usable_cpus, within_limit


@pytest.mark.parametrize(
    ("cpus", "cpu_max", "expected"),
    [
        pytest.param(8, "max 100000\n", 8, id="no limit"),
        pytest.param(8, "200000 100000\n", 2, id="two CPUs"),
        pytest.param(8, "150000 100000", 2, id="one and a half"),
        pytest.param(8, "50000 100000", 1, id="half a CPU"),
        pytest.param(2, "400000 100000", 2, id="a limit above what is there"),
        pytest.param(4, "", 4, id="an empty file"),
        pytest.param(4, "100000 0", 4, id="no period"),
    ],
)
def test_a_limit_is_kept_to(cpus: int, cpu_max: str, expected: int) -> None:
    assert within_limit(cpus, cpu_max) == expected


def test_the_affinity_of_the_process_counts() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cpus() == 1
    finally:
        os.sched_setaffinity(0, before)

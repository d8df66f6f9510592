"""How many CPUs this process may use. Torch counts the machine's, and in a pod with a limit that means threads that
wait for each other's turn."""

import os
from pathlib import Path

_CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # cgroup v2, as seen from inside a container


def usable_cpus() -> int:
    """By affinity and cgroup limit; at least 1."""
    try:
        limit = _CGROUP_LIMIT.read_text()
    except OSError:
        limit = "max"
    return within_limit(len(os.sched_getaffinity(0)), limit)


def within_limit(cpus: int, cpu_max: str) -> int:
    """`cpu_max` is cgroup v2's cpu.max: microseconds allowed (or "max") a period, and the period. A part of a CPU
    counts as a whole one."""
    allowed, _, period = cpu_max.strip().partition(" ")
    if not (allowed.isdigit() and period.isdigit() and int(period)):
        return max(1, cpus)
    return max(1, min(cpus, -(-int(allowed) // int(period))))


def wait_without_spinning() -> None:
    """Let OpenMP's threads sleep while they wait for each other. Spinning ones keep the thread they wait for off the
    CPU when anything else wants it too (measured on a busy machine with two CPUs: a token took five times as long).
    Only before torch is imported; an OMP_WAIT_POLICY in the environment stays."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

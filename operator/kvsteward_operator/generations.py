"""Which generations there are and which one serves. A generation is the pods of one identity."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvsteward_contract import wire
from kvsteward_contract.status import GenerationStatus

from .api import Object
from .world import Pod


class State(str, Enum):
    """Where a generation is in its life; when its last pod has gone it leaves the status."""

    STARTING = "Starting"  # wanted, but has not yet had all its wanted replicas available
    SERVING = "Serving"  # the newest that once had them all; at most one
    DRAINING = "Draining"  # not wanted any more, or overtaken by another; its pods are going


@dataclass(frozen=True, slots=True)
class Generation:
    name: str
    state: State
    pods: tuple[Pod, ...]

    @property
    def available(self) -> int:
        return sum(pod.available for pod in self.pods)


def generations(
    prior: Sequence[GenerationStatus],
    target: str,
    pods: Iterable[Pod],
    replica_sets: Iterable[Object],
    wanted: int,
) -> tuple[Generation, ...]:
    """Oldest first, the target last. `prior` is the stored status, `wanted` the replicas of the target."""
    by_name: dict[str, list[Pod]] = {}
    for pod in pods:
        by_name.setdefault(pod.generation, []).append(pod)
    alive = set(by_name) | {
        (body["metadata"].get("labels") or {}).get(wire.GENERATION_LABEL, "")
        for body in replica_sets
        if (body.get("spec") or {}).get("replicas", 1) > 0
    }
    before = {one.name: one.state for one in prior}
    target_pods = tuple(by_name.get(target, ()))
    complete = sum(pod.available for pod in target_pods) >= wanted
    # A target that was overtaken by an edit and is wanted again must not count as serving for what it once was, unless
    # nothing has taken over from it since.
    serves = before.get(target) == State.SERVING or complete
    found = []
    for name in [*before, *sorted(alive - before.keys() - {"", target})]:
        if name == target:
            continue
        keeps = before.get(name) == State.SERVING and not serves
        if name in alive or keeps:
            state = State.SERVING if keeps else State.DRAINING
            found.append(Generation(name, state, tuple(by_name.get(name, ()))))
    return (*found, Generation(target, State.SERVING if serves else State.STARTING, target_pods))


def serving(found: Iterable[Generation]) -> Generation | None:
    """The one that serves, if any ever did."""
    return next((one for one in found if one.state is State.SERVING), None)

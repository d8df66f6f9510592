"""What a simulation is told to do, as data: edits by people, and what goes wrong. Printed, it fits into a test.

Pods are chosen by a number, taken modulo how many there are at that moment. `after` seconds pass before each action.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

TENANTS = ("acme", "globex", "initech")
WORKLOADS = ("summaries", "checkout")
REVISIONS = ("r1", "r2")
OPERATOR = -1  # as a party: the operator instead of a pod


@dataclass(frozen=True, slots=True)
class Action:
    """`disturbs`: it is something that goes wrong, and not what somebody wants."""

    after: float = field(default=0.5, kw_only=True)

    @property
    def disturbs(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Edit(Action):
    """kubectl: sets fields of the spec, named by their paths. Some values are rejected by the operator only."""

    changes: tuple[tuple[str, Any], ...]

    @property
    def disturbs(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class HoldCold(Action):
    """POST /v1/cold to a pod."""

    pod: int

    @property
    def disturbs(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class ReleaseCold(Action):
    """DELETE /v1/cold at a pod."""

    pod: int

    @property
    def disturbs(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Tenants(Action):
    """The Secret with the API keys now holds those of these tenants."""

    present: tuple[str, ...]

    @property
    def disturbs(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Burst(Action):
    """So many requests at once: more than run at the same time, so that queues form and running ones are preempted."""

    requests: int

    @property
    def disturbs(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class CrashOperator(Action):
    """kill -9; the next one starts `down` seconds later. With `writes`, it dies right after its so many'th write from
    now: stored by the API server, and not known to the operator."""

    down: float
    writes: int = 0


@dataclass(frozen=True, slots=True)
class RestartSidecar(Action):
    pod: int
    down: float


@dataclass(frozen=True, slots=True)
class RestartEngine(Action):
    pod: int
    down: float


@dataclass(frozen=True, slots=True)
class DeletePod(Action):
    pod: int


@dataclass(frozen=True, slots=True)
class CutApi(Action):
    """A party and the API server can't reach each other for a while; watches under way hear nothing more, ever."""

    party: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SlowApi(Action):
    """Answers and events are late by up to `delay`, each stream in its order, but the streams not among each other."""

    party: int
    delay: float
    seconds: float


@dataclass(frozen=True, slots=True)
class LoseWatch(Action):
    """One watch of a party goes silent without an end. `about` is the kind watched."""

    party: int
    about: str


@dataclass(frozen=True, slots=True)
class EndWatches(Action):
    """The API server restarts: every watch ends, `expired` with 410, and history is forgotten."""

    expired: bool


@dataclass(frozen=True, slots=True)
class CutScrapes(Action):
    """The operator can't reach a pod's admin port for a while."""

    pod: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Meddle(Action):
    """Somebody changes or deletes what the operator made."""

    what: str


@dataclass(frozen=True, slots=True)
class PlantPage(Action):
    """A page of one tenant turns up under the key of another tenant's text, as by a fault of the engine."""

    pod: int


MEDDLINGS = (
    "annotate the policy",
    "scale the Deployment",
    "raise the document",
    "delete the document",
    "delete the Role",
    "delete the Service",
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """`final` is the edit made after all else, when everything is whole again: where it all must end up."""

    seed: int
    actions: tuple[Action, ...]
    final: Edit

    def undisturbed(self) -> Scenario:
        """The same without anything that goes wrong."""
        return replace(self, actions=tuple(action for action in self.actions if not action.disturbs))

    def __str__(self) -> str:
        lines = "".join(f"        {action!r},\n" for action in self.actions)
        return f"Scenario(\n    seed={self.seed},\n    actions=(\n{lines}    ),\n    final={self.final!r},\n)"


def initial_spec() -> dict[str, Any]:
    """The policy as it is first applied: two pods whose pools hold 42 pages of 4 tokens."""
    return {
        "engine": {
            "replicas": 2,
            "maxConcurrent": 12,
            "model": {
                "name": "tiny",
                "revision": REVISIONS[0],
                "tokenizerRevision": "t1",
                "source": {"persistentVolumeClaim": {"claimName": "models", "path": "tiny"}},
                "maxTokens": 96,
            },
        },
        "cache": {"capacity": "1Mi", "blockTokens": 4},
        "scopes": {
            "identity": {"source": "APIKey", "secret": "tenant-keys"},
            "private": {"quotaPercent": 50, "maxAgeSeconds": 60},
            "overrides": [{"tenant": "globex", "quotaPercent": 20}],
        },
        "workloads": [{"name": name} for name in WORKLOADS],
        "rollout": {"stage": "Full", "protectedPercent": 10, "canary": {"percent": 50}},
        "rollover": {"drainSeconds": 10},
    }


def set_path(spec: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        spec = spec.setdefault(parent, {})
    if value is None:
        spec.pop(last, None)
    else:
        spec[last] = value

"""All that a decision may look at, as frozen values: one policy, its objects, its pods and what they reported."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from kvsteward_contract import wire
from kvsteward_contract.observation import Observation
from kvsteward_contract.policy import Refusal
from kvsteward_contract.status import Evidence, PolicyStatus

from .api import Object
from .index import Place
from .kinds import DEPLOYMENT, POD, REPLICA_SET
from .objects.naming import CONTAINER_ENGINE, Owner, controller_of
from .settings import Settings


@dataclass(frozen=True, slots=True)
class Report:
    """What scraping one pod has brought: the last observation, and how the last attempts went."""

    observation: Observation | None = None
    failures: int = 0  # attempts in a row without an answer
    problem: str = ""  # why the last attempt failed; "" after a good one
    refused: bool = False  # the sidecar did not take our token


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod whose owners end in the policy's Deployment."""

    name: str
    uid: str
    ip: str
    generation: str
    ready: bool
    terminating: bool
    engine_running: bool
    unschedulable: str  # the scheduler's words, "" when it has a node
    report: Report = Report()

    @property
    def observation(self) -> Observation | None:
        return self.report.observation

    @property
    def available(self) -> bool:
        return self.ready and not self.terminating


@dataclass(frozen=True, slots=True)
class World:
    """`settled`: objects as they were right after we applied them, so that one whose fields the API server (or a
    webhook) writes in another way is not applied for ever. `objections`: what the API server said against this spec."""

    policy: Object
    children: tuple[Object, ...]
    settings: Settings
    reports: Mapping[str, Report] = field(default_factory=dict)  # by pod uid
    settled: Mapping[Place, tuple[str, str]] = field(default_factory=dict)  # resourceVersion, digest applied
    objections: tuple[Refusal, ...] = ()
    trouble: str = ""  # why the last pass could not put everything in place
    evidence: Evidence | None = None  # of a window that has just ended

    @property
    def owner(self) -> Owner:
        metadata = self.policy["metadata"]
        return Owner(metadata["namespace"], metadata["name"], metadata["uid"])

    @property
    def resource_generation(self) -> int:
        """metadata.generation: grows with every change of the spec."""
        return int(self.policy["metadata"].get("generation") or 0)

    @property
    def status(self) -> PolicyStatus:
        """The status as it is stored; an empty one if it is absent or not ours to read."""
        try:
            return msgspec.convert(self.policy.get("status") or {}, PolicyStatus)
        except msgspec.ValidationError:
            return PolicyStatus()

    def of_kind(self, kind: str) -> list[Object]:
        return [body for body in self.children if body["kind"] == kind]

    def owned(self, kind: str) -> list[Object]:
        return [body for body in self.of_kind(kind) if controller_of(body).get("uid") == self.owner.uid]

    def child(self, kind: str, name: str) -> Object | None:
        return next((body for body in self.of_kind(kind) if body["metadata"]["name"] == name), None)

    def replica_sets(self) -> list[Object]:
        deployments = {body["metadata"]["uid"] for body in self.owned(DEPLOYMENT.name)}
        return [body for body in self.of_kind(REPLICA_SET.name) if controller_of(body).get("uid") in deployments]

    def pods(self) -> tuple[Pod, ...]:
        """Pods that are or may yet be running, and whose owners end in our Deployment: a label alone proves nothing."""
        owners = {body["metadata"]["uid"] for body in self.replica_sets()}
        return tuple(
            _pod(body, self.reports)
            for body in self.of_kind(POD.name)
            if controller_of(body).get("uid") in owners
            and (body.get("status") or {}).get("phase") not in ("Succeeded", "Failed")
        )


def _pod(body: Object, reports: Mapping[str, Report]) -> Pod:
    metadata, status = body["metadata"], body.get("status") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    scheduled = conditions.get("PodScheduled", {})
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        ip=status.get("podIP") or "",
        generation=(metadata.get("labels") or {}).get(wire.GENERATION_LABEL, ""),
        ready=conditions.get("Ready", {}).get("status") == "True",
        terminating="deletionTimestamp" in metadata,
        engine_running=_runs(status.get("containerStatuses") or (), CONTAINER_ENGINE),
        unschedulable=scheduled.get("message", "") if scheduled.get("reason") == "Unschedulable" else "",
        report=reports.get(metadata["uid"], Report()),
    )


def _runs(containers: Iterable[Mapping[str, Any]], name: str) -> bool:
    return any(container["name"] == name and "running" in (container.get("state") or {}) for container in containers)

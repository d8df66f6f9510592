"""The invariants: who looks on from outside, with knowledge that no part of the system has.

Nothing here calls the product's decisions. What is allowed is worked out anew, from the objects as they were stored and
from who sent which request.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec
from kvsteward_contract import wire
from kvsteward_contract.directive import Mode
from kvsteward_contract.document import PolicyDocument, UnknownDocument, decode_document, version_of
from kvsteward_contract.policy import KillSwitch, PolicySpec, Stage, decode_spec, semantic_refusals
from kvsteward_contract.status import PolicyStatus
from kvsteward_operator.events import tellings
from kvsteward_operator.objects.naming import Owner
from kvsteward_sidecar.ticket import Ticket

from .api_server import ApiServer, Change
from .clients import Answer
from .clock import SimulatedLoop
from .engine_process import Match
from .pod import Asked, Pod
from .trace import Trace

SWITCH_SECONDS = 1.0  # from an edit to the last new match, where nothing was disturbed


@dataclass(frozen=True, slots=True)
class Version:
    """The resource as it was stored from `time` on. `engaged` and `stage` are what must be in force at most: what is
    asked for of an acceptable spec; of a rejected one only what takes permission away."""

    time: float
    generation: int
    spec: PolicySpec
    acceptable: bool
    engaged: bool
    stage: Stage

    @property
    def permits(self) -> bool:
        return not self.engaged and self.stage.rank >= Stage.CANARY.rank


class Observer:
    """Listens to the API server, to engines, to sidecars' admissions and to clients."""

    def __init__(self, loop: SimulatedLoop, trace: Trace, api: ApiServer, policy: str, namespace: str) -> None:
        self._loop, self._trace, self._policy, self._namespace = loop, trace, policy, namespace
        self.versions: list[Version] = []
        self.documents: set[str] = set()  # versions of every document that was ever stored
        self.meddling = False  # a person, not the operator, changes what the operator made
        self.seen: Counter[str] = Counter()  # what a search wants to have met
        self.cold_since: float | None = None  # ColdPath is True in the status
        self.latched: dict[str, int] = {}  # pod -> attempt under which it was latched
        self._held_at: dict[str, float] = {}  # pod -> when somebody held it cold
        self._by_violation: set[str] = set()  # latched pods whose sidecars may not know it yet
        self._stopped_since: dict[str, float] = {}  # pod -> when its engine confirmed that reuse is over
        self._status: PolicyStatus | None = None
        self._accepted_generation = 0  # the newest that a stored status calls accepted
        self._wholesome_since: dict[str, float] = {}  # pod -> from when on nothing was wrong with its watches
        self._planted: set[str] = set()  # engine instances with a planted page
        self._asked: dict[str, tuple[Pod, Asked, Ticket]] = {}
        self._owed: dict[str, str] = {}  # name of an event that must exist at the end -> its reason
        self._api = api
        api.listeners.append(self._changed)

    # ---- told by the simulation

    def disturbed(self, pod: str, until: float) -> None:
        """Before `until` a pod may act on old news."""
        self._wholesome_since[pod] = max(until, self._wholesome_since.get(pod, 0.0))

    def held(self, pod: Pod) -> None:
        """POST /v1/cold was taken."""
        self._held_at[pod.name] = self._loop.time()
        self._by_violation.discard(pod.name)
        self._hold(pod)

    def released(self, pod: Pod) -> None:
        """DELETE /v1/cold was taken, or a higher attempt has come."""
        self.latched.pop(pod.name, None)
        self._by_violation.discard(pod.name)

    def _hold(self, pod: Pod) -> None:
        """The latch holds until an attempt above the one that the pod knew of, or, if it has no sidecar just now, above
        the one that its next sidecar will meet."""
        document = pod.sidecar.control.policy.document if pod.sidecar else None
        newest = next(one for one in reversed(self.versions) if one.acceptable)
        self.latched[pod.name] = (document or newest.spec).rollout.attempt

    def plant(self, pod: Pod) -> None:
        """What is resident says from now on that it is somebody else's."""
        if pod.engine is not None:
            self._planted.add(pod.engine.engine.state().instance)
            for record in pod.engine.engine.residency.pages._index.values():
                record.scope = "Private/somebody else"

    def unplant(self, pod: Pod) -> None:
        if pod.engine is not None:
            for record in pod.engine.engine.residency.pages._index.values():
                record.scope = record.account.scope

    def violated(self, pod: Pod) -> None:
        """The engine met a page of another scope: from now on nothing may match in this pod. Its sidecar hears of it
        with the request's outcome, and decides Cold from then on."""
        self._trace.note(pod.name, "scope violation")
        if pod.name not in self.latched:
            self._by_violation.add(pod.name)
            self._hold(pod)

    def confirmed(self, pod: Pod) -> None:
        """A pod's engine has put what its sidecar wants in force."""
        if pod.sidecar is None or self.versions[-1].permits:
            return
        permission = pod.sidecar.control.permission
        if permission.known and (permission.kill_switch or permission.stage.rank < Stage.CANARY.rank):
            self._stopped_since.setdefault(pod.name, self._loop.time())

    def release_confirmed(self, pod: Pod) -> None:
        self.latched.pop(pod.name, None)

    # ---- the API server's objects

    def _changed(self, change: Change) -> None:
        if change.kind == wire.KIND and change.type != "DELETED":
            body = msgspec.json.decode(change.data)
            self._resource(body)
            if body.get("status"):
                self._stored_status(msgspec.convert(body["status"], PolicyStatus), body)
        elif change.kind == "ConfigMap" and change.type != "DELETED":
            self._document(msgspec.json.decode(change.data))

    def _resource(self, body: dict[str, Any]) -> None:
        generation = body["metadata"]["generation"]
        if self.versions and self.versions[-1].generation == generation:
            return
        spec = decode_spec(body["spec"])
        before = self.versions[-1] if self.versions else None
        acceptable = not semantic_refusals(spec)
        engaged, stage = spec.rollout.kill_switch is KillSwitch.ENGAGED, spec.rollout.stage
        if not acceptable:
            engaged = engaged or before is None or before.engaged
            stage = stage if before is None else min(stage, before.stage, key=lambda one: one.rank)
        self.versions.append(Version(self._loop.time(), generation, spec, acceptable, engaged, stage))
        if not engaged:
            self.cold_since = None
        if self.versions[-1].permits:
            self._stopped_since.clear()

    def _document(self, body: dict[str, Any]) -> None:
        text = (body.get("data") or {}).get(wire.DOCUMENT_KEY, "")
        self.documents.add(version_of(text.encode()))
        if self.meddling:
            return
        try:
            document = decode_document(text)
        except UnknownDocument as error:
            self._trace.breaks("documents can be read", f"{body['metadata']['name']}: {error}")
            return
        # Whatever a document allows, some spec must have asked for, and none older than the last one known accepted.
        candidates = [v for v in self.versions if v.acceptable and v.generation >= self._accepted_generation]
        if not any(_within(document, version.spec) for version in candidates):
            self._trace.breaks(
                "no document allows more than a resource asked for",
                f"{body['metadata']['name']} allows {document.rollout}, accepted is {self._accepted_generation}",
            )

    def _stored_status(self, status: PolicyStatus, body: dict[str, Any]) -> None:
        before, self._status = self._status, status
        if status == before:
            return
        conditions = {one.type: one for one in status.conditions}
        accepted, cold = (conditions[name].status == "True" for name in ("Accepted", "ColdPath"))
        seen = next((one for one in self.versions if one.generation == status.observed_generation), None)
        if seen is not None and seen.acceptable is not accepted:
            self._trace.breaks("acceptable specs are accepted, and no others", conditions["Accepted"].message)
        if accepted:
            self._accepted_generation = max(self._accepted_generation, status.observed_generation)
        if cold and self.cold_since is None and self.versions[-1].engaged:
            self.cold_since = self._loop.time()
        self._history(before, status)
        for one in status.conditions:
            self.seen[f"{one.type} {one.status}"] += 1
        metadata = body["metadata"]
        owner = Owner(metadata["namespace"], metadata["name"], metadata["uid"])
        for telling in tellings(owner, status, self._loop.unix()):
            self._owed.setdefault(telling.name, telling.reason)

    def _history(self, before: PolicyStatus | None, after: PolicyStatus) -> None:
        """Nothing is skipped, rewritten or forgotten: entries go on where the stored ones ended."""
        old = before.history if before is not None else ()
        last = old[-1].sequence if old else 0
        fresh = [entry for entry in after.history if entry.sequence > last]
        if [entry.sequence for entry in fresh] != list(range(last + 1, last + 1 + len(fresh))):
            self._trace.breaks("history goes on without a gap", f"{old} then {after.history}")
        if any(entry not in old for entry in after.history if entry.sequence <= last):
            self._trace.breaks("history is never rewritten", f"{old} then {after.history}")
        stage = (before.stage if before is not None else None) or Stage.COLD
        for entry in fresh:
            if entry.from_ != stage.value:
                self._trace.breaks("no stage is skipped in history", f"{entry} after {stage.value}")
        if after.stage is not None and stage is not after.stage and not any(e.to == after.stage.value for e in fresh):
            self._trace.breaks("no stage is skipped in history", f"{stage} to {after.stage} without an entry")

    # ---- requests

    def admitted(self, pod: Pod, ticket: Ticket, asked: Asked) -> None:
        self._asked[ticket.request] = (pod, asked, ticket)
        self.seen[f"decision {ticket.decision.reason.value}"] += 1
        if ticket.decision.mode is not Mode.REUSE:
            return
        sidecar = pod.sidecar
        if sidecar is None:
            return
        policy = sidecar.control.policy
        document, resource, bucket = policy.document, policy.resource, ticket.arrival.bucket
        if document is None or policy.version not in self.documents:
            self._trace.breaks("no reuse without a document", f"{pod.name} follows {policy.version!r}")
            return
        rollout = document.rollout
        stage = rollout.stage if resource is None else min(rollout.stage, resource.stage, key=lambda one: one.rank)
        engaged = rollout.kill_switch if resource is None else resource.kill_switch
        in_canary = bucket < 100 * rollout.canary.percent and (
            not rollout.canary.workloads or asked.workload in rollout.canary.workloads
        )
        problems = {
            "the kill switch is engaged": engaged is KillSwitch.ENGAGED,
            f"the stage is {stage.value}": stage.rank < Stage.CANARY.rank,
            "the session is not in the canary": stage is Stage.CANARY and not in_canary,
            "the session is protected": bucket >= 10_000 - 100 * rollout.protected_percent,
        }
        for problem, found in problems.items():
            if found:
                self._trace.breaks("no more reuse than document and resource allow", f"{pod.name}: {problem}")
        if pod.name not in self._by_violation:
            self._check_latch(pod, "decided Reuse")

    def matched(self, match: Match) -> None:
        self.seen["match"] += 1
        directive, now = match.sequence.directive, match.time
        asker = self._asked.get(match.use.request)
        if directive is None or asker is None:
            self._trace.breaks("no match without a directive", f"on {match.pod}: {match.use}")
            return
        pod, asked, _ = asker
        self._trace.note(match.pod, f"{asked.tenant} reuses {match.use.tokens} tokens")
        for writer in match.use.writers:
            if not writer:
                self._trace.breaks("no page is read before it was written", f"on {match.pod}: {match.use}")
            elif (owner := self._asked[writer][1].tenant) != asked.tenant:
                self._trace.breaks("no match across scopes", f"on {match.pod}: {asked.tenant} reads {owner}'s pages")
        if directive.epoch != match.engine_epoch:
            self._trace.breaks(
                "no match under another epoch",
                f"on {match.pod}: {directive.epoch} while the engine is at {match.engine_epoch}",
            )
        if self.cold_since is not None and now > self.cold_since:
            self._trace.breaks(
                "no match after a confirmed switch", f"on {match.pod}, ColdPath is True since {self.cold_since:.3f}"
            )
        if (stopped := self._stopped_since.get(match.pod)) is not None and now > stopped:
            self._trace.breaks(
                "no match after a pod confirmed the loss of its permission", f"{match.pod} had, at {stopped:.3f}"
            )
        if now > self._held_at.get(match.pod, -1.0):  # a match is planned before its step runs, and heard of only then
            self._check_latch(pod, "matched")
        if now > self._wholesome_since.get(match.pod, 0.0) and not self._permitted(now - SWITCH_SECONDS, now):
            self._trace.breaks(
                "an undisturbed pod follows a loss of permission in a second",
                f"{match.pod} matches, the resource says {self.versions[-1].stage.value}"
                f"{' and Engaged' if self.versions[-1].engaged else ''} since {self.versions[-1].time:.3f}",
            )

    def _permitted(self, start: float, end: float) -> bool:
        """Whether at some moment from `start` to `end` the resource permitted reuse."""
        for version, following in zip(self.versions, [*self.versions[1:], None], strict=True):
            over = following.time if following is not None else end
            if version.permits and version.time <= end and over >= start:
                return True
        return False

    def _check_latch(self, pod: Pod, did: str) -> None:
        if pod.name not in self.latched or pod.sidecar is None:
            return
        document = pod.sidecar.control.policy.document
        if document is not None and document.rollout.attempt > self.latched[pod.name]:
            del self.latched[pod.name]
            return
        self._trace.breaks("no latch is lost", f"{pod.name} {did} though it is latched")

    def answered(self, answer: Answer) -> None:
        self.seen[f"answer {answer.ending}"] += 1
        if fault := answer.fault():
            self._trace.breaks(
                "every answer is what a cold run gives",
                f"request {answer.number} of {answer.asked.tenant} on {answer.pod.name} {fault}",
            )

    # ---- at the end

    def audit(self, pod: Pod, idle: bool) -> None:
        """An engine's books are in order; `idle`: nothing runs, so nobody may hold a page."""
        engine = pod.engine
        if engine is None:
            return
        residency = engine.engine.residency
        self.seen["preemption"] += engine.engine.scheduler.preemptions
        self.seen["prediction"] += residency.predicted_tokens
        self.seen["violation"] += residency.scope_violations
        for reason, count in residency.pages.evictions.items():
            self.seen[f"eviction {reason.value}"] += count
        for found in engine.audit():
            self._trace.breaks("the page pool's books are in order", f"{pod.name}: {found}")
        pages = residency.pages
        if idle and any(pages.references(page) for page in range(pages.total)):
            self._trace.breaks("refcounts are zero at the end", pod.name)
        if idle and pages.free + pages.retained != pages.total:
            self._trace.breaks("refcounts are zero at the end", f"{pod.name}: {pages.total - pages.free} pages leaked")
        if residency.scope_violations and engine.engine.state().instance not in self._planted:
            self._trace.breaks("no scope violation without a planted page", pod.name)

    def events_told(self) -> None:
        """Every event that a stored status gave rise to exists; their names make each of them the only one."""
        there = {body["metadata"]["name"] for body in self._api.all("Event")}
        for name, reason in self._owed.items():
            if name not in there:
                self._trace.breaks("no event is lost", f"{reason} ({name})")


def _within(document: PolicyDocument, spec: PolicySpec) -> bool:
    """Whether a document allows no more than this spec asks for."""
    told, asked = document.rollout, spec.rollout
    canary, allowed = set(told.canary.workloads), set(asked.canary.workloads)
    return (
        told.stage.rank <= asked.stage.rank
        and told.canary.percent <= asked.canary.percent
        and (told.canary.percent == 0 or not allowed or (bool(canary) and canary <= allowed))
        and told.protected_percent >= asked.protected_percent
        and (asked.kill_switch is KillSwitch.RELEASED or told.kill_switch is KillSwitch.ENGAGED)
        and told.attempt <= asked.attempt
    )

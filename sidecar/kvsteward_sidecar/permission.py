"""What may be reused right now: one frozen `Permission` made from document, resource, latch and tenants.

Pure. The stage in force is the lower of the document's and the resource's, and the kill switch is engaged when either
says so: what takes permission away acts at once, while the operator is down or from a spec that nobody would accept;
what gives it back waits until the operator has accepted it into the document. Only these two fields are read from the
resource, but without it nothing is permitted: after a restart the document may come first, and while the operator is
down it says nothing of a switch that this pod has confirmed. `losses` says what a change takes away: any loss raises
the engine's epoch, so that requests decided before it can't match after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvsteward_contract.cohort import in_canary, is_protected
from kvsteward_contract.directive import Retention
from kvsteward_contract.document import PRIVATE_CLASS, PolicyDocument
from kvsteward_contract.identity import opaque_digest
from kvsteward_contract.policy import IdentitySource, KillSwitch, Stage, WhenMissing

from .latch import Latch

OTHER_WORKLOAD = "other"


@dataclass(frozen=True, slots=True)
class ResourceView:
    """The two fields of a KVCachePolicy that act at once, and whose it is."""

    uid: str
    kill_switch: KillSwitch
    stage: Stage
    generation: int = 0  # metadata.generation it was read from, 0 = none (a file)


@dataclass(frozen=True, slots=True)
class Permission:
    """One snapshot: a request reads it once. Compared as a value; `epoch` is the engine epoch it is valid under."""

    known: bool = False  # a document was seen, and the resource that it names
    version: str = ""  # of the document
    uid: str = ""
    namespace: str = ""
    generation: str = ""
    model: str = ""  # the name clients send
    stage: Stage = Stage.COLD  # in force
    kill_switch: bool = False
    latch: str = ""  # why this pod is held cold, "" = it isn't
    canary_percent: int = 0
    canary_workloads: frozenset[str] = frozenset()  # empty = all
    protected_percent: int = 0
    attempt: int = 0
    workloads: frozenset[str] = frozenset()
    identity: IdentitySource = IdentitySource.API_KEY
    when_missing: WhenMissing = WhenMissing.COLD
    retention: Mapping[str, Retention] = field(default_factory=dict)  # class name -> limits, for the engine
    overrides: Mapping[str, str] = field(default_factory=dict)  # tenant -> class name
    credentials: frozenset[str] = frozenset()  # opaque, one for each key of each tenant
    epoch: int = 0  # 0 = the engine hasn't been heard: nothing can match

    @property
    def stopped(self) -> bool:
        """No new match at all: the switch, or the latch."""
        return self.kill_switch or bool(self.latch)

    def workload(self, named: str) -> str:
        """The workload a request counts as."""
        return named if named in self.workloads else OTHER_WORKLOAD

    def in_cohort(self, bucket: int, workload: str) -> bool:
        """True in Canary's cohort: both its conditions hold."""
        return in_canary(bucket, self.canary_percent) and (
            not self.canary_workloads or workload in self.canary_workloads
        )

    def protects(self, bucket: int) -> bool:
        return is_protected(bucket, self.protected_percent)

    def retention_class(self, tenant: str) -> str:
        return self.overrides.get(tenant, PRIVATE_CLASS)


class UnreadableResource(ValueError):
    """killSwitch or stage of the resource can't be read; says which. Keep the last reading."""


def read_resource(resource: Mapping[str, Any]) -> ResourceView:
    """The two fields, absent ones at the CRD's defaults, whatever the rest of the spec holds.

    Raises UnreadableResource.
    """
    spec = resource.get("spec")
    rollout = spec.get("rollout") if isinstance(spec, Mapping) else None
    if rollout is None:
        rollout = {}
    if not isinstance(rollout, Mapping):
        raise UnreadableResource(f"spec.rollout is {type(rollout).__name__}, not an object")
    switch, stage = rollout.get("killSwitch", KillSwitch.RELEASED.value), rollout.get("stage", Stage.SHADOW.value)
    try:
        view_switch = KillSwitch(switch)
    except ValueError:
        raise UnreadableResource(f"spec.rollout.killSwitch is {switch!r}, not Released or Engaged") from None
    try:
        view_stage = Stage(stage)
    except ValueError:
        raise UnreadableResource(f"spec.rollout.stage is {stage!r}, not Cold, Shadow, Canary or Full") from None
    metadata = resource.get("metadata")
    known: Mapping[str, Any] = metadata if isinstance(metadata, Mapping) else {}
    generation = known.get("generation", 0)
    numbered = generation if isinstance(generation, int) else 0
    return ResourceView(str(known.get("uid", "")), view_switch, view_stage, numbered)


def permission_for(
    document: PolicyDocument | None,
    version: str,
    resource: ResourceView | None,
    latch: Latch | None,
    credentials: frozenset[str],
    tenant_key: bytes = b"",
) -> Permission:
    """The permission that these give, at epoch 0. `resource` counts only when the document names its uid.

    `tenant_key` makes the tenants' opaque digests, which name the overrides' retention classes.
    """
    held = latch.reason if latch is not None else ""
    if document is None:
        return Permission(latch=held, credentials=credentials)
    rollout = document.rollout
    known, stage, switch = False, Stage.COLD, rollout.kill_switch
    if resource is not None and resource.uid == document.policy.uid:
        known = True
        stage = min(rollout.stage, resource.stage, key=lambda one: one.rank)
        if resource.kill_switch is KillSwitch.ENGAGED:
            switch = KillSwitch.ENGAGED
    overrides = {
        override.tenant: f"{PRIVATE_CLASS}/{opaque_digest(tenant_key, override.tenant)}"
        for override in document.overrides
    }
    return Permission(
        known=known,
        version=version,
        uid=document.policy.uid,
        namespace=document.policy.namespace,
        generation=document.generation,
        model=document.model.name,
        stage=stage,
        kill_switch=switch is KillSwitch.ENGAGED,
        latch=held,
        canary_percent=rollout.canary.percent,
        canary_workloads=frozenset(rollout.canary.workloads),
        protected_percent=rollout.protected_percent,
        attempt=rollout.attempt,
        workloads=frozenset(document.workloads),
        identity=document.identity.source,
        when_missing=document.identity.when_missing,
        retention={
            PRIVATE_CLASS: document.private,
            **{overrides[override.tenant]: override.retention for override in document.overrides},
        },
        overrides=overrides,
        credentials=credentials,
    )


def losses(old: Permission, new: Permission) -> tuple[str, ...]:
    """What `old` allowed and `new` doesn't, one word each; empty when nothing was lost."""
    lost = []
    if new.kill_switch and not old.kill_switch:
        lost.append("killSwitch")
    if new.latch and not old.latch:
        lost.append("latch")
    if not old.known:
        return tuple(lost)  # nothing else was allowed
    if not new.known:
        lost.append("document")
    if new.stage.rank < old.stage.rank:
        lost.append("stage")
    if new.canary_percent < old.canary_percent or _narrower(old.canary_workloads, new.canary_workloads):
        lost.append("canary")
    if new.protected_percent > old.protected_percent:
        lost.append("protectedPercent")
    if (new.uid, new.namespace) != (old.uid, old.namespace):
        lost.append("policy")  # every scope's salt is another one
    if new.identity is not old.identity:
        lost.append("identity")
    if not old.credentials <= new.credentials:
        lost.append("credentials")
    if not old.workloads <= new.workloads:
        lost.append("workloads")
    return tuple(lost)


def _narrower(old: frozenset[str], new: frozenset[str]) -> bool:
    """Whether some workload of `old` is not in `new`; an empty set stands for all."""
    return bool(new) and (not old or not old <= new)


def loses(old: Permission, new: Permission) -> bool:
    """Whether the change needs a new epoch."""
    return bool(losses(old, new))


def succeed(old: Permission, new: Permission) -> Permission:
    """`new` at the epoch it must have after `old`. Epoch 0 stays: the engine's isn't known yet."""
    raised = old.epoch > 0 and loses(old, new)
    return replace(new, epoch=old.epoch + 1 if raised else old.epoch)

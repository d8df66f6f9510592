"""The KVCachePolicy resource: its types, bounds, defaults and the checks that a schema cannot make.

The CRD (crd.py) is generated from these types, so a bound or a description is written once. A field is here only when
it works: nothing is accepted and then ignored.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from . import wire
from .quantity import PATTERN as QUANTITY
from .quantity import parse_quantity


class Stage(str, Enum):
    """How far a rollout goes; each stage allows all that the one before it does."""

    COLD = "Cold"  # the cache is off
    SHADOW = "Shadow"  # reuse is predicted, never done
    CANARY = "Canary"  # reuse for the canary cohort, prediction for the rest
    FULL = "Full"  # reuse for all but the protected group

    @property
    def rank(self) -> int:
        return _RANKS[self]


_RANKS = {stage: rank for rank, stage in enumerate(Stage)}


class Backend(str, Enum):
    BUILTIN = "Builtin"


class DType(str, Enum):
    AUTO = "Auto"  # the checkpoint's own
    BF16 = "BF16"
    FP16 = "FP16"
    FP32 = "FP32"


class EvictionPolicy(str, Enum):
    LRU = "LRU"


class IdentitySource(str, Enum):
    API_KEY = "APIKey"
    HEADER = "Header"


class WhenMissing(str, Enum):
    COLD = "Cold"  # serve without the cache
    REJECT = "Reject"  # answer 401


class Advance(str, Enum):
    MANUAL = "Manual"


class Progress(str, Enum):
    RUNNING = "Running"
    PAUSED = "Paused"  # a raise of the stage or the canary waits; a lowering acts


class KillSwitch(str, Enum):
    RELEASED = "Released"
    ENGAGED = "Engaged"


class Strategy(str, Enum):
    SURGE_FIRST = "SurgeFirst"  # a new pod before an old one goes
    DRAIN_FIRST = "DrainFirst"  # an old pod goes before its successor starts: for scarce accelerators


LABEL_VALUE = "^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$"
WORD = "^[A-Za-z0-9]([-A-Za-z0-9_./:]{0,126}[A-Za-z0-9])?$"
Word = Annotated[str, Meta(pattern=WORD, max_length=128)]
ObjectName = Annotated[str, Meta(pattern="^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$", max_length=253)]
TenantName = Annotated[str, Meta(pattern="^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$", max_length=63)]
WorkloadName = Annotated[str, Meta(pattern="^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$", max_length=63)]
PATH = "^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*$"
RelativePath = Annotated[str, Meta(pattern=PATH, max_length=255)]
Size = Annotated[str, Meta(pattern=QUANTITY, max_length=24)]
Percent = Annotated[int, Meta(ge=0, le=100)]
Amount = Annotated[int | str, Meta(description="A Kubernetes quantity.")]
Short = Annotated[str, Meta(max_length=253)]
LabelValue = Annotated[str, Meta(pattern=LABEL_VALUE, max_length=63)]


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """A piece of the resource: unknown fields are errors, names are camelCase on the wire."""


class ClaimSource(_Part, frozen=True):
    claim_name: Annotated[ObjectName, Meta(description="A PersistentVolumeClaim in the policy's namespace.")]
    path: Annotated[RelativePath, Meta(description="The checkpoint's folder in the volume.")]


class ModelSource(_Part, frozen=True):
    persistent_volume_claim: ClaimSource


class Model(_Part, frozen=True):
    name: Annotated[Word, Meta(description="The name that clients send. Cannot be changed.")]
    revision: Annotated[Word, Meta(description="The weights' revision: part of every page's identity.")]
    tokenizer_revision: Annotated[Word, Meta(description="The tokenizer's revision: part of every page's identity.")]
    source: Annotated[ModelSource, Meta(description="Where the checkpoint is.")]
    max_tokens: Annotated[
        int, Meta(ge=16, le=1_048_576, description="The context length served, prompt and answer together.")
    ] = 4096


class Resources(_Part, frozen=True):
    limits: Annotated[dict[str, Amount], Meta(max_length=16)] = {}
    requests: Annotated[dict[str, Amount], Meta(max_length=16)] = {}


class Toleration(_Part, frozen=True, omit_defaults=True):
    key: Short = ""
    operator: Annotated[str, Meta(pattern="^(Exists|Equal)$", max_length=6)] = "Equal"
    value: LabelValue = ""
    effect: Annotated[str, Meta(pattern="^(NoSchedule|PreferNoSchedule|NoExecute)?$", max_length=16)] = ""
    toleration_seconds: int | None = None


class PodTemplate(_Part, frozen=True):
    labels: Annotated[dict[str, LabelValue], Meta(max_length=32)] = {}
    annotations: Annotated[dict[str, Annotated[str, Meta(max_length=4096)]], Meta(max_length=32)] = {}
    node_selector: Annotated[dict[str, LabelValue], Meta(max_length=16)] = {}
    tolerations: Annotated[tuple[Toleration, ...], Meta(max_length=16)] = ()
    runtime_class_name: Short = ""
    image_pull_secrets: Annotated[tuple[ObjectName, ...], Meta(max_length=8)] = ()


class Engine(_Part, frozen=True):
    model: Model
    backend: Annotated[Backend, Meta(description="Builtin: this project's own engine.")] = Backend.BUILTIN
    image: Annotated[
        str,
        Meta(max_length=512, description="Engine image. Empty: the operator's default, pinned when accepted."),
    ] = ""
    replicas: Annotated[int, Meta(ge=0, le=1000, description="Pods. Leave out of manifests under an autoscaler.")] = 1
    max_concurrent: Annotated[int, Meta(ge=1, le=1024, description="Sequences that run at once in a pod.")] = 64
    resources: Annotated[Resources, Meta(description="Of the engine container.")] = Resources()
    template: Annotated[PodTemplate, Meta(description="Additions to the pods.")] = PodTemplate()


class Eviction(_Part, frozen=True):
    policy: Annotated[EvictionPolicy, Meta(description="Which unreferenced page goes first.")] = EvictionPolicy.LRU


class Cache(_Part, frozen=True):
    capacity: Annotated[Size, Meta(description="Memory of the page pool, on the engine's device.")]
    block_tokens: Annotated[int, Meta(ge=1, le=256, description="Tokens a page holds.")] = 16
    dtype: Annotated[DType, Meta(description="Of the pages. Auto: the model's.")] = DType.AUTO
    eviction: Eviction = Eviction()


class Identity(_Part, frozen=True):
    source: Annotated[IdentitySource, Meta(description="What tells tenants apart.")]
    secret: Annotated[
        str, Meta(max_length=253, description="APIKey: the Secret with one data key a tenant, holding its API keys.")
    ] = ""
    gateway_secret: Annotated[
        str, Meta(max_length=253, description="Header: the Secret whose key `token` proves the gateway.")
    ] = ""
    when_missing: Annotated[
        WhenMissing, Meta(description="What a request without a valid tenant gets.")
    ] = WhenMissing.COLD


class Private(_Part, frozen=True):
    quota_percent: Annotated[
        Percent, Meta(description="Ceiling on a tenant's retained, unreferenced pages, of the pool.")
    ] = 100
    max_age_seconds: Annotated[
        int, Meta(ge=1, le=2_592_000, description="A page unused for longer is not reused any more.")
    ] = 1800
    max_in_flight: Annotated[
        int, Meta(ge=0, le=1024, description="Requests of a tenant that run at once in a pod; 0: no limit.")
    ] = 0


class Override(_Part, frozen=True):
    tenant: TenantName
    quota_percent: Percent | None = None
    max_age_seconds: Annotated[int, Meta(ge=1, le=2_592_000)] | None = None
    max_in_flight: Annotated[int, Meta(ge=0, le=1024)] | None = None


class Scopes(_Part, frozen=True):
    identity: Identity
    private: Annotated[Private, Meta(description="Each tenant's own scope.")] = Private()
    overrides: Annotated[
        tuple[Override, ...], Meta(max_length=256, description="Other limits for single tenants.")
    ] = ()


class Workload(_Part, frozen=True):
    name: Annotated[WorkloadName, Meta(description="A value of the header X-KV-Workload; unknown ones count as other.")]


class Canary(_Part, frozen=True):
    percent: Annotated[Percent, Meta(description="Share of sessions in the canary.")] = 0
    workloads: Annotated[
        tuple[WorkloadName, ...],
        Meta(max_length=32, description="Only these workloads are in the canary; empty: all."),
    ] = ()


class Rollout(_Part, frozen=True):
    stage: Annotated[Stage, Meta(description="The furthest stage allowed.")] = Stage.SHADOW
    advance: Annotated[Advance, Meta(description="Manual: the stage is the one written here.")] = Advance.MANUAL
    progress: Annotated[
        Progress, Meta(description="Paused: raising the stage or the canary waits; lowering acts.")
    ] = Progress.RUNNING
    attempt: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Raise it to release a latched pod or start again.")
    ] = 1
    canary: Canary = Canary()
    protected_percent: Annotated[
        Percent, Meta(description="Share of sessions kept on the cold path at every stage, as control.")
    ] = 5
    kill_switch: Annotated[
        KillSwitch, Meta(description="Engaged: no new match from now on; what runs finishes.")
    ] = KillSwitch.RELEASED


class Rollover(_Part, frozen=True):
    strategy: Strategy = Strategy.SURGE_FIRST
    drain_seconds: Annotated[
        int, Meta(ge=0, le=3600, description="How long a pod that goes may finish what it runs.")
    ] = 120


class PolicySpec(_Part, frozen=True):
    engine: Engine
    cache: Cache
    scopes: Scopes
    workloads: Annotated[
        tuple[Workload, ...], Meta(max_length=32, description="Workloads that may be named in metrics and cohorts.")
    ] = ()
    rollout: Rollout = Rollout()
    rollover: Rollover = Rollover()


@dataclass(frozen=True, slots=True)
class Policy:
    """One accepted reading of a resource."""

    namespace: str
    name: str
    uid: str
    spec: PolicySpec


class InvalidPolicy(ValueError):
    """The resource can't be read: says which field, what is wrong and what is allowed. Raised at the boundary only."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a well-formed spec is not accepted: a CamelCase reason for the condition and one sentence."""

    reason: str
    message: str




def decode_spec(spec: Any) -> PolicySpec:
    """A spec as the API server or a YAML parser gives it, checked against types, bounds and the CEL rules' meaning.

    Raises InvalidPolicy naming the field.
    """
    try:
        decoded = msgspec.convert(spec, PolicySpec)
    except msgspec.ValidationError as error:
        raise InvalidPolicy(f"spec: {error}") from None
    if path := _line_break(msgspec.to_builtins(decoded), "spec"):
        raise InvalidPolicy(f"{path} ends with a line break: remove it")
    if broken := broken_rules(decoded):
        raise InvalidPolicy("; ".join(broken))
    return decoded


def _line_break(value: Any, path: str) -> str:
    """Where a text ends with a line break, "" if none does: Python's `$` in the patterns above lets one pass, the API
    server's doesn't. Annotations have no pattern."""
    if isinstance(value, str):
        return path if value.endswith("\n") else ""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, one in items:
        below = f"{path}[{name}]" if isinstance(name, int) else f"{path}.{name.strip()}"
        if below == "spec.engine.template.annotations":
            continue
        if found := (below if str(name).endswith("\n") else _line_break(one, below)):
            return found
    return ""


def decode_policy(resource: Any) -> Policy:
    """A whole resource, as kubectl would send it. `metadata.uid` and `namespace` may be absent (a file on a laptop).

    Raises InvalidPolicy naming the field.
    """
    if not isinstance(resource, dict):
        raise InvalidPolicy(f"expected a {wire.KIND} resource, found {type(resource).__name__}")
    if (resource.get("apiVersion"), resource.get("kind")) != (wire.API_VERSION, wire.KIND):
        raise InvalidPolicy(
            f"expected apiVersion {wire.API_VERSION} and kind {wire.KIND}, "
            f"found {resource.get('apiVersion')} and {resource.get('kind')}"
        )
    metadata = resource.get("metadata") or {}
    name = metadata.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidPolicy("metadata.name is missing: give the policy a name")
    if "spec" not in resource:
        raise InvalidPolicy("spec is missing")
    namespace, uid = metadata.get("namespace") or "default", metadata.get("uid") or ""
    return Policy(namespace, name, uid, decode_spec(resource["spec"]))


SMALLEST_CAPACITY = 1 << 20  # bytes


# What spans fields. CEL has the same rules in the CRD (crd.py); these serve files and the operator.
def broken_rules(spec: PolicySpec) -> list[str]:
    """One sentence for each rule between fields that the spec breaks."""
    broken = []
    identity, rollout = spec.scopes.identity, spec.rollout
    if identity.source is IdentitySource.API_KEY and not identity.secret:
        broken.append("spec.scopes.identity: source APIKey needs secret, the Secret with the tenants' keys")
    if identity.source is IdentitySource.HEADER and not identity.gateway_secret:
        broken.append("spec.scopes.identity: source Header needs gatewaySecret, which proves the gateway")
    if rollout.canary.percent + rollout.protected_percent > 100:
        broken.append("spec.rollout: canary.percent and protectedPercent are together more than 100")
    named = {workload.name for workload in spec.workloads}
    if len(named) < len(spec.workloads):
        broken.append("spec.workloads: a name occurs twice")
    if unknown := [name for name in rollout.canary.workloads if name not in named]:
        broken.append(f"spec.rollout.canary.workloads: {unknown[0]} is not in spec.workloads")
    if len({override.tenant for override in spec.scopes.overrides}) < len(spec.scopes.overrides):
        broken.append("spec.scopes.overrides: a tenant occurs twice")
    return broken


def semantic_refusals(spec: PolicySpec) -> list[Refusal]:
    """What neither the schema nor CEL can see, worst first; empty when the spec is acceptable."""
    refusals = []
    if parse_quantity(spec.cache.capacity) < SMALLEST_CAPACITY:
        refusals.append(Refusal("CapacityTooSmall", "spec.cache.capacity is below 1Mi: no page pool fits in it"))
    if (refusal := _memory_refusal(spec)) is not None:
        refusals.append(refusal)
    refusals.extend(
        Refusal("ReservedLabel", f"spec.engine.template.labels: {label} is set by the operator; remove it")
        for label in spec.engine.template.labels
        if label.startswith((f"{wire.GROUP}/", "app.kubernetes.io/"))
    )
    return refusals


def _memory_refusal(spec: PolicySpec) -> Refusal | None:
    """A pool that the engine's memory limit can't hold. With an accelerator the pool is in the accelerator's memory."""
    limits = spec.engine.resources.limits
    if "memory" not in limits or any("/" in resource for resource in limits):
        return None
    try:
        limit = parse_quantity(str(limits["memory"]))
    except ValueError as error:
        return Refusal("InvalidResources", f"spec.engine.resources.limits.memory: {error}")
    if parse_quantity(spec.cache.capacity) < limit:
        return None
    return Refusal(
        "CapacityExceedsMemory",
        f"spec.cache.capacity {spec.cache.capacity} does not fit into the engine's memory limit {limits['memory']}: "
        "raise the limit or lower the capacity",
    )

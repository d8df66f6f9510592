"""PolicyDocument: what the operator hands to the sidecars of one generation, as canonical JSON in a ConfigMap.

Canonical means sorted keys, no insignificant whitespace, UTF-8: the same policy always has the same bytes, and
`version` is their SHA-256.
"""

import hashlib
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from .directive import Retention
from .policy import (
    Canary,
    IdentitySource,
    KillSwitch,
    Override,
    Policy,
    Private,
    Progress,
    Rollout,
    Stage,
    TenantName,
    WhenMissing,
    WorkloadName,
)

DOCUMENT_VERSION: Literal["kvsteward.dev/document.v1"] = "kvsteward.dev/document.v1"
PRIVATE_CLASS = "private"


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """A piece of the document: a field that a sidecar doesn't know makes it keep its last good document."""


class PolicyReference(_Part, frozen=True):
    namespace: str
    name: str
    uid: str


class DocumentModel(_Part, frozen=True):
    name: str
    revision: str
    tokenizer_revision: str


class DocumentIdentity(_Part, frozen=True):
    source: IdentitySource
    when_missing: WhenMissing


class DocumentOverride(_Part, frozen=True):
    tenant: TenantName
    retention: Retention


class DocumentRollout(_Part, frozen=True):
    stage: Stage
    canary: Canary
    protected_percent: Annotated[int, Meta(ge=0, le=100)]
    kill_switch: KillSwitch
    attempt: Annotated[int, Meta(ge=1)]


class PolicyDocument(_Part, frozen=True):
    api_version: Literal["kvsteward.dev/document.v1"]
    policy: PolicyReference
    generation: str
    model: DocumentModel
    identity: DocumentIdentity
    private: Retention
    overrides: tuple[DocumentOverride, ...]
    workloads: tuple[WorkloadName, ...]
    rollout: DocumentRollout


class UnknownDocument(ValueError):
    """A document of another version, or with fields this sidecar doesn't know: keep the last good one."""


def rollout_in_force(wanted: Rollout, current: DocumentRollout | None) -> DocumentRollout:
    """What the document may say about the rollout: all that is wanted, or, while progress is Paused, only what takes
    permission away from `current` (a paused policy that has none yet starts at Shadow at most)."""
    asked = DocumentRollout(
        wanted.stage, wanted.canary, wanted.protected_percent, wanted.kill_switch, wanted.attempt
    )
    if wanted.progress is Progress.RUNNING:
        return asked
    if current is None:
        stage = min(asked.stage, Stage.SHADOW, key=lambda stage: stage.rank)
        return msgspec.structs.replace(asked, stage=stage)
    return msgspec.structs.replace(
        asked,
        stage=min(asked.stage, current.stage, key=lambda stage: stage.rank),
        canary=_narrower(asked.canary, current.canary),
        protected_percent=max(asked.protected_percent, current.protected_percent),
    )


def _narrower(asked: Canary, current: Canary) -> Canary:
    """The sessions that both canaries contain. Two lists of workloads without a common one leave nobody."""
    percent = min(asked.percent, current.percent)
    if not asked.workloads or not current.workloads:
        return Canary(percent, asked.workloads or current.workloads)
    common = tuple(name for name in asked.workloads if name in current.workloads)
    return Canary(percent, common) if common else Canary(0, asked.workloads)


def compile_document(policy: Policy, generation: str, current: DocumentRollout | None = None) -> PolicyDocument:
    """The document of one generation of an accepted policy; `current` is the rollout it last had, if any."""
    spec = policy.spec
    private = spec.scopes.private
    return PolicyDocument(
        api_version=DOCUMENT_VERSION,
        policy=PolicyReference(policy.namespace, policy.name, policy.uid),
        generation=generation,
        model=DocumentModel(spec.engine.model.name, spec.engine.model.revision, spec.engine.model.tokenizer_revision),
        identity=DocumentIdentity(spec.scopes.identity.source, spec.scopes.identity.when_missing),
        private=Retention(private.quota_percent, private.max_age_seconds, private.max_in_flight),
        overrides=tuple(
            DocumentOverride(override.tenant, _override(override, private)) for override in spec.scopes.overrides
        ),
        workloads=tuple(workload.name for workload in spec.workloads),
        rollout=rollout_in_force(spec.rollout, current),
    )


def _override(override: Override, private: Private) -> Retention:
    def pick(own: int | None, shared: int) -> int:
        return shared if own is None else own

    return Retention(
        pick(override.quota_percent, private.quota_percent),
        pick(override.max_age_seconds, private.max_age_seconds),
        pick(override.max_in_flight, private.max_in_flight),
    )


_encoder = msgspec.json.Encoder(order="sorted")
_decoder = msgspec.json.Decoder(PolicyDocument)


def canonical(document: PolicyDocument) -> bytes:
    return _encoder.encode(document)


def version_of(data: bytes) -> str:
    """`sha256:<64 hex digits>` of a document's canonical bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def decode_document(data: bytes | str) -> PolicyDocument:
    """Raises UnknownDocument when the bytes are no document of this version."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise UnknownDocument(f"the policy document cannot be read: {error}") from None

"""Which spec holds: the resource's own if it is acceptable, else the one accepted last."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from kvsteward_contract.policy import (
    InvalidPolicy,
    KillSwitch,
    PolicySpec,
    Refusal,
    Stage,
    decode_policy,
    semantic_refusals,
)

from .api import Object
from .objects.digests import cohort_digest, identity_digest, spec_digest, stored_spec, template_digest
from .objects.naming import Owner
from .objects.pods import pod_template
from .objects.revisions import Revision, RevisionData
from .settings import Settings

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Acceptance:
    """`spec` is what governs now: the accepted spec, under a rejected one with its kill switch and lower stage.
    `data` and `number` are the revision that holds; both are None and 0 when nothing was ever accepted."""

    refusal: Refusal | None
    spec: PolicySpec | None = None
    data: RevisionData | None = None
    number: int = 0
    fresh: bool = False  # not stored as the newest revision yet


def accept(
    resource: Object, revisions: Sequence[Revision], settings: Settings, objections: Sequence[Refusal] = ()
) -> Acceptance:
    """`revisions` oldest first; `objections` are reasons against the resource's spec found outside of it."""
    last = revisions[-1] if revisions else None
    refusal, spec = _read(resource)
    if refusal is None and objections:
        refusal = objections[0]
    if refusal is not None or spec is None:
        if last is None:
            return Acceptance(refusal)
        return Acceptance(refusal, _held(last.spec, resource), last.data, last.number)
    metadata = resource["metadata"]
    data = revision_data(Owner(metadata["namespace"], metadata["name"], metadata["uid"]), spec, revisions, settings)
    if last is not None and last.data.spec_digest == data.spec_digest:
        return Acceptance(None, spec, last.data, last.number)
    return Acceptance(None, spec, data, last.number + 1 if last else 1, fresh=True)


def _read(resource: Object) -> tuple[Refusal | None, PolicySpec | None]:
    name = resource["metadata"]["name"]
    if not _NAME.fullmatch(name):
        return Refusal(
            "InvalidName",
            f"metadata.name {name!r} cannot name a Service: use at most 50 lower-case letters, digits and -, a letter "
            "first",
        ), None
    try:
        spec = decode_policy(resource).spec
    except InvalidPolicy as error:
        return Refusal("InvalidSpec", str(error)), None
    refusals = semantic_refusals(spec)
    return (refusals[0] if refusals else None), spec


def revision_data(owner: Owner, spec: PolicySpec, revisions: Sequence[Revision], settings: Settings) -> RevisionData:
    """What is decided for a spec when it is accepted, and stays: the image, the generation, the pods' template."""
    digest = spec_digest(spec)
    for known in revisions:
        if known.data.spec_digest == digest:  # accepted before: resumes what was decided then
            return known.data
    image, cohort = pinned_image(spec, revisions, settings), cohort_digest(spec)
    template = template_digest(spec, image)
    generation = owner.generation(identity_digest(spec, image))
    rendered = next((one.data.template for one in reversed(revisions) if one.data.template_digest == template), None)
    return RevisionData(
        spec=stored_spec(spec),
        spec_digest=digest,
        cohort_digest=cohort,
        template_digest=template,
        generation=generation,
        engine_image=image,
        template=rendered
        or pod_template(
            owner,
            spec,
            generation=generation,
            template_digest=template,
            engine_image=image,
            sidecar_image=settings.sidecar_image,
        ),
    )


def pinned_image(spec: PolicySpec, revisions: Sequence[Revision], settings: Settings) -> str:
    """The engine image: the one named, else the one pinned when this cohort was first accepted, else the default."""
    if spec.engine.image:
        return spec.engine.image
    cohort = cohort_digest(spec)
    for known in reversed(revisions):
        if known.data.cohort_digest == cohort and not known.spec.engine.image:
            return known.data.engine_image
    return settings.engine_image


def _held(accepted: PolicySpec, resource: Object) -> PolicySpec:
    """The accepted spec, with what a rejected one may still do: engage the switch, lower the stage, set replicas."""
    spec = resource.get("spec") if isinstance(resource.get("spec"), dict) else {}
    rollout = _object(spec, "rollout")
    held = accepted.rollout
    if rollout.get("killSwitch") == KillSwitch.ENGAGED.value:
        held = msgspec.structs.replace(held, kill_switch=KillSwitch.ENGAGED)
    asked = rollout.get("stage", Stage.SHADOW.value)
    if asked in Stage._value2member_map_ and Stage(asked).rank < held.stage.rank:
        held = msgspec.structs.replace(held, stage=Stage(asked))
    engine = accepted.engine
    replicas = _object(spec, "engine").get("replicas", 1)
    if isinstance(replicas, int) and not isinstance(replicas, bool) and 0 <= replicas <= 1000:
        engine = msgspec.structs.replace(engine, replicas=replicas)
    return msgspec.structs.replace(accepted, rollout=held, engine=engine)


def _object(parent: Any, name: str) -> dict[str, Any]:
    value = parent.get(name) if isinstance(parent, dict) else None
    return value if isinstance(value, dict) else {}

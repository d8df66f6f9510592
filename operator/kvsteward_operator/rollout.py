"""The policy document of each generation: what its sidecars may do now."""

from collections.abc import Sequence

import msgspec
from kvsteward_contract.document import DocumentRollout, PolicyDocument, compile_document
from kvsteward_contract.policy import Canary, Policy, PolicySpec, Stage
from kvsteward_contract.status import GenerationStatus

from .api import Object
from .generations import Generation, serving
from .kinds import CONFIG_MAP
from .objects.documents import read_config_map
from .objects.revisions import Revision
from .world import World


def documents_of(
    world: World, spec: PolicySpec, found: Sequence[Generation], revisions: Sequence[Revision]
) -> dict[str, PolicyDocument]:
    """By generation. All follow the spec that governs; each keeps its own model. A generation without a rollout of
    its own starts from the serving one's, so that a pause holds for it too."""
    owner = world.owner
    prior = {one.name: one for one in world.status.generations}
    current = {
        one.name: current_rollout(world.child(CONFIG_MAP.name, one.name), prior.get(one.name), spec) for one in found
    }
    serves = serving(found)
    inherited = current[serves.name] if serves is not None else None
    made = {}
    for generation in found:
        own = spec
        if generation is not found[-1]:
            accepted = next((one.spec for one in reversed(revisions) if one.data.generation == generation.name), spec)
            own = msgspec.structs.replace(spec, engine=accepted.engine)
        policy = Policy(owner.namespace, owner.name, owner.uid, own)
        made[generation.name] = compile_document(policy, generation.name, current[generation.name] or inherited)
    return made


def current_rollout(
    config_map: Object | None, prior: GenerationStatus | None, spec: PolicySpec
) -> DocumentRollout | None:
    """What a generation may do so far; None for one that is new.

    The ConfigMap says it, but the status must bear it out: a document that somebody changed by hand must not become
    what a pause holds. Then the status alone counts, and it knows stage and percent only.
    """
    document, version = read_config_map(config_map)
    if prior is None or not prior.policy_version:
        return document.rollout if document is not None else None
    if document is not None and version == prior.policy_version:
        return document.rollout
    rollout = spec.rollout
    return DocumentRollout(
        stage=prior.stage or Stage.COLD,
        canary=Canary(prior.canary_percent, rollout.canary.workloads),
        protected_percent=rollout.protected_percent,
        kill_switch=rollout.kill_switch,
        attempt=rollout.attempt,
    )

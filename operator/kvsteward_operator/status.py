"""The status that a situation gives. Figures that change all the time are taken over from the stored status, and
brought up to date only together with something else or at the end of a window: an idle policy is not written."""

import msgspec
from kvsteward_contract.policy import Stage
from kvsteward_contract.status import Capacity, GenerationStatus, PolicyStatus

from .conditions import conditions
from .generations import Generation
from .history import extended
from .objects.workload import endpoint
from .situation import Running, Situation
from .world import World


def status_of(world: World, situation: Situation, now: float) -> PolicyStatus:
    """`now`: Unix seconds, for what has just changed."""
    prior = world.status
    quiet = _status(world, situation, prior, now, fresh=False)
    if quiet == prior and world.evidence is None:
        return prior
    return _status(world, situation, prior, now, fresh=True)


def _status(world: World, situation: Situation, prior: PolicyStatus, now: float, *, fresh: bool) -> PolicyStatus:
    generation = world.resource_generation
    told = conditions(situation, {one.type: one for one in prior.conditions}, now, generation)
    running = situation.running
    if running is None:
        return msgspec.structs.replace(prior, observed_generation=generation, conditions=told)
    owner = world.owner
    stage, percent = stage_in_force(running)
    return PolicyStatus(
        observed_generation=generation,
        endpoint=endpoint(owner),
        selector=",".join(f"{name}={value}" for name, value in owner.selector.items()),
        stage=stage,
        canary_percent=percent,
        replicas=sum(not pod.terminating for pod in running.pods),
        image=running.image,
        capacity=_capacity(running) or prior.capacity,
        generations=tuple(_generation(running, one, prior, fresh=fresh) for one in running.generations),
        evidence=world.evidence or prior.evidence,
        history=extended(prior, running, stage, percent, now),
        conditions=told,
    )


def stage_in_force(running: Running) -> tuple[Stage, int]:
    """Of the serving generation: Cold while there is none. The percent is that of the canary, 0 in other stages."""
    if running.serving is None:
        return Stage.COLD, 0
    rollout = running.rollout(running.serving)
    return rollout.stage, rollout.canary.percent if rollout.stage is Stage.CANARY else 0


def _generation(running: Running, generation: Generation, prior: PolicyStatus, *, fresh: bool) -> GenerationStatus:
    before = next((one for one in prior.generations if one.name == generation.name), None)
    document = running.documents[generation.name]
    observed = [pod.observation for pod in generation.pods if pod.observation is not None]
    in_flight = sum(observation.in_flight for observation in observed)
    pages = sum(observation.resident_pages for observation in observed)
    if not fresh and before is not None:
        in_flight, pages = before.in_flight, before.resident_pages
    percent = document.rollout.canary.percent if document.rollout.stage is Stage.CANARY else 0
    return GenerationStatus(
        name=generation.name,
        model_revision=document.model.revision,
        image=running.image if generation is running.target else (before.image if before is not None else ""),
        policy_version=running.versions[generation.name],
        state=generation.state.value,
        stage=document.rollout.stage,
        canary_percent=percent,
        replicas=len(generation.pods),
        acknowledged_replicas=running.acknowledged(generation),
        in_flight=in_flight,
        resident_pages=pages,
    )


def _capacity(running: Running) -> Capacity | None:
    """The smallest pool among the pods that serve or start; None until one has reported it."""
    observed = [pod.observation for pod in running.target.pods if pod.observation is not None]
    pools = [Capacity(one.bytes_per_token, one.pool_tokens) for one in observed if one.pool_tokens > 0]
    return min(pools, key=lambda pool: pool.pool_tokens, default=None)

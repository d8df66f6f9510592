"""One pass over one policy: from the world to what is to be done. Pure.

`plan` reads nothing but its arguments. Carried out in order (applies, deletes, secret, status), its parts leave the
cluster in a state from which any later pass, of a fresh process too, goes on.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvsteward_contract.document import canonical, version_of
from kvsteward_contract.policy import KillSwitch, PolicySpec, Refusal
from kvsteward_contract.status import PolicyStatus

from .acceptance import Acceptance, accept
from .api import Object
from .drift import holds, mark_of, marked
from .generations import generations
from .index import Place, place_of
from .kinds import CONFIG_MAP, DEPLOYMENT, POD, REPLICA_SET, REVISION
from .objects import access, documents, workload
from .objects.naming import controller_of
from .objects.revisions import KEPT, Revision, RevisionData, read_revisions, revision
from .rollout import documents_of
from .settings import FAST_SCRAPE_SECONDS, SLOW_SCRAPE_SECONDS
from .situation import Running, Situation
from .status import status_of
from .world import Pod, World

NAME_CONFLICT = "NameConflict"
CONFLICT_SECONDS = 10.0  # how often to look whether a name is free by now: nothing watches what isn't ours
CLEANUP_SECONDS = 1.0  # how often to look whether an earlier policy's objects have gone


@dataclass(frozen=True, slots=True)
class Apply:
    """One server-side apply. `live` is what the index holds, None for an object to be created."""

    body: Object
    live: Object | None

    @property
    def place(self) -> Place:
        return place_of(self.body)

    @property
    def digest(self) -> str:
        return mark_of(self.body)


@dataclass(frozen=True, slots=True)
class Scrape:
    """Which pods to ask for observations, and how often."""

    pods: tuple[Pod, ...] = ()
    every: float = SLOW_SCRAPE_SECONDS


@dataclass(frozen=True, slots=True)
class Plan:
    """What one pass does. `status` None: the stored one is right. `again` seconds: look again by then."""

    applies: tuple[Apply, ...] = ()
    deletes: tuple[Object, ...] = ()
    secret: bool = False  # see to it that the Secret is there
    status: PolicyStatus | None = None
    scrape: Scrape = Scrape()
    again: float | None = None


def plan(world: World, now: float) -> Plan:
    """`now`: Unix seconds."""
    if "deletionTimestamp" in world.policy["metadata"]:
        return Plan()  # garbage collection takes the objects, the pods drain; nothing is to be made anew
    leftovers, foreign = _others(world)
    if leftovers:
        situation = Situation(None, None, leftovers)
        return Plan(status=_changed(world, situation, now), again=CLEANUP_SECONDS)
    revisions = read_revisions(world.owned(REVISION.name))
    against = (*foreign, *world.objections)
    acceptance = accept(world.policy, revisions, world.settings, against)
    if acceptance.spec is None or acceptance.data is None:
        status = _changed(world, Situation(acceptance.refusal, None), now)
        return Plan(status=status, again=CONFLICT_SECONDS if _conflicting(against) else None)
    running = _running(world, acceptance.spec, acceptance.data, revisions)
    status = _changed(world, Situation(acceptance.refusal, running), now)
    if _conflicting(against):  # nothing is put in place before these have gone; what runs goes on
        return Plan(status=status, scrape=_scrape(running), again=CONFLICT_SECONDS)
    return Plan(
        applies=_applies(world, desired(world, acceptance.data, acceptance, running)),
        deletes=_superfluous(world, running, revisions),
        secret=True,
        status=status,
        scrape=_scrape(running),
    )


def _others(world: World) -> tuple[tuple[str, ...], tuple[Refusal, ...]]:
    """Objects under our labels that aren't ours: of an earlier policy of this name, and of somebody else."""
    leftovers, foreign = [], []
    for body in world.children:
        controller = controller_of(body)
        if body["kind"] in (POD.name, REPLICA_SET.name) or controller.get("uid") == world.owner.uid:
            continue
        if (controller.get("kind"), controller.get("name")) == (world.policy["kind"], world.owner.name):
            leftovers.append(f"{body['kind']} {body['metadata']['name']}")
        else:
            foreign.append(name_conflict(body["kind"], body["metadata"]["name"]))
    return tuple(leftovers), tuple(foreign)


def _conflicting(against: Iterable[Refusal]) -> bool:
    return any(one.reason == NAME_CONFLICT for one in against)


def name_conflict(kind: str, name: str) -> Refusal:
    return Refusal(
        NAME_CONFLICT, f"{kind} {name} exists and belongs to something else: remove it, or rename the policy"
    )


def _running(world: World, spec: PolicySpec, data: RevisionData, revisions: Sequence[Revision]) -> Running:
    prior = world.status.generations
    found = generations(prior, data.generation, world.pods(), world.replica_sets(), spec.engine.replicas)
    made = documents_of(world, spec, found, revisions)
    deployment = world.child(DEPLOYMENT.name, world.owner.name) or {}
    return Running(
        resource_generation=world.resource_generation,
        spec=spec,
        image=data.engine_image,
        target=found[-1],
        generations=found,
        documents=made,
        versions={name: version_of(canonical(document)) for name, document in made.items()},
        deadline_exceeded=any(
            condition.get("reason") == "ProgressDeadlineExceeded"
            for condition in (deployment.get("status") or {}).get("conditions") or ()
        ),
        trouble=world.trouble,
    )


def desired(world: World, data: RevisionData, acceptance: Acceptance, running: Running) -> list[Object]:
    """Everything that is to exist, in the order in which it is put in place: the spec that holds is on record before
    anything follows from it, and what pods need is there before the pods."""
    owner = world.owner
    names = [generation.name for generation in running.generations]
    number = acceptance.number
    return [
        *([revision(owner, data, number)] if acceptance.fresh else []),
        access.service_account(owner),
        *(documents.config_map(owner, running.documents[name]) for name in names),
        access.role(owner, names),
        access.role_binding(owner),
        workload.service(owner),
        workload.network_policy(owner, world.settings.admin_peers),
        workload.disruption_budget(owner),
        workload.deployment(owner, data.template, replicas=running.wanted, strategy=running.spec.rollover.strategy),
    ]


def _applies(world: World, wanted: Iterable[Object]) -> tuple[Apply, ...]:
    """Only what differs from the index."""
    found = []
    for plain in wanted:
        body = marked(plain)
        place = place_of(body)
        live = world.child(place.kind, place.name)
        if live is not None:
            settled = world.settled.get(place) == (live["metadata"].get("resourceVersion"), mark_of(body))
            if settled or holds(body, live):
                continue
        found.append(Apply(body, live))
    return tuple(found)


def _superfluous(world: World, running: Running, revisions: Sequence[Revision]) -> tuple[Object, ...]:
    """ConfigMaps of generations that have gone, and old revisions that no generation stands on."""
    names = {generation.name for generation in running.generations}
    maps = [body for body in world.owned(CONFIG_MAP.name) if body["metadata"]["name"] not in names]
    standing = {
        next(one.name for one in reversed(revisions) if one.data.generation == name)
        for name in names
        if any(one.data.generation == name for one in revisions)
    }
    old = {one.name for one in revisions[:-KEPT]} - standing
    return (*maps, *(body for body in world.owned(REVISION.name) if body["metadata"]["name"] in old))


def _scrape(running: Running) -> Scrape:
    """Fast while an answer is awaited: a confirmation of the document or of the switch."""
    pods = tuple(pod for pod in running.pods if pod.ip)
    awaited = any(
        running.acknowledged(one) < sum(not pod.terminating for pod in one.pods) for one in running.generations
    ) or (
        running.spec.rollout.kill_switch is KillSwitch.ENGAGED and not all(map(running.confirmed_cold, running.pods))
    )
    return Scrape(pods, FAST_SCRAPE_SECONDS if awaited else SLOW_SCRAPE_SECONDS)


def _changed(world: World, situation: Situation, now: float) -> PolicyStatus | None:
    status = status_of(world, situation, now)
    return None if status == world.status else status

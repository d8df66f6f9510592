"""One worker turn: observe, decide, apply once. What a turn can't finish, the next one does."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec
from kvsteward_contract.identity import admin_token
from kvsteward_contract.observation import Observation
from kvsteward_contract.policy import Refusal
from kvsteward_contract.status import Evidence, PolicyStatus

from . import errors
from .api import Api
from .decide import Apply, Plan, Scrape, name_conflict, plan
from .drift import spoilt_lists
from .events import event, tellings
from .evidence import measured
from .generations import State
from .index import Index, Key, Place
from .kinds import BY_NAME, DEPLOYMENT, EVENT, POLICY, REVISION, SECRET, kind_of
from .objects.access import secret
from .objects.naming import Owner, controller_of
from .settings import SECRET_SECONDS, WINDOW_SECONDS, Settings
from .telemetry import Telemetry
from .world import Report, World

TRIES = 5  # passes in one turn, each from a fresh reading, before the key goes back to the queue


class Scraper(Protocol):
    """Where observations come from."""

    def reports(self, key: Key) -> Mapping[str, Report]:
        """The latest by pod uid."""
        ...

    def follow(self, key: Key, scrape: Scrape) -> None:
        """From now on ask these pods, this often; nothing to follow ends it."""
        ...


@dataclass(slots=True)
class Memory:
    """What a process remembers of one policy. All of it may be lost: it saves work, or starts a window anew."""

    told: set[str] = field(default_factory=set)  # names of events that exist
    settled: dict[Place, tuple[str, str]] = field(default_factory=dict)
    secret_due: float = 0.0
    window_opened: float = 0.0
    window_before: dict[str, Observation] = field(default_factory=dict)
    trouble: str = ""


class Reconciler:
    """`clock` gives Unix seconds, `random` that many random bytes."""

    def __init__(
        self,
        api: Api,
        index: Index,
        scraper: Scraper,
        settings: Settings,
        clock: Callable[[], float],
        telemetry: Telemetry,
        random: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._api, self._index, self._scraper, self._settings = api, index, scraper, settings
        self._clock, self._telemetry, self._random = clock, telemetry, random
        self._memories: dict[Key, Memory] = {}

    async def turn(self, key: Key) -> float | None:
        """Brings one policy up to date. Returns seconds until it should be looked at again, None if only on a change.

        Raises ApiError when that could not be done; then it is to be tried again.
        """
        for _ in range(TRIES):
            policy = self._index.policy(key)
            if policy is None:
                self._memories.pop(key, None)
                self._scraper.follow(key, Scrape())
                return None
            memory = self._memories.get(key)
            if memory is None:
                # A former process may have stored a status without living to tell its events.
                memory = self._memories[key] = Memory()
                await self._tell(memory, World(policy, (), self._settings))
            try:
                return await self._pass(key, memory)
            except errors.Conflict:
                await self._read_again(key)
        raise errors.Conflict(409, f"{key.namespace}/{key.name} changes faster than it can be read")

    async def _read_again(self, key: Key) -> None:
        """The index was behind: takes in the policy and its objects as they are now."""
        for known in [*self._index.children(key), self._index.policy(key)]:
            if known is None:
                continue
            metadata = known["metadata"]
            try:
                self._index.put(await self._api.get(kind_of(known), metadata["namespace"], metadata["name"]))
            except errors.NotFound:
                self._index.remove(known)

    async def _pass(self, key: Key, memory: Memory) -> float | None:
        now = self._clock()
        world, decided = await self._settle(key, memory, now)
        owner = world.owner
        if decided.secret and now >= memory.secret_due:
            await self._create_secret(owner)
            memory.secret_due = now + SECRET_SECONDS
        try:
            for apply in decided.applies:
                await self._apply(apply, memory)
            for body in decided.deletes:
                metadata = body["metadata"]
                await self._api.delete(kind_of(body), metadata["namespace"], metadata["name"], metadata["uid"])
        except errors.Refused as error:
            # Nothing that is tried again will help by itself: tell it in the status, then go on trying, slowly.
            memory.trouble = str(error)
            told = plan(replace(world, trouble=memory.trouble), now)
            await self._store(key, memory, world, told.status)
            raise
        if memory.trouble:
            memory.trouble = ""
            decided = replace(decided, status=plan(replace(world, trouble=""), now).status)
        await self._store(key, memory, world, decided.status)
        if world.evidence is not None or not memory.window_opened or now >= memory.window_opened + WINDOW_SECONDS:
            memory.window_opened, memory.window_before = now, _observations(world)
        self._scraper.follow(key, decided.scrape)
        waits = [decided.again] if decided.again is not None else []
        if decided.secret:
            waits += [memory.secret_due - now, memory.window_opened + WINDOW_SECONDS - now]
        return max(0.0, min(waits)) if waits else None

    def _world(self, key: Key, memory: Memory, now: float) -> World:
        policy = self._index.policy(key)
        if policy is None:
            raise errors.Conflict(409, f"{key.namespace}/{key.name} was deleted")
        world = World(
            policy=policy,
            children=tuple(self._index.children(key)),
            settings=self._settings,
            reports=self._scraper.reports(key),
            settled=memory.settled,
            trouble=memory.trouble,
        )
        return replace(world, evidence=_evidence(world, memory, now))

    async def _settle(self, key: Key, memory: Memory, now: float) -> tuple[World, Plan]:
        """Decides, asking the API server about what the index can't know: whether names are free, and whether it takes
        the pods of a spec that is about to be accepted."""
        objections: list[Refusal] = []
        free: set[Place] = set()
        tried = False
        while True:
            world = replace(self._world(key, memory, now), objections=tuple(objections))
            decided = plan(world, now)
            again = False
            for apply in decided.applies:
                if apply.live is not None or apply.place in free:
                    continue
                refusal = await self._occupied(apply, world.owner)
                if refusal is not None:
                    objections.append(refusal)
                again = again or refusal is not None or self._index.get(apply.place) is not None
                free.add(apply.place)
            if again:
                continue
            if not tried and any(apply.place.kind == REVISION.name for apply in decided.applies):
                tried = True
                refusal = await self._refused(decided)
                if refusal is not None:
                    objections.append(refusal)
                    continue
            return world, decided

    async def _occupied(self, apply: Apply, owner: Owner) -> Refusal | None:
        """Whether the name of an object to be created is somebody else's. One of ours goes into the index."""
        place = apply.place
        try:
            found = await self._api.get(BY_NAME[place.kind], place.namespace, place.name)
        except errors.NotFound:
            return None
        controller = controller_of(found)
        if controller.get("uid") == owner.uid or (controller.get("kind"), controller.get("name")) == (
            POLICY.name,
            owner.name,
        ):
            self._index.put(found)
            return None
        return name_conflict(place.kind, place.name)

    async def _refused(self, decided: Plan) -> Refusal | None:
        """Asks the API server to try the Deployment of a new spec without keeping it."""
        for apply in decided.applies:
            if apply.place.kind == DEPLOYMENT.name:
                try:
                    await self._api.apply(DEPLOYMENT, apply.body, force=True, dry_run=True)
                except errors.Refused as error:
                    if error.status in (400, 422):
                        return Refusal("InvalidTemplate", f"the API server does not take the pods: {error}")
                    raise
        return None

    async def _apply(self, apply: Apply, memory: Memory) -> None:
        body = apply.body
        if apply.live is not None:
            # The uid makes it fail, rather than take over or create, if another object has the name by now.
            body = {**body, "metadata": {**body["metadata"], "uid": apply.live["metadata"]["uid"]}}
        try:
            stored = await self._api.apply(kind_of(body), body, force=apply.live is not None)
        except errors.NotFound as error:
            raise errors.Conflict(409, str(error)) from None
        except errors.Refused:
            if apply.live is None or not (lists := spoilt_lists(apply.body, apply.live)):
                raise
            self._index.put(await self._api.replace(apply.live, lists))
            stored = await self._api.apply(kind_of(body), body, force=True)
        self._telemetry.applied(apply.place.kind)
        self._index.put(stored)
        memory.settled[apply.place] = (stored["metadata"]["resourceVersion"], apply.digest)

    async def _create_secret(self, owner: Owner) -> None:
        body = secret(owner, self._random(32), admin_token(self._settings.operator_key, owner.uid))
        try:
            await self._api.create(SECRET, body)
        except errors.AlreadyExists:
            return
        self._telemetry.applied(SECRET.name)

    async def _store(self, key: Key, memory: Memory, world: World, status: PolicyStatus | None) -> None:
        """Stores a changed status, then tells its events."""
        if status is not None:
            version = world.policy["metadata"]["resourceVersion"]
            try:
                stored = await self._api.replace_status(key.namespace, key.name, version, msgspec.to_builtins(status))
            except errors.NotFound as error:  # deleted: read again, and leave it
                raise errors.Conflict(409, str(error)) from None
            self._index.put(stored)
            world = replace(world, policy=stored)
        await self._tell(memory, world)

    async def _tell(self, memory: Memory, world: World) -> None:
        owner = world.owner
        for telling in tellings(owner, world.status, self._clock()):
            if telling.name in memory.told:
                continue
            try:
                await self._api.create(EVENT, event(owner, telling))
            except errors.AlreadyExists:
                pass
            memory.told.add(telling.name)


def _observations(world: World) -> dict[str, Observation]:
    """The latest of each pod of the generation that serves, by pod uid."""
    serves = {one.name for one in world.status.generations if one.state == State.SERVING}
    return {
        pod.uid: pod.observation for pod in world.pods() if pod.observation is not None and pod.generation in serves
    }


def _evidence(world: World, memory: Memory, now: float) -> Evidence | None:
    """Of the window, if it has just ended and something was asked of the pods in it."""
    if not memory.window_opened:
        return None
    current = _observations(world)
    for uid, observation in current.items():
        if observation.start_time <= memory.window_opened:
            memory.window_before.setdefault(uid, observation)  # ran before the window: what it counted is not of it
    if now < memory.window_opened + WINDOW_SECONDS:
        return None
    return measured(memory.window_before, current, now)

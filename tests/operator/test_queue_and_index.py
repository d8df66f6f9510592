"""The queue loses no key and works on none twice at once; the index keeps the newest; a resync finds what got lost."""

import asyncio
from typing import Any

import pytest
from kvsteward_operator import errors
from kvsteward_operator.index import Index, Key, Place
from kvsteward_operator.kinds import POLICY
from kvsteward_operator.resync import Resync
from kvsteward_operator.telemetry import LIVE_SECONDS, Telemetry
from kvsteward_operator.workers import HEARTBEAT, work
from kvsteward_operator.workqueue import LAST_DELAY, WorkQueue
from support.operating import KEY, Operating

OTHER = Key("serving", "other")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def queue_at(clock: Clock) -> WorkQueue:
    return WorkQueue(clock, jitter=lambda: 0.5)


async def taken(queue: WorkQueue) -> Key | None:
    """What `take` gives right now, if anything."""
    try:
        return await asyncio.wait_for(queue.take(), 0.02)
    except TimeoutError:
        return None


async def test_a_key_added_twice_is_worked_on_once() -> None:
    queue = queue_at(Clock())
    queue.add(KEY)
    queue.add(KEY)
    assert await taken(queue) == KEY
    queue.done(KEY, failed=False)
    assert await taken(queue) is None


async def test_a_key_that_changes_while_it_is_worked_on_comes_again_afterwards() -> None:
    queue = queue_at(Clock())
    queue.add(KEY)
    queue.add(OTHER)
    assert await taken(queue) == KEY
    queue.add(KEY)
    assert await taken(queue) == OTHER
    assert await taken(queue) is None
    queue.done(KEY, failed=False)
    assert await taken(queue) == KEY


async def test_failures_wait_longer_each_time_and_a_change_does_not_wait() -> None:
    clock = Clock()
    queue = queue_at(clock)
    queue.add(KEY)
    for wait in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, LAST_DELAY, LAST_DELAY):
        assert await taken(queue) == KEY
        queue.done(KEY, failed=True)
        clock.now += wait - 0.01
        assert await taken(queue) is None
        clock.now += 0.01
    assert await taken(queue) == KEY
    queue.done(KEY, failed=True)
    queue.add(KEY)  # an edit
    assert await taken(queue) == KEY
    queue.done(KEY, failed=False)
    queue.add(KEY)
    assert await taken(queue) == KEY
    queue.done(KEY, failed=True)
    clock.now += 0.5  # a success has ended the row of failures
    assert await taken(queue) == KEY


async def test_the_sooner_of_two_plans_counts() -> None:
    clock = Clock()
    queue = queue_at(clock)
    queue.add(KEY, 60)
    queue.add(KEY, 5)
    queue.add(KEY, 30)
    clock.now = 5
    assert await taken(queue) == KEY
    queue.done(KEY, failed=False)
    clock.now = 100
    assert await taken(queue) is None


async def test_a_waiting_worker_wakes_for_a_key_that_is_added() -> None:
    queue = WorkQueue(asyncio.get_running_loop().time)
    waiting = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.add(KEY, 0.01)
    assert await asyncio.wait_for(waiting, 1) == KEY


def body(version: int, uid: str = "a", policy: str | None = "chat", kind: str = "ConfigMap") -> dict[str, Any]:
    labels = {"kvsteward.dev/policy": policy} if policy else {}
    metadata = {"name": "x", "namespace": "serving", "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"kind": kind, "apiVersion": "v1", "metadata": metadata}


def test_the_index_keeps_the_newest_whatever_comes_last() -> None:
    index = Index()
    assert index.put(body(5))
    assert not index.put(body(4))
    assert not index.put(body(5))
    assert index.put(body(10))
    assert [one["metadata"]["resourceVersion"] for one in index.children(KEY)] == ["10"]


def test_a_late_deletion_does_not_take_the_successor_away() -> None:
    index = Index()
    index.put(body(5, uid="a"))
    index.put(body(9, uid="b"))
    assert not index.remove(body(8, uid="a"))
    assert index.remove(body(12, uid="b"))
    assert index.children(KEY) == []


def test_an_object_whose_label_changes_leaves_its_policy() -> None:
    index = Index()
    index.put(body(5))
    index.put(body(6, policy="other"))
    assert index.children(KEY) == []
    assert len(index.children(OTHER)) == 1
    index.put(body(7, policy=None))
    assert index.children(OTHER) == []
    assert index.get(Place("ConfigMap", "serving", "x")) is None


def test_what_was_deleted_does_not_come_back_by_a_late_answer() -> None:
    index = Index()
    index.put(body(5))
    index.remove(body(8))
    assert not index.put(body(7))
    assert not index.put(body(9))
    assert index.put(body(10, uid="b"))


class Watched:
    """A resync over a fake cluster whose watches may be cut."""

    def __init__(self) -> None:
        self.operating = Operating()
        self.enqueued: list[Key] = []
        self.distrusted = 0
        self.resync = Resync(
            self.operating.api, self.operating.index, (), self.enqueue, self.distrust, Telemetry(lambda: 0.0)
        )

    def enqueue(self, key: Key, delay: float) -> None:
        if delay == 0:
            self.enqueued.append(key)

    def distrust(self) -> None:
        self.distrusted += 1


async def test_a_resync_of_a_quiet_cluster_finds_nothing_and_leaves_the_watches_alone() -> None:
    watched = Watched()
    watched.operating.create()
    await watched.operating.run()
    assert await watched.resync.compare(0) == 0
    assert watched.distrusted == 0
    assert watched.enqueued == []


@pytest.mark.parametrize("lost", ["an edit", "a deletion", "a creation"])
async def test_a_lost_watch_event_is_found_by_the_resync_which_starts_the_watches_anew(lost: str) -> None:
    watched = Watched()
    operating = watched.operating
    operating.create()
    await operating.run()
    operating.api.watchers.clear()
    if lost == "an edit":
        operating.edit(rollout={"stage": "Full"})
    elif lost == "a deletion":
        operating.api.remove(operating.api.of_kind("Service")[0])
    else:
        pod = operating.api.of_kind("Pod")[0]
        operating.api.put({**pod, "metadata": {**pod["metadata"], "name": "another", "uid": ""}})
    assert await watched.resync.compare(0) == 1
    assert watched.distrusted == 1
    assert watched.enqueued == [KEY]
    assert await watched.resync.compare(0) == 0


async def test_what_a_watch_brings_during_the_grace_time_is_not_held_against_it() -> None:
    watched = Watched()
    operating = watched.operating
    operating.create()
    await operating.run()
    listed, late = operating.api.watchers[0], []
    operating.api.watchers[0] = lambda change, body: late.append((change, body))
    operating.edit(rollout={"stage": "Full"})
    comparing = asyncio.create_task(watched.resync.compare(0.05))
    await asyncio.sleep(0.02)
    for change, seen in late:
        listed(change, seen)
    assert await comparing == 0
    assert watched.distrusted == 0


async def test_what_is_deleted_during_the_grace_time_is_not_taken_for_a_lost_creation() -> None:
    watched = Watched()
    operating = watched.operating
    operating.create()
    comparing = asyncio.create_task(watched.resync.compare(0.05))
    await asyncio.sleep(0.02)
    operating.api.remove(operating.policy)
    assert await comparing == 0
    assert operating.index.keys() == []
    assert watched.distrusted == 0


async def test_workers_bring_policies_up_to_date_and_try_again_what_failed() -> None:
    operating = Operating()
    telemetry = Telemetry(lambda: 0.0)
    queue = WorkQueue(asyncio.get_running_loop().time, jitter=lambda: -0.49)
    fails = 2

    def fail(verb: str, kind: str, name: str) -> None:
        nonlocal fails
        if (verb, kind) == ("apply", "Role") and fails:
            fails -= 1
            raise errors.Unavailable(503, "etcd is away")

    operating.api.fail = fail
    operating.api.watchers.append(lambda change, body: queue.add(KEY))
    workers = [asyncio.create_task(work(queue, operating.reconciler, telemetry)) for _ in range(2)]
    try:
        operating.create()
        async with asyncio.timeout(10):
            while operating.status.stage != "Shadow":
                operating.workloads.step()
                operating.sidecars.scrape()
                queue.add(KEY)
                await asyncio.sleep(0.01)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    turns = {
        sample.labels["result"]: sample.value
        for metric in telemetry.registry.collect()
        for sample in metric.samples
        if sample.name == "kvsteward_operator_turns_total"
    }
    assert turns["Unavailable"] == 2
    assert turns["done"] > 2


async def test_a_fault_in_one_policy_does_not_stop_the_workers(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        async def turn(self, key: Key) -> None:
            if key == KEY:
                raise ZeroDivisionError
            reached.set()

    reached = asyncio.Event()
    queue = WorkQueue(asyncio.get_running_loop().time)
    worker = asyncio.create_task(work(queue, Broken(), Telemetry(lambda: 0.0)))  # type: ignore[arg-type]
    queue.add(KEY)
    queue.add(OTHER, 0.01)
    await asyncio.wait_for(reached.wait(), 2)
    worker.cancel()
    assert "ZeroDivisionError" in caplog.text


async def test_liveness_is_the_age_of_the_last_turn_and_a_quiet_cluster_is_alive() -> None:
    clock = Clock()
    telemetry = Telemetry(clock)
    queue = WorkQueue(asyncio.get_running_loop().time)
    clock.now = LIVE_SECONDS + 1
    assert not telemetry.alive()
    queue.add(HEARTBEAT)
    worker = asyncio.create_task(work(queue, None, telemetry))  # type: ignore[arg-type]
    await asyncio.sleep(0.02)
    worker.cancel()
    assert telemetry.alive()


def test_policies_are_told_from_their_objects() -> None:
    index = Index()
    index.put({**body(3, kind=POLICY.name), "metadata": {**body(3)["metadata"], "name": "chat", "labels": {}}})
    index.put(body(4))
    assert index.keys() == [KEY]
    assert index.policy(KEY) is not None
    assert [one["kind"] for one in index.children(KEY)] == ["ConfigMap"]

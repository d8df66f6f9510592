"""Pods that go finish what they run: no request is cut inside drainSeconds, whatever takes the pods away."""

import asyncio

import pytest
from support.deployed import Deployed
from support.kube import until
from support.proof import record

pytestmark = pytest.mark.cluster

STREAMS = 16
OWNED = (
    "deployment,service,configmap,secret,serviceaccount,role,rolebinding,poddisruptionbudget,networkpolicy,"
    "controllerrevision"
)


def cut(load) -> list[str]:
    """Answers that began and did not end whole. A refusal before the first byte of an answer, or a connection that
    can't be made once everything is gone, cuts nothing."""
    return [
        f"{answer.status} {answer.error}"
        for answer in load.answers
        if answer.status == 200 and not answer.complete
    ]


async def test_deleting_a_pod_under_load_fails_no_request(tiny_policy):
    chat: Deployed = tiny_policy("drain-pod", engine={"replicas": 2})
    load = chat.load(STREAMS, max_tokens=128)
    async with load.running():
        await load.wait_for(STREAMS)
        pod = (await asyncio.to_thread(chat.kube.pods, chat.name))[0]["metadata"]
        await asyncio.to_thread(chat.kube.delete, "pod", pod["name"], wait=True)
        await load.wait_for(2 * STREAMS)
        await asyncio.to_thread(until, "two pods ready", lambda: _ready(chat) == 2, 120)
        await load.wait_for(STREAMS)
    failed = [f"{answer.status} {answer.error}" for answer in load.answers if not answer.complete]
    record("drain-pod-deleted", "kubectl delete pod under 16 streams: 0 requests cut",
           {"requests": len(load.answers), "cut": len(cut(load)), "failed": len(failed)})  # fmt: skip
    assert not cut(load)
    assert not failed


async def test_a_rolling_update_under_load_fails_no_request(tiny_policy):
    chat: Deployed = tiny_policy("drain-roll", engine={"replicas": 2})
    before = {pod["metadata"]["uid"] for pod in await asyncio.to_thread(chat.kube.pods, chat.name)}
    load = chat.load(STREAMS, max_tokens=128)
    async with load.running():
        await load.wait_for(STREAMS)
        change = {"spec": {"engine": {"template": {"annotations": {"example.com/rolled": "1"}}}}}
        await asyncio.to_thread(chat.kube.patch, "kvcp", chat.name, change)

        def rolled():
            pods = chat.kube.pods(chat.name, leaving=True)
            return len(pods) == 2 and not before & {pod["metadata"]["uid"] for pod in pods} and _ready(chat) == 2

        await asyncio.to_thread(until, "both pods replaced", rolled, 240)
        await load.wait_for(STREAMS)
    failed = [f"{answer.status} {answer.error}" for answer in load.answers if not answer.complete]
    record("drain-rolling-update", "a rolling update under 16 streams: 0 requests cut",
           {"requests": len(load.answers), "cut": len(cut(load)), "failed": len(failed)})  # fmt: skip
    assert not cut(load)
    assert not failed


async def test_deleting_the_policy_under_load_cuts_no_stream_and_leaves_nothing(tiny_policy):
    chat: Deployed = tiny_policy("drain-policy", engine={"replicas": 2})
    load = chat.load(STREAMS, max_tokens=128)
    async with load.running():
        await load.wait_for(STREAMS)
        await asyncio.to_thread(chat.kube.delete, "kvcp", chat.name, wait=True)
        await asyncio.to_thread(until, "pods gone", lambda: not chat.kube.pods(chat.name, leaving=True), 120)
    record("drain-policy-deleted", "kubectl delete kvcp under 16 streams: 0 requests cut",
           {"requests": len(load.answers), "cut": len(cut(load)),
            "refusedAfterwards": sum(not answer.complete for answer in load.answers)})  # fmt: skip
    assert not cut(load)

    def left():
        return chat.kube.kubectl("get", OWNED, "-l", f"kvsteward.dev/policy={chat.name}", "-o", "name").split()

    await asyncio.to_thread(until, "owned objects collected", lambda: not left(), 60)


def _ready(chat: Deployed) -> int:
    return sum(
        any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", []))
        for pod in chat.kube.pods(chat.name)
    )

"""An edit of the stage is in force on all replicas within two seconds, no pod restarted; lowering needs no operator."""

import asyncio
import time

import pytest
from support.deployed import figures
from support.kube import until
from support.proof import record

pytestmark = pytest.mark.cluster

TURNS = 5  # of four edits each
ORDER = (("Shadow", 0), ("Canary", 50), ("Full", 0), ("Cold", 0))


@pytest.fixture(scope="module")
def chat(tiny_policy):
    return tiny_policy("stages", engine={"replicas": 2})


async def test_every_edit_of_the_stage_is_in_force_everywhere_within_two_seconds(chat):
    await chat.stage("Cold")
    before = await asyncio.to_thread(chat.restarts)
    took = []
    for _ in range(TURNS):
        for stage, percent in ORDER:
            took.append(await chat.stage(stage, canary=percent))
    assert await asyncio.to_thread(chat.restarts) == before, "an edit of the stage restarted a container"
    record("stage-change", "stage change to effect on all replicas: < 2 s in all of 20", {"seconds": figures(took)})
    assert max(took) < 2.0


async def test_the_status_follows_and_counts_the_replicas_that_confirmed(chat):
    await chat.stage("Shadow")
    await chat.stage("Canary", canary=25)

    def look():
        status = chat.kube.policy(chat.name)["status"]
        serving = [each for each in status.get("generations", []) if each.get("state") == "Serving"]
        return (
            status.get("stage") == "Canary"
            and status.get("canaryPercent") == 25
            and len(serving) == 1
            and serving[0].get("acknowledgedReplicas") == 2
        )

    await asyncio.to_thread(until, "status follows", look, 10)
    reasons = await asyncio.to_thread(chat.kube.reasons, chat.name)
    assert "CanaryStarted" in reasons


async def test_lowering_the_stage_works_with_the_operator_scaled_to_zero(chat, system):
    await chat.stage("Full")
    await asyncio.to_thread(system.scale, "kvsteward", 0)
    try:
        await chat.edit(stage="Shadow")
        begun = time.monotonic()
        await chat.in_force("Shadow", timeout=10)
        lowered = time.monotonic() - begun
        await chat.edit(stage="Full")
        await asyncio.sleep(2)
        stages = {each["stage"] for each in await asyncio.to_thread(chat.observations)}
        assert stages == {"Full"}, "the document still allows Full, and the resource does again"
    finally:
        await asyncio.to_thread(system.scale, "kvsteward", 1)
    record("stage-lowered-without-operator", "lowering the stage works with the operator scaled to 0",
           {"seconds": round(lowered, 3)})  # fmt: skip
    assert lowered < 2.0


async def test_raising_the_stage_past_the_document_waits_for_the_operator(chat, system):
    await chat.stage("Shadow")
    await asyncio.to_thread(system.scale, "kvsteward", 0)
    try:
        await chat.edit(stage="Full")
        await asyncio.sleep(3)
        assert {each["stage"] for each in await asyncio.to_thread(chat.observations)} == {"Shadow"}
    finally:
        await asyncio.to_thread(system.scale, "kvsteward", 1)
    await chat.in_force("Full", timeout=30)

"""The kill switch under load: no new match within a second on every replica, and no request fails for it."""

import asyncio
import time

import pytest
from support.deployed import figures
from support.proof import record

pytestmark = pytest.mark.cluster

TRIES = 10
STREAMS = 32  # 2 replicas x maxConcurrent 8 run, as many again are queued


@pytest.fixture(scope="module")
def chat(tiny_policy):
    return tiny_policy("switch", engine={"replicas": 2, "maxConcurrent": 8})


async def pull(chat) -> dict:
    """One try: load until pages are reused, engage, confirm, go on; then release."""
    await chat.edit(killSwitch="Released", stage="Full")
    load = chat.load(STREAMS, max_tokens=96)
    async with load.running():
        await load.wait_for(STREAMS + 4)
        edited = time.time()
        await chat.edit(killSwitch="Engaged")
        patched = time.time()
        await chat.cold()
        confirmed = time.time()
        last = await asyncio.to_thread(chat.last_match)
        await load.wait_for(STREAMS + 4)
        assert await asyncio.to_thread(chat.last_match) == last, "a match was made after it was confirmed"
        assert any(answer.cached_tokens for answer in load.answers), "nothing was reused before: the try shows nothing"
    failed = [answer for answer in load.answers if not answer.complete]
    late = [answer for answer in load.answers if answer.started > confirmed and answer.cached_tokens]
    return {
        "lastMatch": max(0.0, last - patched),
        "lastMatchFromBegin": max(0.0, last - edited),
        "confirmed": confirmed - edited,
        "confirmedAfterLastMatch": confirmed >= last,
        "failed": len(failed),
        "late": len(late),
        "requests": len(load.answers),
    }


async def settle(chat) -> None:
    """Released everywhere, so that the next try begins warm."""
    await chat.edit(killSwitch="Released")
    async with asyncio.timeout(30):
        while any(each["coldRequested"] for each in await asyncio.to_thread(chat.observations)):
            await asyncio.sleep(0.05)


async def tries_of(chat) -> list[dict]:
    tries = []
    for _ in range(TRIES):
        tries.append(await pull(chat))
        await settle(chat)
    return tries


def judge(tries: list[dict], name: str, line: str) -> None:
    total = sum(each["requests"] for each in tries)
    record(name, line, {
        "secondsFromKubectlReturnedToLastMatch": figures([each["lastMatch"] for each in tries]),
        "secondsFromKubectlStartedToLastMatch": figures([each["lastMatchFromBegin"] for each in tries]),
        "secondsToConfirmed": figures([each["confirmed"] for each in tries]),
        "requests": total,
        "failed": sum(each["failed"] for each in tries),
    })  # fmt: skip
    assert all(each["failed"] == 0 for each in tries)
    assert all(each["late"] == 0 for each in tries)
    assert all(each["confirmedAfterLastMatch"] for each in tries)
    assert max(each["lastMatch"] for each in tries) < 1.0


async def test_the_last_new_match_is_within_a_second_of_the_edit_and_no_request_fails(chat):
    try:
        tries = await tries_of(chat)
        await chat.edit(killSwitch="Engaged")
        await asyncio.to_thread(chat.kube.wait_for, chat.name, "ColdPath", "True", 20)
        reasons = await asyncio.to_thread(chat.kube.reasons, chat.name)
    finally:
        await settle(chat)
    judge(tries, "kill-switch", "kubectl patch of the kill switch to the last new match, 2 replicas, < 1 s in 10 tries")
    assert "ColdPathEngaged" in reasons


async def test_the_switch_works_with_the_operator_scaled_to_zero(chat, system):
    await chat.edit(killSwitch="Released", stage="Full")
    await chat.in_force("Full")
    await asyncio.to_thread(system.scale, "kvsteward", 0)
    try:
        tries = []
        for _ in range(TRIES):
            tries.append(await pull(chat))
            # Releasing waits for the operator to accept it, so a try without one ends with the operator's return.
            await asyncio.to_thread(system.scale, "kvsteward", 1)
            await settle(chat)
            await asyncio.to_thread(system.scale, "kvsteward", 0)
    finally:
        await asyncio.to_thread(system.scale, "kvsteward", 1)
        await settle(chat)
    judge(tries, "kill-switch-without-operator", "the same with the operator scaled to 0")

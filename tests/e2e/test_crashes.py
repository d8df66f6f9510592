"""kill -9 of each process under load: it recovers, no cut stream looks complete, no page leaks, no scope is crossed."""

import asyncio

import pytest
from kvsteward_bench.traffic import ask, session
from support.kube import until
from support.proof import record

pytestmark = pytest.mark.cluster

STREAMS = 8
TOKENS = 96


@pytest.fixture(scope="module")
def chat(tiny_policy):
    return tiny_policy("crash", engine={"replicas": 1})


async def whole_text(chat, client, prompt):
    answer = await ask(
        client, chat.url, prompt, model=chat.model, key=chat.keys["acme"], max_tokens=TOKENS, ignore_eos=True
    )
    assert answer.complete, answer
    return answer.text


async def check_after(chat, load, texts, seed) -> dict:
    """What must hold once the dust has settled; gives the figures."""
    believed = [answer for answer in load.answers if answer.looks_complete]
    lying = [answer for answer in believed if not answer.done or answer.text not in texts]
    assert not lying, "a stream looked complete and wasn't"
    leaked = await asyncio.to_thread(until, "no page is held", lambda: [held(chat)] if held(chat) == 0 else None, 30)
    tokens = [5 + (seed * 53 + n) % 200 for n in range(160)]  # new to both tenants
    async with session(connections=1) as client:
        reused = [
            (await ask(client, chat.url, tokens, model=chat.model, key=chat.keys[tenant], max_tokens=2)).cached_tokens
            for tenant in ("acme", "acme", "globex")
        ]
    assert (reused[1], reused[2]) == (144, 0), reused
    return {
        "requests": len(load.answers),
        "complete": sum(answer.complete for answer in load.answers),
        "lookedCompleteButWasNot": len(lying),
        "pagesHeld": leaked[0],
        "crossScopeReuse": reused[2],
    }


def held(chat) -> int:
    return sum(page["refcount"] for page in chat.ledger())


@pytest.mark.parametrize("victim", ["engine", "sidecar", "operator"])
async def test_a_killed_process_recovers_and_nothing_lies(chat, system, victim):
    await chat.stage("Full")
    prompts = [[3 + (number * 31 + 7 * n) % 250 for n in range(160)] for number in range(STREAMS)]
    async with session() as client:
        texts = {await whole_text(chat, client, prompt) for prompt in prompts}
    load = chat.load(STREAMS, max_tokens=TOKENS, prompts=lambda number, turn: prompts[number])
    async with load.running():
        await load.wait_for(STREAMS)
        if victim == "operator":
            pod = system.items("pods", "app.kubernetes.io/name=kvsteward-operator")[0]["metadata"]["name"]
            await asyncio.to_thread(system.kill, pod, "operator")
        else:
            pod = (await asyncio.to_thread(chat.kube.pods, chat.name))[0]["metadata"]["name"]
            await asyncio.to_thread(chat.kube.kill, pod, victim)
        await asyncio.sleep(1)
        await asyncio.to_thread(until, "serving again", lambda: chat.observations()[0]["engineEpoch"] > 0, 120)
        done = sum(answer.complete for answer in load.answers)
        async with asyncio.timeout(120):
            while sum(answer.complete for answer in load.answers) < done + 2 * STREAMS:
                await asyncio.sleep(0.1)
    await asyncio.sleep(2)  # the sidecar asks the engine every second whether it is another one
    await chat.in_force("Full", timeout=60)
    figures = await check_after(chat, load, texts, ["engine", "sidecar", "operator"].index(victim))
    if victim == "operator":
        assert all(answer.complete for answer in load.answers), "the operator's death is nobody's business"
    record(f"crash-{victim}", f"kill -9 of the {victim} during load", figures)
    await asyncio.to_thread(chat.kube.wait_for, chat.name, "Ready", "True", 120)

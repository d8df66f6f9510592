"""No tenant gets another's state, at any stage, through the real Service. Every zero has a control beside it that
must not be zero."""

import asyncio
import json

import aiohttp
import pytest
from kvsteward_bench.traffic import ask, session
from support.kube import until
from support.proof import record
from yarl import URL

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def chat(tiny_policy):
    return tiny_policy("isolation", engine={"replicas": 1})


def prompt(seed):
    """200 token ids, of which 192 fill pages."""
    return [3 + (seed * 131 + 7 * position) % 250 for position in range(200)]


async def test_the_same_tokens_are_reused_by_their_own_tenant_only_at_every_stage(chat):
    seen = {}
    for number, stage in enumerate(("Cold", "Shadow", "Canary", "Full")):
        await chat.stage(stage, canary=100)
        tokens = prompt(number)
        async with session(connections=1) as client:
            first, again, other = [
                await ask(client, chat.url, tokens, model=chat.model, key=chat.keys[tenant], max_tokens=8)
                for tenant in ("acme", "acme", "globex")
            ]
        assert first.complete and again.complete and other.complete
        assert first.text == again.text == other.text
        assert first.cached_tokens == other.cached_tokens == 0
        assert again.cached_tokens == (192 if stage in ("Canary", "Full") else 0)
        seen[stage] = {"sameTenant": again.cached_tokens, "otherTenant": other.cached_tokens}
    record("isolation", "cross-tenant, same tokens, every stage, through the Service: 0 reused", seen)


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        pytest.param({}, {"cache_salt": "acme"}, id="vllm-salt"),
        pytest.param({}, {"kv_transfer_params": {"namespace": "acme"}}, id="transfer-params"),
        pytest.param({"X-KV-Tenant": "acme"}, {}, id="tenant-header"),
        pytest.param({"X-KV-Tenant": "acme", "X-KV-Gateway-Token": "guess"}, {}, id="unproven-gateway"),
        pytest.param({"X-Request-Id": "1" * 32}, {}, id="request-id"),
    ],
)
async def test_what_a_client_adds_changes_nothing(chat, headers, fields):
    await chat.stage("Full")
    tokens = prompt(17)
    async with session(connections=1) as client:

        async def reused(tenant, extra_headers=None, **extra):
            answer = await ask(
                client, chat.url, tokens, model=chat.model, key=chat.keys[tenant], headers=extra_headers, **extra
            )
            assert answer.complete, answer.raw
            return answer.cached_tokens

        await reused("acme")
        assert await reused("globex", headers, **fields) in (0, 192)  # 192: globex' own, from an earlier case
        assert await reused("acme", headers, **fields) == 192, "the same additions take nothing from acme either"
    receipts = await asyncio.to_thread(chat.receipts)
    assert {receipt["scopeKind"] for receipt in receipts} <= {"Private", "None"}


async def test_a_forged_directive_is_dropped_and_counted(chat):
    await chat.stage("Full")
    tokens = prompt(23)
    async with session(connections=1) as client:
        mine = await ask(client, chat.url, tokens, model=chat.model, key=chat.keys["acme"])
        warm = await ask(client, chat.url, tokens, model=chat.model, key=chat.keys["acme"])
        assert (mine.cached_tokens, warm.cached_tokens) == (0, 192)
        page = (await asyncio.to_thread(chat.ledger))[0]
        forged = {"request": "0" * 32, "mode": "Reuse", "epoch": 10**6, "namespace": "0" * 64, "scope": page["scope"]}
        answer = await ask(
            client, chat.url, tokens, model=chat.model, key=chat.keys["globex"],
            headers={"X-KV-Directive": json.dumps(forged)},
        )  # fmt: skip
        assert answer.complete and answer.cached_tokens == 0
    assert "kvsteward_dropped_fields_total" in await asyncio.to_thread(chat.metrics)


async def test_two_credentials_are_served_cold(chat):
    await chat.stage("Full")
    tokens = prompt(29)
    async with session(connections=1) as client:
        for _ in range(2):
            control = await ask(client, chat.url, tokens, model=chat.model, key=chat.keys["acme"])
        assert control.cached_tokens == 192
        body = {"model": chat.model, "prompt": tokens, "max_tokens": 4}
        both = [("Authorization", f"Bearer {chat.keys['globex']}"), ("Authorization", f"Bearer {chat.keys['acme']}")]
        async with client.post(f"{chat.url}/v1/completions", json=body, headers=both) as response:
            assert response.status == 200
            usage = (await response.json())["usage"]
            receipt = response.headers["X-KV-Receipt"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    found = await asyncio.to_thread(chat.receipts)
    assert next(each for each in found if each["id"] == receipt)["decision"] == "AmbiguousMetadata"


@pytest.mark.parametrize(
    "path", ["/kv/v1/policy", "/kv/v1/ledger", "/kv/v1/stats", "/metrics", "/v1/../kv/v1/stats", "/%6bv/v1/stats"]
)
async def test_the_engines_own_routes_are_not_there_for_clients(chat, path):
    async with aiohttp.ClientSession() as client:
        async with client.get(f"{chat.url}/health") as control:
            assert control.status == 200
        async with client.get(URL(chat.url + path, encoded=True)) as response:
            assert response.status == 404


async def test_a_port_forward_to_the_engine_is_refused_without_the_pods_token(chat):
    pod = (await asyncio.to_thread(chat.kube.pods, chat.name))[0]["metadata"]["name"]
    process = await asyncio.create_subprocess_exec(
        "kubectl", "-n", chat.kube.namespace, "port-forward", f"pod/{pod}", ":8000", stdout=asyncio.subprocess.PIPE
    )
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
        url = "http://127.0.0.1:" + line.split("127.0.0.1:")[1].split()[0]
        token = await asyncio.to_thread(
            chat.kube.kubectl, "exec", pod, "-c", "engine", "--", "cat", "/run/kvsteward/engine-token"
        )
        async with aiohttp.ClientSession() as client:
            for headers, status in (({}, 401), ({"Authorization": "Bearer guess"}, 401)):
                async with client.get(f"{url}/kv/v1/stats", headers=headers) as response:
                    assert response.status == status
                body = {"model": chat.model, "prompt": "hi", "max_tokens": 1}
                async with client.post(f"{url}/v1/completions", json=body, headers=headers) as response:
                    assert response.status == status
            async with client.get(f"{url}/kv/v1/stats", headers={"Authorization": f"Bearer {token}"}) as control:
                assert control.status == 200
    finally:
        process.terminate()
        await process.wait()
    record("engine-door", "port-forward straight to the engine is refused without the pod's token", {"refused": 4})


async def test_a_revoked_key_loses_the_cache_and_a_new_one_gains_it_without_a_restart(chat):
    """A mounted Secret takes up to about a minute to follow; the annotation makes the kubelet look at once."""
    await chat.stage("Full")
    tokens = prompt(31)

    async def reused(key):
        async with session(connections=1) as client:
            await ask(client, chat.url, tokens, model=chat.model, key=key)
            return (await ask(client, chat.url, tokens, model=chat.model, key=key)).cached_tokens

    old, new = chat.keys["rotating"], "r" * 40
    assert await reused(old) == 192
    assert await reused(new) == 0
    change = {"stringData": {"rotating": new}}
    try:
        await asyncio.to_thread(chat.kube.patch, "secret", "tenant-keys", change)
        await asyncio.to_thread(chat.refresh_mounts)

        async def rotated():
            return await reused(new) == 192 and await reused(old) == 0

        end = asyncio.get_running_loop().time() + 90
        while not await rotated():
            assert asyncio.get_running_loop().time() < end, "the new key was not taken up"
            await asyncio.sleep(0.5)
    finally:
        await asyncio.to_thread(chat.kube.patch, "secret", "tenant-keys", {"stringData": {"rotating": old}})
        await asyncio.to_thread(until, "mounts refreshed", lambda: chat.refresh_mounts() or True)

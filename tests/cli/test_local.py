"""`kvsteward local`: a real engine and a real sidecar under a policy file that is edited while they run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.local_run import LocalRun, confirmed, local_policy
from support.tiny_model import make_tiny_model

together = pytest.mark.asyncio(loop_scope="module")  # the tests that share a run share its event loop
PROMPT = "the cat sat on the mat and then it went to see what the other one had for them. " * 6


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> str:
    """A prompt that no other test has sent."""
    return f"{request.node.name}: {PROMPT}"


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def tiny(tmp_path: Path, tiny_model: Path) -> Callable[..., LocalRun]:
    def make(*options: str, **rollout: Any) -> LocalRun:
        policy = local_policy("tiny", "8Mi", 2048)
        policy["spec"]["rollout"].update(rollout)
        return LocalRun(tmp_path, policy, tiny_model, *options)

    return make


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> AsyncIterator[LocalRun]:
    """One run for all the tests that leave it as they found it, at Full."""
    async with LocalRun(tmp_path_factory.mktemp("local"), local_policy("tiny", "8Mi", 2048), tiny_model) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def run(shared: LocalRun) -> AsyncIterator[LocalRun]:
    version = (await shared.observation())["policyVersion"]
    yield shared
    shared.policy = local_policy("tiny", "8Mi", 2048)
    shared.write()
    # The version: at Full before and after, a policy may still be the one that the test has left.
    await shared.until(lambda seen: seen["policyVersion"] == version and not seen["problems"])
    await shared.until(lambda seen: seen["stage"] == "Full" and not seen["coldRequested"])
    await shared.until(confirmed)


@together
async def test_a_tenant_reuses_its_own_state_and_never_anothers(run: LocalRun, prompt: str) -> None:
    first = await run.chat("acme", prompt)
    second = await run.chat("acme", prompt)
    other = await run.chat("globex", prompt)
    other_again = await run.chat("globex", prompt, stream=True)
    assert first.cached_tokens == 0
    assert second.cached_tokens > 0.8 * second.prompt_tokens
    assert second.cached_tokens % 16 == 0
    assert other.cached_tokens == 0
    assert other_again.cached_tokens == second.cached_tokens
    assert first.text == second.text == other.text == other_again.text
    assert (await run.receipt(second))["reusedTokens"] == second.cached_tokens
    assert set((await run.receipt(other))["misses"]) <= {"ScopeMismatch", "UnseenBlock"}


@together
async def test_stages_and_the_switch_follow_edits_of_the_file(run: LocalRun, prompt: str) -> None:
    await run.chat("acme", prompt)
    assert (await run.chat("acme", prompt)).cached_tokens > 0
    seen = {}
    for name, rollout in {
        "Cold": {"stage": "Cold"},
        "Shadow": {"stage": "Shadow"},
        "CanaryOfNobody": {"stage": "Canary", "canary": {"percent": 0}},
        "CanaryOfAll": {"stage": "Canary", "canary": {"percent": 100}},
        "Full": {"stage": "Full"},
        "Engaged": {"stage": "Full", "killSwitch": "Engaged"},
        "Released": {"stage": "Full", "killSwitch": "Released"},
    }.items():
        await run.edit(**rollout)
        answer = await run.chat("acme", prompt)
        receipt = await run.receipt(answer)
        seen[name] = (receipt["decision"], receipt["mode"], answer.cached_tokens > 0, receipt["eligibleTokens"] > 0)
    assert seen == {
        "Cold": ("ColdStage", "Cold", False, False),
        "Shadow": ("ShadowStage", "Shadow", False, True),
        "CanaryOfNobody": ("NotInCohort", "Shadow", False, True),
        "CanaryOfAll": ("Reuse", "Reuse", True, True),
        "Full": ("Reuse", "Reuse", True, True),
        "Engaged": ("KillSwitch", "Cold", False, False),
        "Released": ("Reuse", "Reuse", True, True),
    }


@together
async def test_the_switch_is_confirmed_within_a_second_of_the_edit(run: LocalRun, prompt: str) -> None:
    began = asyncio.get_running_loop().time()
    await run.edit(killSwitch="Engaged")
    assert asyncio.get_running_loop().time() - began < 1.0
    seen = await run.observation()
    assert (seen["coldRequested"], seen["coldConfirmed"]) == (True, True)


@together
async def test_a_bad_edit_is_named_and_leaves_the_policy_running(run: LocalRun, prompt: str) -> None:
    before = await run.observation()
    run.policy["spec"]["rollout"]["novelty"] = 1
    run.write()
    await run.until(lambda seen: bool(seen["problems"]))
    seen = await run.observation()
    assert "novelty" in seen["problems"][0]
    assert seen["policyVersion"] == before["policyVersion"]
    await run.chat("acme", prompt)
    assert (await run.chat("acme", prompt)).cached_tokens > 0


@together
async def test_a_request_without_a_key_is_served_cold(run: LocalRun, prompt: str) -> None:
    for _ in range(2):
        answer = await run.chat(None, prompt)
        assert (answer.status, answer.cached_tokens) == (200, 0)
        assert (await run.receipt(answer))["decision"] == "NoTenant"
    await run.chat("acme", prompt)
    assert (await run.chat("acme", prompt)).cached_tokens > 0


@together
async def test_what_steers_the_cache_is_not_taken_from_clients(run: LocalRun, prompt: str) -> None:
    await run.chat("acme", prompt)
    await run.chat("acme", prompt)
    ledger = await run.admin("/v1/ledger?limit=100")
    assert ledger["pages"]
    stolen = ledger["pages"][0]
    answer = await run.chat("globex", prompt, cache_salt=stolen["scope"], kv_transfer_params={"scope": stolen["scope"]})
    assert (answer.status, answer.cached_tokens) == (200, 0)
    async with run.client.get(run.url + "/kv/v1/policy") as refused:
        assert refused.status == 404
    async with run.client.get(run.admin_url + "/metrics") as metrics:
        text = await metrics.text()
    assert 'kvsteward_dropped_fields_total{field="cache_salt"} 1.0' in text


@together
async def test_the_cold_latch_holds_until_it_is_released(run: LocalRun, prompt: str) -> None:
    await run.chat("acme", prompt)
    await run.admin("/v1/cold", "POST")
    await run.until(lambda seen: seen["coldConfirmed"])
    assert (await run.chat("acme", prompt)).cached_tokens == 0
    await run.admin("/v1/cold", "DELETE")
    await run.until(lambda seen: not seen["coldRequested"] and confirmed(seen))
    assert (await run.chat("acme", prompt)).cached_tokens > 0


@pytest.mark.slow
async def test_an_interrupt_ends_everything_and_leaves_nothing(tiny: Callable[..., LocalRun]) -> None:
    async with tiny() as run:
        pids = run.pids()
        assert len(pids) == 2
        assert list(run.temporary.iterdir())
        run.process.send_signal(signal.SIGINT)
        assert await run.ended(15) == 0
        assert not any(alive(pid) for pid in pids)
        assert not list(run.temporary.iterdir())


@pytest.mark.slow
async def test_a_stream_that_runs_is_finished_before_the_end(tiny: Callable[..., LocalRun]) -> None:
    async with tiny() as run:
        streaming = asyncio.create_task(
            run.chat("acme", PROMPT, stream=True, max_tokens=200, ignore_eos=True)
        )
        await run.until(lambda seen: seen["inFlight"] == 1)
        run.process.send_signal(signal.SIGTERM)
        answer = await streaming
        assert answer.status == 200
        assert await run.ended(15) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), [(0, "sidecar"), (1, "engine")])
async def test_a_child_that_dies_ends_it_with_a_sentence(
    tiny: Callable[..., LocalRun], number: int, name: str
) -> None:
    async with tiny() as run:
        pids = run.pids()
        os.kill(pids[number], signal.SIGKILL)
        assert await run.ended(15) == 1
        assert f"kvsteward: the {name} ended by itself with status -9" in run.said[-1]
        assert not any(alive(pid) for pid in pids)
        assert not list(run.temporary.iterdir())


@pytest.mark.slow
async def test_its_own_violent_end_leaves_no_children(tiny: Callable[..., LocalRun]) -> None:
    async with tiny() as run:
        pids = run.pids()
        run.process.kill()
        await run.ended()
        async with asyncio.timeout(15):
            while any(alive(pid) for pid in pids):
                await asyncio.sleep(0.05)


def alive(pid: int) -> bool:
    """True for a process that runs; one that has ended and was not yet waited for doesn't count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.model
@pytest.mark.slow
async def test_the_real_model_reuses_per_tenant_and_obeys_edits(tmp_path: Path, smollm2: Path) -> None:
    policy = local_policy("smollm2-135m-instruct", "128Mi", 2048)
    prompt = "Explain in simple words how a library lends books to its readers. " * 12
    async with LocalRun(tmp_path, policy, smollm2) as run:
        cold = await run.chat("acme", prompt)
        warm = await run.chat("acme", prompt)
        other = await run.chat("globex", prompt)
        assert (cold.cached_tokens, other.cached_tokens) == (0, 0)
        assert warm.cached_tokens >= 128
        assert cold.text == warm.text == other.text
        assert len(cold.text) > 10
        await run.edit(stage="Shadow")
        assert (await run.chat("acme", prompt)).cached_tokens == 0
        await run.edit(stage="Full")
        assert (await run.chat("acme", prompt)).cached_tokens == warm.cached_tokens
        await run.edit(killSwitch="Engaged")
        assert (await run.chat("acme", prompt)).cached_tokens == 0

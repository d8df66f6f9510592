"""Steps and their mishaps, and the thread that runs them for an event loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator

import pytest
from kvsteward_contract.directive import EnginePolicy, Mode, Retention
from kvsteward_contract.identity import output_digest
from kvsteward_engine.core import EngineThread
from kvsteward_engine.errors import EngineFailed, InvalidRequest, OutOfMemory, QueueFull
from kvsteward_engine.sequence import NO_TOKEN, Finish, Sampled, SamplingParams, Step
from support.fake_engine import FakeEngine, FakeRunner, cold_tokens, directive, prompt_of, settings

PROMPT = prompt_of(5, 22)


def test_the_outcome_tells_the_costs_apart() -> None:
    engine = FakeEngine(max_concurrent=1)
    engine.permit()
    engine.submit("before", prompt_of(1, 8), SamplingParams(max_tokens=2), None)
    engine.go()
    engine.submit("x", PROMPT, SamplingParams(max_tokens=3), directive())
    engine.clock.now += 2.0
    engine.go()
    run = engine.runner.run

    def slow(step: Step) -> list[Sampled]:
        engine.clock.now += 0.5
        return run(step)

    engine.runner.run = slow  # type: ignore[method-assign]
    engine.finish_all()
    outcome = engine.outcome("x")
    assert outcome is not None
    assert (outcome.queue_seconds, outcome.prefill_seconds, outcome.decode_seconds) == (2.0, 1.0, 1.0)
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.peak_pages, outcome.stored_pages) == (22, 3, 6, 6)
    assert (outcome.finish, outcome.epoch, outcome.mode) == ("length", 1, Mode.REUSE)
    assert outcome.output_digest == output_digest(bytes.fromhex("ab" * 32), cold_tokens(PROMPT, 3))


def test_without_a_policy_there_is_no_digest_rather_than_an_unkeyed_one() -> None:
    engine = FakeEngine()
    engine.complete("x", PROMPT)
    assert engine.endings["x"].outcome.output_digest == ""


def test_stop_tokens_end_a_sequence_and_ignore_eos_spares_the_models_own() -> None:
    tokens = cold_tokens(PROMPT, 8)
    engine = FakeEngine(eos_token_ids=frozenset({tokens[4]}))
    sampling = {
        "eos": (SamplingParams(max_tokens=8), 5),
        "no-eos": (SamplingParams(max_tokens=8, ignore_eos=True), 8),
        "stop": (SamplingParams(max_tokens=8, ignore_eos=True, stop_token_ids=frozenset({tokens[1]})), 2),
    }
    for name, (params, _) in sampling.items():
        engine.submit(name, PROMPT, params, None)
    engine.finish_all()
    for name, (_, count) in sampling.items():
        assert engine.results[name] == tokens[:count], name
    assert engine.endings["stop"].finish is Finish.STOP


def test_a_servers_stop_ends_the_answer_with_the_token_it_was_shown() -> None:
    engine = FakeEngine()
    seen: list[int] = []

    def stop(token: int) -> bool:
        seen.append(token)
        return len(seen) == 3

    engine.submit("x", PROMPT, SamplingParams(max_tokens=8), None, stop)
    engine.finish_all()
    assert engine.results["x"] == seen == cold_tokens(PROMPT, 3)
    assert engine.endings["x"].finish is Finish.STOP


def test_a_stop_that_fails_ends_its_own_request_alone() -> None:
    engine = FakeEngine()

    def stop(_token: int) -> bool:
        raise ValueError("bad text")

    engine.submit("x", PROMPT, SamplingParams(max_tokens=8), None, stop)
    engine.submit("y", PROMPT, SamplingParams(max_tokens=8), None)
    engine.finish_all()
    assert "bad text" in engine.endings["x"].error
    assert engine.results["y"] == cold_tokens(PROMPT, 8)


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_a_cancelled_request_is_gone_after_a_step_wherever_it_was(steps: int) -> None:
    engine = FakeEngine()
    engine.permit()
    engine.submit("x", prompt_of(2, 40), SamplingParams(max_tokens=20), directive())
    engine.go(steps)
    engine.cancel("x")
    engine.go()
    assert engine.endings["x"].finish is Finish.CANCELLED
    assert engine.outcome("x").finish == "cancelled"
    assert engine.residency.pages.available == 32
    assert (engine.has_work(), engine.faults()) == (False, [])


def test_a_request_cancelled_while_its_step_runs_gets_no_more_tokens_and_leaves_complete_pages() -> None:
    engine = FakeEngine()
    engine.permit()
    run = engine.runner.run

    def cancelling(step: Step) -> list[Sampled]:
        engine.cancel("x")
        return run(step)

    engine.runner.run = cancelling  # type: ignore[method-assign]
    engine.submit("x", PROMPT, SamplingParams(max_tokens=20), directive())
    engine.go()
    assert (engine.endings["x"].finish, engine.results["x"]) == (Finish.CANCELLED, [])
    engine.runner.run = run  # type: ignore[method-assign]
    engine.complete("again", PROMPT, 2, directive())
    assert engine.outcome("again").reused_tokens == 16
    assert engine.results["again"] == cold_tokens(PROMPT, 2)


def test_cancelling_what_is_unknown_or_over_does_nothing() -> None:
    engine = FakeEngine()
    engine.complete("x", PROMPT)
    engine.cancel("x")
    engine.cancel("never")
    engine.go()
    assert (engine.outcome("x").finish, engine.outcome("never")) == ("length", None)


def test_a_failed_step_fails_its_requests_and_spares_the_waiting_ones() -> None:
    engine = FakeEngine(max_concurrent=1)
    engine.permit()
    engine.submit("x", PROMPT, SamplingParams(max_tokens=4), directive())
    engine.submit("y", PROMPT, SamplingParams(max_tokens=4), directive())
    engine.runner.faults = [ValueError("a kernel went wrong")]
    engine.finish_all()
    assert engine.endings["x"].finish is Finish.ERROR
    assert "a kernel went wrong" in engine.endings["x"].error
    assert engine.outcome("y").reused_tokens == 0
    assert engine.results["y"] == cold_tokens(PROMPT, 4)
    assert (engine.failed, engine.faults()) == (None, [])


def test_pages_of_a_failed_step_are_never_matched() -> None:
    engine = FakeEngine()
    engine.permit()
    engine.submit("x", prompt_of(2, 40), SamplingParams(max_tokens=4), directive())
    engine.go(1)
    engine.runner.faults = [ValueError("broken")]
    engine.go(1)
    assert engine.residency.pages.resident_by_kind["Private"] == 4  # those of the first step alone


def test_a_sequence_without_finite_logits_ends_alone_and_leaves_nothing_behind() -> None:
    """Or whoever finds a prompt that overflows could end the engine for everybody with three of them."""
    engine = FakeEngine()
    engine.permit()
    overflowing, run = prompt_of(7, 14), engine.runner.run

    def sometimes(step: Step) -> list[Sampled]:
        works = [work for work in step.works if work.sample]
        return [
            Sampled(NO_TOKEN) if work.sequence.tokens[:14] == overflowing else one
            for work, one in zip(works, run(step), strict=True)
        ]

    engine.runner.run = sometimes  # type: ignore[method-assign]
    for number in range(5):
        engine.submit(f"bad-{number}", overflowing, SamplingParams(max_tokens=4), directive())
    engine.submit("good", PROMPT, SamplingParams(max_tokens=8), directive())
    engine.finish_all()
    assert engine.results["good"] == cold_tokens(PROMPT, 8)
    for number in range(5):
        assert engine.endings[f"bad-{number}"].finish is Finish.ERROR
        assert "aren't finite" in engine.endings[f"bad-{number}"].error
        assert engine.outcome(f"bad-{number}").stored_pages == 0
    assert (engine.failed, engine.faults()) == (None, [])


def test_three_failed_steps_in_a_row_end_the_engine_for_all() -> None:
    engine = FakeEngine(max_concurrent=1)
    for name in "abcde":
        engine.submit(name, PROMPT, SamplingParams(max_tokens=4), None)
    engine.runner.faults = [ValueError("broken")] * 3
    engine.finish_all()
    assert {name: delta.finish for name, delta in engine.endings.items()} == dict.fromkeys("abcde", Finish.ERROR)
    assert "3 steps in a row failed" in str(engine.failed)
    with pytest.raises(EngineFailed, match="3 steps in a row"):
        engine.submit("f", PROMPT, SamplingParams(), None)


def test_out_of_memory_preempts_shrinks_the_steps_and_loses_no_request() -> None:
    engine = FakeEngine(64, prefill_chunk=32)
    prompts = {name: prompt_of(number, 30) for number, name in enumerate("abcd")}
    for name, prompt in prompts.items():
        engine.submit(name, prompt, SamplingParams(max_tokens=6), None)
    engine.go(3)
    engine.runner.faults = [OutOfMemory("no room"), OutOfMemory("no room")]
    engine.finish_all()
    for name, prompt in prompts.items():
        assert engine.results[name] == cold_tokens(prompt, 6)
    stats = engine.stats()
    assert stats["oomRecoveries"] == 2 and stats["preemptions"] > 0
    assert engine.faults() == []


def test_out_of_memory_among_decodes_lets_fewer_run_until_it_has_been_quiet() -> None:
    engine = FakeEngine(512)
    for number in range(8):
        engine.submit(str(number), prompt_of(number, 4), SamplingParams(max_tokens=200), None)
    engine.go(10)
    assert len(engine.scheduler.running) == 8
    engine.runner.faults = [OutOfMemory("no room")]
    engine.go(40)
    assert len(engine.scheduler.running) == 4
    engine.go(40)
    assert len(engine.scheduler.running) == 8
    engine.finish_all()
    assert engine.results["7"] == cold_tokens(prompt_of(7, 4), 200)


def test_a_request_that_the_device_cannot_hold_by_itself_fails_with_a_clear_error() -> None:
    engine = FakeEngine(64)
    engine.submit("x", PROMPT, SamplingParams(max_tokens=6), None)
    engine.runner.faults = [OutOfMemory("no room")] * 20
    engine.finish_all()
    assert "even by itself the request does not fit" in engine.endings["x"].error
    engine.runner.faults.clear()
    assert engine.complete("y", PROMPT, 3) == cold_tokens(PROMPT, 3)


def test_the_ring_of_outcomes_forgets_the_oldest() -> None:
    engine = FakeEngine(outcomes=3)
    for number in range(5):
        engine.complete(str(number), prompt_of(number, 5), 1)
    assert [engine.outcome(str(number)) is not None for number in range(5)] == [False, False, True, True, True]


def test_log_probabilities_come_only_where_asked_for() -> None:
    engine = FakeEngine()
    engine.submit("plain", PROMPT, SamplingParams(max_tokens=1), None)
    engine.submit("asked", PROMPT, SamplingParams(max_tokens=1, logprobs=1), None)
    engine.finish_all()
    assert engine.endings["plain"].sampled is None
    assert engine.endings["asked"].sampled[0].token == engine.results["asked"][0]


def test_scheduling_and_pages_know_nothing_of_torch() -> None:
    code = "import sys, kvsteward_engine.core, kvsteward_engine.audit; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- the thread


class Gate(FakeRunner):
    """A fake runner whose steps can be held up."""

    def __init__(self, pages: int) -> None:
        super().__init__(pages)
        self.open = threading.Event()
        self.open.set()
        self.inside = threading.Event()
        self.pace = 0.0  # seconds a step takes

    def run(self, step: Step) -> list[Sampled]:
        """Waits for the gate."""
        self.inside.set()
        assert self.open.wait(10)
        time.sleep(self.pace)
        return super().run(step)


@pytest.fixture
async def served() -> AsyncIterator[EngineThread]:
    """A running engine with a policy."""
    failures: list[str] = []
    thread = EngineThread(Gate(64), settings(64), failures.append)
    thread.failures = failures  # type: ignore[attr-defined]
    thread.set_policy(EnginePolicy(1, "v1", {"private": Retention()}))
    thread.start()
    yield thread
    thread.engine._runner.open.set()  # type: ignore[attr-defined]
    thread.stop()


async def ask(thread: EngineThread, name: str, prompt: list[int], count: int = 6) -> tuple[list[int], object]:
    """The whole answer and its outcome."""
    tokens: list[int] = []
    outcome = None
    async for delta in thread.generate(name, prompt, SamplingParams(max_tokens=count), directive()):
        tokens += delta.token_ids
        outcome = delta.outcome
    return tokens, outcome


async def until(met: object, seconds: float = 5.0) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not met():  # type: ignore[operator]
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def test_many_streams_at_once_each_get_their_own_tokens(served: EngineThread) -> None:
    prompts = {f"{number:032x}": prompt_of(number % 5, 20 + number) for number in range(16)}
    answers = await asyncio.gather(*(ask(served, name, prompt) for name, prompt in prompts.items()))
    for prompt, (tokens, outcome) in zip(prompts.values(), answers, strict=True):
        assert tokens == cold_tokens(prompt, 6)
        assert outcome is not None
    assert served.stats()["running"] == 0


async def test_closing_the_generator_cancels_within_a_step_and_the_outcome_can_be_fetched(served: EngineThread) -> None:
    served.engine._runner.pace = 0.01  # slower than this test, on a busy machine too
    deltas = served.generate("x", PROMPT, SamplingParams(max_tokens=200), directive())
    async for _ in deltas:
        break
    await deltas.aclose()
    await until(lambda: served.outcome("x") is not None)
    assert served.outcome("x").finish == "cancelled"
    assert not served.in_flight("x")
    assert served.stats()["freePages"] + served.stats()["retainedPages"] == 64


async def test_a_slow_reader_finds_its_tokens_merged_and_complete(served: EngineThread) -> None:
    deltas = served.generate("x", PROMPT, SamplingParams(max_tokens=30, logprobs=0), None)
    parts = [await anext(deltas)]
    await until(lambda: served.outcome("x") is not None)
    await asyncio.sleep(0)
    parts += [delta async for delta in deltas]
    assert [token for delta in parts for token in delta.token_ids] == cold_tokens(PROMPT, 30)
    assert sum(len(delta.sampled) for delta in parts) == 30
    assert len(parts) < 30
    assert parts[-1].finish is Finish.LENGTH


async def test_a_policy_is_confirmed_while_a_step_is_being_computed(served: EngineThread) -> None:
    gate = served.engine._runner
    assert isinstance(gate, Gate)
    gate.open.clear()
    running = asyncio.create_task(ask(served, "x", PROMPT))
    await until(gate.inside.is_set)
    started = time.monotonic()
    state = await asyncio.to_thread(served.set_policy, EnginePolicy(2, "v2", {"private": Retention()}))
    assert state.epoch == 2
    assert time.monotonic() - started < 1.0
    gate.open.set()
    assert (await running)[0] == cold_tokens(PROMPT, 6)
    assert served.stats()["residentPages"] == {}  # the step had begun, its pages were not yet published


async def test_a_runner_that_keeps_failing_is_told_to_the_owner_and_to_every_request(served: EngineThread) -> None:
    served.engine._runner.faults = [ValueError("broken")] * 50  # type: ignore[attr-defined]
    for number in range(3):
        with pytest.raises(EngineFailed, match="broken"):
            await ask(served, str(number), PROMPT)
    await until(lambda: served.failures)  # type: ignore[attr-defined]
    assert served.failed is not None
    with pytest.raises(EngineFailed):
        await ask(served, "later", PROMPT)


async def test_a_bug_in_the_engine_ends_the_thread_but_not_unnoticed(
    served: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(_now: float) -> None:
        raise KeyError("bug")

    monkeypatch.setattr(served.engine.scheduler, "plan", bug)
    with pytest.raises(EngineFailed, match="KeyError"):
        await ask(served, "x", PROMPT)
    await until(lambda: served.failures)  # type: ignore[attr-defined]
    with pytest.raises(EngineFailed):
        await ask(served, "y", PROMPT)


async def test_refusals_reach_the_caller_and_leave_nothing_behind(served: EngineThread) -> None:
    with pytest.raises(InvalidRequest):
        await ask(served, "x", [])
    served.engine.scheduler.queues._max_waiting = 0
    with pytest.raises(QueueFull):
        await ask(served, "x", PROMPT)
    assert (served._streams, served.in_flight("x")) == ({}, False)


async def test_stopping_ends_what_runs_as_an_error(served: EngineThread) -> None:
    running = asyncio.create_task(ask(served, "x", PROMPT, 200))
    await until(lambda: served.in_flight("x"))
    await asyncio.to_thread(served.stop)
    with pytest.raises(EngineFailed, match="stopping"):
        await running

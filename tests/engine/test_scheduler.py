"""Whose turn it is: decodes first, fair shares of prompt tokens, room made by preemption, a bounded queue."""

from __future__ import annotations

import pytest
from kvsteward_contract.directive import Mode, Retention
from kvsteward_engine.errors import BrokenInvariant, InvalidRequest, QueueFull, StartError
from kvsteward_engine.sequence import SamplingParams
from support.fake_engine import BLOCK, VOCAB, FakeEngine, cold_tokens, directive, prompt_of, settings


def ask(engine: FakeEngine, name: str, tenant: str, length: int, count: int = 2, seed: int | None = None) -> None:
    """Submit a cold request of a tenant."""
    given = directive(tenant, Mode.COLD)
    prompt = prompt_of(len(engine._requests) + 1 if seed is None else seed, length)
    engine.submit(name, prompt, SamplingParams(max_tokens=count), given)


def tokens_of(step: list[tuple[str, int, int]]) -> int:
    """Positions a step computed."""
    return sum(count for _, _, count in step)


def test_a_long_prompt_is_computed_in_parts_that_end_with_pages_while_others_decode() -> None:
    engine = FakeEngine(64, prefill_chunk=16)
    ask(engine, "decoding", "a", 6, count=30)
    engine.go()
    ask(engine, "long", "b", 50)
    engine.go(6)
    parts = [(start, count) for step in engine.runner.steps for name, start, count in step if name == "long"]
    assert parts == [(0, 12), (12, 12), (24, 12), (36, 12), (48, 2), (50, 1)]
    assert all(step[0][0] == "decoding" for step in engine.runner.steps)
    assert all(tokens_of(step) <= 16 for step in engine.runner.steps)


def test_prompt_tokens_are_shared_evenly_between_tenants_whatever_their_number_of_requests() -> None:
    engine = FakeEngine(200, prefill_chunk=16, max_concurrent=64)
    for number in range(10):
        ask(engine, f"burst-{number}", "a", 40)
    ask(engine, "single", "b", 40)
    engine.go(6)
    shares = {"a": 0, "b": 0}
    for step in engine.runner.steps[:4]:
        for name, _, count in step:
            shares["b" if name == "single" else "a"] += count
    assert abs(shares["a"] - shares["b"]) <= engine.settings.quantum
    assert "single" in engine.results


def test_a_burst_of_one_tenant_delays_another_by_no_more_than_its_turn() -> None:
    engine = FakeEngine(200, prefill_chunk=16, max_concurrent=64, max_waiting=64)
    for number in range(40):
        ask(engine, f"burst-{number}", "a", 32)
    engine.go(3)
    ask(engine, "late", "b", 12)
    engine.go(2)
    assert "late" in engine.results


def test_only_a_quarter_step_goes_to_each_queue_in_a_turn_and_nothing_of_the_step_is_wasted() -> None:
    engine = FakeEngine(200, prefill_chunk=16)
    for tenant in "abcde":
        ask(engine, tenant, tenant, 40)
    engine.go(2)
    assert [tokens_of(step) for step in engine.runner.steps] == [16, 16]
    assert engine.runner.steps[0] == [("a", 0, 4), ("b", 0, 4), ("c", 0, 4), ("d", 0, 4)]
    assert engine.runner.steps[1] == [("e", 0, 4), ("a", 4, 4), ("b", 4, 4), ("c", 4, 4)]


def test_max_in_flight_bounds_the_running_requests_of_one_tenant_and_of_no_other() -> None:
    engine = FakeEngine(64)
    engine.permit(private=Retention(max_in_flight=2))
    for number in range(5):
        ask(engine, f"a{number}", "a", 4, count=20)
    ask(engine, "b0", "b", 4, count=20)
    engine.go(6)
    assert set(engine.scheduler.running) == {"a0", "a1", "b0"}
    engine.finish_all()
    assert len(engine.endings) == 6


def test_no_more_than_max_concurrent_run() -> None:
    engine = FakeEngine(64, max_concurrent=3)
    for number in range(6):
        ask(engine, str(number), "abc"[number % 3], 4, count=9)
    for _ in range(30):
        engine.go()
        assert len(engine.scheduler.running) <= 3
    assert len(engine.endings) == 6


def test_the_queue_is_bounded_and_the_last_places_are_kept_for_other_tenants() -> None:
    engine = FakeEngine(64, max_waiting=16)
    for number in range(14):
        ask(engine, str(number), "a", 4)
    with pytest.raises(QueueFull, match="this client's requests are waiting"):
        ask(engine, "one more", "a", 4)
    ask(engine, "b0", "b", 4)
    ask(engine, "c0", "c", 4)
    with pytest.raises(QueueFull, match="16 requests are waiting"):
        ask(engine, "d0", "d", 4)
    engine.finish_all()
    assert len(engine.endings) == 16
    ask(engine, "later", "d", 4)


def test_when_pages_run_out_the_youngest_request_of_the_tenant_with_most_pages_is_preempted() -> None:
    engine = FakeEngine(12, max_concurrent=8)
    for name, tenant in (("a0", "a"), ("a1", "a"), ("b0", "b")):
        engine.clock.now += 1
        ask(engine, name, tenant, 12, count=12, seed=ord(name[0]) + ord(name[1]))
    engine.finish_all()
    preempted = {name: delta.outcome.preemptions for name, delta in engine.endings.items()}
    assert preempted["a1"] > 0
    assert (preempted["a0"], preempted["b0"]) == (0, 0)
    for name in ("a0", "a1", "b0"):
        assert engine.results[name] == cold_tokens(prompt_of(ord(name[0]) + ord(name[1]), 12), 12)
    assert engine.stats()["preemptions"] == preempted["a1"]


def test_cached_pages_go_before_anything_is_preempted() -> None:
    engine = FakeEngine(12)
    engine.permit()
    engine.complete("cached", prompt_of(1, 20), 4, directive())
    assert engine.stats()["retainedPages"] == 5
    ask(engine, "a", "a", 16, count=30)
    engine.finish_all()
    assert engine.stats()["preemptions"] == 0
    assert engine.stats()["evictions"] == {"Capacity": 5}


def test_a_preempted_request_finds_its_own_pages_again() -> None:
    engine = FakeEngine(32)
    engine.permit()
    prompt = prompt_of(4, 20)
    engine.submit("x", prompt, SamplingParams(max_tokens=10), directive())
    engine.go(5)
    engine.scheduler.preempt(engine._requests["x"], engine.clock.now)
    engine.runner.steps.clear()
    engine.finish_all()
    assert engine.runner.steps[0] == [("x", 20, 4)]
    assert engine.results["x"] == cold_tokens(prompt, 10)


def test_a_large_request_is_not_overtaken_for_ever() -> None:
    engine = FakeEngine(20, max_concurrent=8, max_waiting=600, prefill_chunk=64)
    for number in range(4):
        ask(engine, f"small-{number}", "a", 8, count=10)
    engine.go(2)
    ask(engine, "large", "b", 70, count=2)
    for number in range(400):
        ask(engine, f"more-{number}", "a", 8, count=10)
        engine.go()
        if "large" in engine.endings:
            break
    assert number < 300
    assert engine.endings["large"].finish is not None


@pytest.mark.parametrize(
    ("prompt", "count", "message"),
    [
        pytest.param([], 4, "the prompt has no tokens", id="empty"),
        pytest.param([VOCAB], 4, "outside the vocabulary", id="token too large"),
        pytest.param([-1], 4, "outside the vocabulary", id="token negative"),
        pytest.param(prompt_of(1, 250), 7, "more than the 256 this engine serves", id="past the context"),
        pytest.param(prompt_of(1, 30), 4, "do not fit into the cache's 32 tokens", id="past the pool"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(prompt: list[int], count: int, message: str) -> None:
    engine = FakeEngine(8)
    with pytest.raises(InvalidRequest, match=message):
        engine.submit("x", prompt, SamplingParams(max_tokens=count), None)
    assert not engine.has_work()


def test_the_largest_request_that_fits_is_served() -> None:
    engine = FakeEngine(8)
    prompt = prompt_of(1, 29)
    assert engine.complete("x", prompt, 4) == cold_tokens(prompt, 4)


def test_a_request_id_can_be_in_the_engine_only_once() -> None:
    engine = FakeEngine()
    ask(engine, "x", "a", 4)
    with pytest.raises(InvalidRequest, match="running already"):
        ask(engine, "x", "a", 4)


def test_preempting_when_nothing_runs_is_refused() -> None:
    with pytest.raises(BrokenInvariant):
        FakeEngine().scheduler.victim()


@pytest.mark.parametrize("name", ["pages", "block_tokens", "max_tokens", "max_concurrent", "prefill_chunk"])
def test_limits_of_nothing_are_refused_at_start(name: str) -> None:
    with pytest.raises(StartError, match=name):
        settings(**{name: 0})


def test_a_quantum_is_whole_pages_and_never_nothing() -> None:
    assert settings(prefill_chunk=64).quantum == 16
    assert settings(prefill_chunk=1).quantum == BLOCK

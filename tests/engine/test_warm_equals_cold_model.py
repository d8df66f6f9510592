"""A real model on the real engine: 200 random prompts, mixed with cancellations, preemptions and evictions, give the
tokens of cold runs; with `--deterministic` the same log probabilities to the last bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from kvsteward_contract.directive import EnginePolicy, Mode, Retention
from kvsteward_contract.identity import Identity
from kvsteward_engine.audit import faults
from kvsteward_engine.core import Engine, EngineSettings
from kvsteward_engine.errors import QueueFull
from kvsteward_engine.runner import Runner
from kvsteward_engine.sequence import SamplingParams
from support.fake_engine import directive
from support.proof import record
from support.tiny_model import make_tiny_model

PROMPTS = 200
BLOCK = 8
PAGES = 40  # too few for what runs at once, so that requests are preempted and pages evicted

pytestmark = pytest.mark.slow


class Life:
    """An engine over a tiny model, and what its requests got."""

    def __init__(self, runner: Runner, pages: int, **limits: int) -> None:
        identity = Identity("r1", "r1", "", "FP32/8", b"")
        settings = EngineSettings(pages, BLOCK, 400, identity, prefill_chunk=64, **limits)
        self.engine = Engine(runner, settings)
        self.engine.set_policy(EnginePolicy(1, "v1", {"private": Retention(quota_percent=60)}))
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float | None]] = {}
        self.ended: dict[str, str] = {}

    def step(self) -> None:
        """One step."""
        for delta in self.engine.step():
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            self.logprobs.setdefault(delta.request_id, []).extend(one.logprob for one in delta.sampled or ())
            if delta.finish is not None:
                self.ended[delta.request_id] = delta.finish.value


def requests(vocabulary: int) -> list[tuple[list[int], SamplingParams]]:
    """Random prompts, most of which begin like others; a third of them is sampled."""
    roll = random.Random(7)
    stems = [[roll.randrange(vocabulary) for _ in range(80)] for _ in range(6)]
    made = []
    for number in range(PROMPTS):
        prompt = roll.choice(stems)[: roll.randrange(80)] + [
            roll.randrange(vocabulary) for _ in range(roll.randrange(1, 20))
        ]
        sampled = {"temperature": 0.9, "top_p": 0.95, "seed": number} if number % 3 == 0 else {}
        made.append((prompt, SamplingParams(max_tokens=roll.randrange(1, 48), logprobs=0, ignore_eos=True, **sampled)))
    return made


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_two_hundred_warm_answers_are_the_cold_ones(tmp_path: Path, deterministic: bool) -> None:
    runner = Runner(make_tiny_model(tmp_path), "FP32", PAGES, BLOCK, deterministic, "cpu", threads=1)
    asked = requests(runner.vocab_size)
    cold = Life(runner, PAGES)
    for number, (prompt, sampling) in enumerate(asked):
        cold.engine.submit(str(number), prompt, sampling, None)
        while cold.engine.has_work():
            cold.step()
    warm = Life(runner, PAGES, max_concurrent=12, max_waiting=24)
    roll = random.Random(3)
    waiting = list(range(PROMPTS))
    while waiting or warm.engine.has_work():
        while waiting and roll.random() < 0.6:
            number = waiting[0]
            mode = Mode.COLD if number % 10 == 0 else Mode.REUSE
            try:
                warm.engine.submit(str(number), *asked[number], directive("ab"[number % 2], mode))
            except QueueFull:
                break
            waiting.pop(0)
        if roll.random() < 0.05:
            running = [name for name in map(str, range(PROMPTS)) if warm.engine.in_flight(name)]
            if running:
                warm.engine.cancel(roll.choice(running))
        warm.step()
    outcomes = [warm.engine.outcome(str(number)) for number in range(PROMPTS)]
    for number in range(PROMPTS):
        name = str(number)
        length = len(warm.tokens.get(name, []))
        assert warm.tokens.get(name, []) == cold.tokens[name][:length], name
        assert length == len(cold.tokens[name]) or warm.ended[name] == "cancelled"
        if deterministic:
            assert warm.logprobs.get(name, []) == cold.logprobs[name][:length], name
    assert sum(outcome.reused_tokens > 0 for outcome in outcomes) > PROMPTS // 5
    assert sum(outcome.preemptions > 0 for outcome in outcomes) > 5
    assert sum(outcome.finish == "cancelled" for outcome in outcomes) > 3
    assert warm.engine.stats()["evictions"]["Capacity"] > 20
    for pages in (warm.engine.residency.pages, warm.engine.residency.shadow.pages):
        assert faults(pages, []) == []
        assert pages.available == PAGES
    record(
        "warm-equals-cold",
        "warm tokens = cold tokens, float32, 200 random prompts mixed with cancellations and preemptions",
        {
            "promptsEqual": PROMPTS,
            "bitsOfLogProbabilitiesEqual": deterministic,
            "reusing": sum(outcome.reused_tokens > 0 for outcome in outcomes),
            "preempted": sum(outcome.preemptions > 0 for outcome in outcomes),
            "cancelled": sum(outcome.finish == "cancelled" for outcome in outcomes),
            "pagesHeldAtTheEnd": PAGES - warm.engine.residency.pages.available,
        },
        part="deterministic" if deterministic else "fast",
    )

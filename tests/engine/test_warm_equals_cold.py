"""Random lives of an engine: whatever is mixed, tokens are those of a cold run and nothing leaks.

The rules are checked after every step by `EngineLife.check`, so the same life is used to show that planted faults are
found.
"""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from kvsteward_contract.directive import Mode, Retention
from kvsteward_engine.block_manager import BlockManager
from kvsteward_engine.errors import OutOfMemory, QueueFull
from kvsteward_engine.residency import Residency
from kvsteward_engine.sequence import SamplingParams
from support.fake_engine import BLOCK, FakeEngine, cold_tokens, directive, prompt_of

TENANTS = ("a", "b", "c")
SHARED = [prompt_of(seed, 40) for seed in range(3)]  # prefixes that every tenant sends


class EngineLife:
    """A random life from a seed, and the rules that hold in it."""

    def __init__(self, seed: int, pages: int, mishaps: bool = True) -> None:
        self.random = random.Random(seed)
        self.mishaps = mishaps
        self.engine = FakeEngine(pages, max_tokens=80, max_concurrent=6, max_waiting=16, prefill_chunk=12)
        self.epoch = 0
        self.asked: dict[str, tuple[list[int], int, Mode, int]] = {}
        self.cancelled: set[str] = set()
        self.checked: set[str] = set()
        self.set_policy()

    def set_policy(self) -> None:
        """A new epoch, with other limits."""
        self.epoch += 1
        roll = self.random
        self.engine.permit(
            self.epoch,
            private=Retention(
                quota_percent=roll.choice((0, 20, 100, 100, 100, 100)),
                max_age_seconds=roll.choice((0, 0, 20, 60)),
                max_in_flight=roll.choice((0, 0, 1, 3)),
            ),
        )

    def submit(self) -> None:
        """One request, of any mode, tenant and epoch."""
        roll = self.random
        name = f"{len(self.asked):032x}"
        prompt = roll.choice(SHARED)[: roll.randrange(1, 40)] + prompt_of(roll.randrange(50), roll.randrange(12))
        count = roll.randrange(1, 20)
        mode = roll.choice((Mode.REUSE, Mode.REUSE, Mode.SHADOW, Mode.COLD))
        tenant = roll.choice(TENANTS)
        epoch = self.epoch - (roll.random() < 0.05)
        try:
            self.engine.submit(name, prompt, SamplingParams(max_tokens=count), directive(tenant, mode, epoch))
        except QueueFull:
            return
        self.asked[name] = (prompt, count, mode, epoch)

    def act(self) -> None:
        """One thing happens, then a step."""
        roll = self.random
        event = roll.random()
        running = [name for name in self.asked if name not in self.engine.endings]
        if event < 0.4:
            self.submit()
        elif event < 0.5 and running:
            name = roll.choice(running)
            self.engine.cancel(name)
            self.cancelled.add(name)
        elif event < 0.515:
            self.set_policy()
        elif event < 0.55:
            self.engine.clock.now += roll.choice((0.1, 3.0, 30.0))
        elif event < 0.58 and self.mishaps and not any(self.engine.runner.faults):
            # A step that goes well between two faults: three in a row would rightly end the engine.
            self.engine.runner.faults += [roll.choice((OutOfMemory("no room"), ValueError("broken"))), None]
        self.engine.clock.now += 0.01
        self.engine.go()

    def check(self) -> None:
        """The rules that hold at every moment."""
        assert self.engine.faults() == []
        assert self.engine.runner.crossings == []
        for name in self.engine.endings.keys() - self.checked:
            self.checked.add(name)
            delta = self.engine.endings[name]
            prompt, count, mode, epoch = self.asked[name]
            outcome = delta.outcome
            assert outcome is not None
            assert outcome.mode is Mode.COLD or outcome.epoch == epoch
            assert self.engine.results[name] == cold_tokens(prompt, count)[: len(self.engine.results[name])]
            assert outcome.reused_tokens <= outcome.resident_tokens <= outcome.eligible_tokens < max(len(prompt), 1)
            assert outcome.reused_tokens == 0 or mode is Mode.REUSE
            assert not outcome.scope_violation

    def end(self) -> None:
        """Let everything finish; then nothing may be held."""
        self.engine.runner.faults.clear()
        self.engine.finish_all()
        self.check()
        for name, (_, count, _, _) in self.asked.items():
            delta = self.engine.endings[name]
            assert delta.finish is not None
            if delta.finish.value == "length":
                assert len(self.engine.results[name]) == count
            elif delta.finish.value == "cancelled":
                assert name in self.cancelled
            else:
                assert self.mishaps
        for pages in (self.engine.residency.pages, self.engine.residency.shadow.pages):
            assert pages.available == pages.total


def live(seed: int, pages: int, acts: int = 120, mishaps: bool = True) -> EngineLife:
    """A whole life, checked throughout."""
    life = EngineLife(seed, pages, mishaps)
    for _ in range(acts):
        life.act()
        life.check()
    life.end()
    return life


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.sampled_from([20, 24, 32, 64, 200]))
def test_any_life_gives_cold_tokens_and_leaks_nothing(seed: int, pages: int) -> None:
    live(seed, pages)


def test_lives_do_reuse_preempt_cancel_and_evict() -> None:
    """The control of the test above: these lives meet what they are meant to survive."""
    lives = [live(seed, pages, mishaps=False) for seed in range(6) for pages in (20, 64)]
    outcomes = [delta.outcome for life in lives for delta in life.engine.endings.values()]
    assert sum(outcome.reused_tokens > 0 for outcome in outcomes) > 30
    assert sum(outcome.preemptions > 0 for outcome in outcomes) > 10
    assert sum(outcome.finish == "cancelled" for outcome in outcomes) > 20
    stats = [life.engine.stats() for life in lives]
    assert {reason for each in stats for reason in each["evictions"]} == {"Expired", "OverQuota", "Capacity"}
    assert sum(each["regretTokens"] for each in stats) > 0


def broken(seeds: range = range(12)) -> bool:
    """Whether the rules are seen to be broken in some life."""
    for seed in seeds:
        try:
            live(seed, 64, mishaps=False)
        except AssertionError:
            return True
    return False


def test_publishing_pages_before_they_are_computed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Residency, "complete_pages", lambda self, request: len(request.sequence.tokens) // BLOCK)
    assert broken()


def test_freeing_a_page_that_is_in_use_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Residency.release

    def hasty(self: Residency, request, now: float) -> None:  # type: ignore[no-untyped-def]
        if request.holding.pages:
            self.pages._free.append(request.holding.pages[0])
        release(self, request, now)

    monkeypatch.setattr(Residency, "release", hasty)
    assert broken()


def test_a_skipped_epoch_check_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Residency, "epoch_is_current", lambda self, directive: True)
    assert broken()


def test_a_salt_left_out_is_found_by_the_scope_beside_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Residency, "root", lambda self, directive: b"\0" * 32)
    assert broken()


def test_a_salt_and_a_scope_left_out_are_found_by_who_wrote_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    lookup, publish = BlockManager.lookup, BlockManager.publish
    monkeypatch.setattr(Residency, "root", lambda self, directive: b"\0" * 32)
    monkeypatch.setattr(
        BlockManager, "lookup", lambda self, chain, scope, *rest: lookup(self, chain, "Private/all", *rest)
    )
    monkeypatch.setattr(
        BlockManager,
        "publish",
        lambda self, holding, key, content, scope, *rest: publish(self, holding, key, content, "Private/all", *rest),
    )
    assert broken()


def test_a_hit_that_covers_more_than_what_was_matched_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = Residency.admit

    def greedy(self: Residency, request, now: float, spare: int) -> bool:  # type: ignore[no-untyped-def]
        admitted = admit(self, request, now, spare)
        left = len(request.sequence.tokens) - 1 - request.sequence.computed
        if admitted and request.reused and left >= BLOCK:
            request.sequence.computed += BLOCK
            request.planned += BLOCK
        return admitted

    monkeypatch.setattr(Residency, "admit", greedy)
    assert broken()


def test_the_unbroken_engine_passes_the_same_lives() -> None:
    """The control of the planted faults."""
    assert not broken()

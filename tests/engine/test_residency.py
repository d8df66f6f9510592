"""Which requests may use the cache: modes, epochs, latches, and what the shadow index says of them."""

from __future__ import annotations

import msgspec
import pytest
from kvsteward_contract.directive import Directive, EnginePolicy, Mode, Retention
from kvsteward_engine.page import PageRecord
from kvsteward_engine.sequence import SamplingParams
from support.fake_engine import FakeEngine, cold_tokens, directive, prompt_of

PROMPT = prompt_of(1, 22)


def outcome(engine: FakeEngine, name: str, given: Directive | None, prompt: list[int] = PROMPT):  # type: ignore[no-untyped-def]
    """Run a request; its outcome, once its tokens were found right."""
    assert engine.complete(name, prompt, 4, given) == cold_tokens(prompt, 4)
    assert engine.faults() == []
    return engine.outcome(name)


def test_a_repeated_prompt_reuses_all_full_pages_before_its_last_token() -> None:
    engine = FakeEngine()
    engine.permit()
    first = outcome(engine, "1", directive())
    again = outcome(engine, "2", directive())
    assert (first.reused_tokens, first.misses, first.stored_pages) == (0, {"UnseenBlock": 5}, 6)
    assert (again.eligible_tokens, again.resident_tokens, again.reused_tokens, again.misses) == (20, 20, 20, {})


def test_of_1024_tokens_the_896_shared_ones_are_reused_after_priming_with_another_tail() -> None:
    engine = FakeEngine(800, max_tokens=2048, prefill_chunk=512)
    engine.permit()
    shared = prompt_of(1, 896)
    outcome(engine, "prime", directive(), shared + prompt_of(2, 128))
    measured = outcome(engine, "measure", directive(), shared + prompt_of(3, 128))
    assert (measured.prompt_tokens, measured.reused_tokens, measured.misses) == (1024, 896, {"UnseenBlock": 31})


@pytest.mark.parametrize(("length", "reused"), [(4, 0), (5, 4), (8, 4), (9, 8)])
def test_a_hit_never_covers_the_whole_prompt(length: int, reused: int) -> None:
    engine = FakeEngine()
    engine.permit()
    prompt = prompt_of(3, length)
    outcome(engine, "1", directive(), prompt)
    assert outcome(engine, "2", directive(), prompt).reused_tokens == reused


def test_a_prompt_without_a_reusable_page_is_a_short_prompt() -> None:
    engine = FakeEngine()
    engine.permit()
    assert outcome(engine, "1", directive(), prompt_of(1, 4)).misses == {"ShortPrompt": 1}


def test_another_tenant_reuses_nothing_of_the_same_tokens_while_the_owner_does() -> None:
    engine = FakeEngine()
    engine.permit()
    outcome(engine, "1", directive("a"))
    other = outcome(engine, "2", directive("b"))
    assert (other.reused_tokens, other.eligible_tokens, other.misses) == (0, 0, {"ScopeMismatch": 5})
    assert outcome(engine, "3", directive("a")).reused_tokens == 20


COLD_CASES = [
    pytest.param(None, id="no directive"),
    pytest.param(directive(mode=Mode.COLD), id="cold"),
    pytest.param(directive(epoch=0), id="an older epoch"),
    pytest.param(directive(epoch=2), id="an epoch the engine has not heard of"),
    pytest.param(directive(retention="unheard-of"), id="an unknown retention class"),
    pytest.param(msgspec.structs.replace(directive(), namespace=""), id="no salt"),
    pytest.param(msgspec.structs.replace(directive(), scope=""), id="no scope"),
    pytest.param(msgspec.structs.replace(directive(), namespace="no salt at all"), id="a salt that is none"),
]


@pytest.mark.parametrize("given", COLD_CASES)
def test_what_is_not_clearly_permitted_runs_cold_and_leaves_no_page(given: Directive | None) -> None:
    engine = FakeEngine()
    engine.permit()
    outcome(engine, "1", directive())
    before = engine.stats()
    cold = outcome(engine, "2", given)
    assert (cold.mode, cold.reused_tokens, cold.eligible_tokens, cold.misses) == (Mode.COLD, 0, 0, {})
    assert engine.stats() == before


def test_an_engine_without_a_policy_runs_everything_cold() -> None:
    engine = FakeEngine()
    assert outcome(engine, "1", directive(epoch=0)).mode is Mode.COLD
    assert engine.stats()["residentPages"] == {}


def test_shadow_predicts_and_leaves_the_real_pool_alone() -> None:
    engine = FakeEngine()
    engine.permit()
    outcome(engine, "1", directive(mode=Mode.SHADOW))
    second = outcome(engine, "2", directive(mode=Mode.SHADOW))
    assert (second.mode, second.eligible_tokens, second.resident_tokens, second.reused_tokens) == (
        Mode.SHADOW,
        20,
        20,
        0,
    )
    stats = engine.stats()
    assert (stats["residentPages"], stats["freePages"], stats["lastMatchSeconds"]) == ({}, 32, 0.0)
    assert outcome(engine, "3", directive()).reused_tokens == 0


def test_shadow_knows_of_pages_that_reuse_published() -> None:
    engine = FakeEngine()
    engine.permit()
    outcome(engine, "1", directive())
    assert outcome(engine, "2", directive(mode=Mode.SHADOW)).resident_tokens == 20


def test_the_shadow_prediction_includes_pressure_from_cold_requests() -> None:
    engine = FakeEngine(pages=12)
    engine.permit()
    outcome(engine, "1", directive(mode=Mode.SHADOW))
    outcome(engine, "2", None, prompt_of(7, 36))
    pressed = outcome(engine, "3", directive(mode=Mode.SHADOW))
    assert (pressed.eligible_tokens, pressed.resident_tokens) == (20, 8)
    assert pressed.misses == {"Evicted": 3}


def test_shadow_predicts_what_reuse_then_does() -> None:
    """The same traffic in both modes, with pressure, quotas and ages: prediction and reuse are the same per request."""
    told = {}
    for mode in (Mode.SHADOW, Mode.REUSE):
        engine = FakeEngine(pages=28)
        engine.permit(private=Retention(quota_percent=60, max_age_seconds=40))
        told[mode] = []
        for number in range(60):
            engine.clock.now += 3
            prompt = prompt_of(number * number % 7, 20) + prompt_of(number, 6)
            result = outcome(engine, str(number), directive("ab"[number % 2], mode), prompt)
            told[mode].append((result.eligible_tokens, result.resident_tokens, result.misses))
    assert told[Mode.SHADOW] == told[Mode.REUSE]
    assert sum(resident for _, resident, _ in told[Mode.REUSE]) > 0


def test_a_new_epoch_stops_matches_of_waiting_running_and_preempted_requests() -> None:
    engine = FakeEngine(pages=32, max_concurrent=1)
    engine.permit()
    outcome(engine, "1", directive())
    for name in ("2", "3"):
        engine.submit(name, PROMPT, SamplingParams(max_tokens=8), directive())
    engine.go()
    matched = engine.state().last_match_seconds
    engine.clock.now += 5
    engine.permit(2)
    engine.scheduler.preempt(engine._requests["2"], engine.clock.now)
    engine.finish_all()
    assert engine.state().last_match_seconds == matched
    assert (engine.outcome("2").reused_tokens, engine.outcome("2").preemptions) == (20, 1)
    assert (engine.outcome("3").mode, engine.outcome("3").epoch) == (Mode.COLD, 2)
    assert engine.results["3"] == cold_tokens(PROMPT, 8)
    assert engine.residency.pages.evictions == {}


def test_a_running_request_publishes_nothing_once_its_permission_is_gone() -> None:
    engine = FakeEngine()
    engine.permit()
    engine.submit("1", PROMPT, SamplingParams(max_tokens=40), directive())
    engine.go(4)
    stored = engine.residency.pages.resident_by_kind["Private"]
    assert stored > 0
    engine.permit(2)
    engine.finish_all()
    assert engine.residency.pages.resident_by_kind["Private"] == stored


def test_a_policy_of_an_older_epoch_changes_nothing_and_an_empty_table_keeps_the_last() -> None:
    engine = FakeEngine()
    engine.permit(5)
    assert engine.set_policy(EnginePolicy(4, "old", {"other": Retention()})).epoch == 5
    assert engine.state().version == "v5"
    assert engine.set_policy(EnginePolicy(6, "v6", {})).version == "v6"
    assert outcome(engine, "1", directive(epoch=6)).mode is Mode.REUSE


def planted(engine: FakeEngine) -> PageRecord:
    """Make a page of tenant a look like tenant b's."""
    record = next(iter(engine.residency.pages._index.values()))
    record.scope = "Private/b"
    return record


def test_a_page_of_another_scope_is_not_used_and_latches_the_engine_until_its_sidecar_knows() -> None:
    engine = FakeEngine()
    engine.permit()
    outcome(engine, "1", directive())
    assert outcome(engine, "2", directive()).reused_tokens == 20
    record = planted(engine)
    violated = outcome(engine, "3", directive())
    assert (violated.scope_violation, violated.mode, violated.reused_tokens) == (True, Mode.COLD, 0)
    record.scope = "Private/a"
    assert outcome(engine, "4", directive()).mode is Mode.COLD
    assert (engine.state().violations, engine.state().latched) == (1, True)
    engine.permit(1)
    assert outcome(engine, "5", directive()).mode is Mode.COLD
    engine.permit(2)
    assert outcome(engine, "6", directive(epoch=2)).mode is Mode.COLD, "an epoch raised for something else"
    engine.permit(2, violations=1)
    assert outcome(engine, "7", directive(epoch=2)).reused_tokens == 20


def test_a_count_of_violations_that_was_meant_for_an_earlier_process_answers_none_of_this_one() -> None:
    engine = FakeEngine()
    engine.permit(violations=3)
    outcome(engine, "1", directive())
    planted(engine)
    assert outcome(engine, "2", directive()).scope_violation
    assert engine.state().latched


def test_a_key_taken_in_another_scope_is_caught_when_it_is_published() -> None:
    engine = FakeEngine()
    engine.permit()
    engine.submit("1", PROMPT, SamplingParams(max_tokens=2), directive())
    engine.submit("2", PROMPT, SamplingParams(max_tokens=2), directive())
    engine.go()  # both were looked up before either published
    planted(engine)
    engine.finish_all()
    assert engine.residency.scope_violations == 1
    assert engine.results["2"] == cold_tokens(PROMPT, 2)
    assert engine.faults() == []

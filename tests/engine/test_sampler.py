"""What is drawn, from which tokens, and that nothing but seed, position and logits decides it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from kvsteward_engine.errors import InvalidRequest
from kvsteward_engine.sampler import RANKED, sample, uniform
from kvsteward_engine.sequence import MAX_SEED, NO_TOKEN, Sampled, SamplingParams
from support.oracle import sequence

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.5, -1.0, 2.0])


def draws(logits: torch.Tensor, count: int, **sampling: Any) -> Counter[int]:
    """Tokens drawn with `count` different seeds."""
    held = [sequence([0], [], seed=seed, **sampling) for seed in range(count)]
    return Counter(each.token for each in sample(logits.expand(count, -1), held))


def test_greedy_takes_the_likeliest() -> None:
    logits = torch.stack((LOGITS, LOGITS.flip(0)))
    assert [each.token for each in sample(logits, [sequence([0], []), sequence([0], [])])] == [1, 4]


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert draws(LOGITS, 50, temperature=1e-12) == {1: 50}


def test_frequencies_follow_the_probabilities() -> None:
    count = 20000
    for temperature in (0.5, 1.0, 2.0):
        seen = draws(LOGITS, count, temperature=temperature)
        for token, probability in enumerate(torch.softmax(LOGITS / temperature, -1).tolist()):
            assert seen[token] / count == pytest.approx(probability, abs=0.015)


@pytest.mark.parametrize(
    ("cuts", "allowed"),
    [
        pytest.param({"top_k": 1}, {1}, id="top_k 1"),
        pytest.param({"top_k": 3}, {1, 3, 5}, id="top_k 3"),
        pytest.param({"top_k": 100}, {0, 1, 2, 3, 4, 5}, id="top_k beyond the vocabulary"),
        pytest.param({"top_p": 0.01}, {1}, id="top_p below the likeliest"),
        pytest.param({"top_p": 0.7}, {1, 3}, id="top_p reached with the second"),
        pytest.param({"top_k": 2, "top_p": 0.6}, {1}, id="top_p counts what top_k left"),
        pytest.param({"min_p": 0.5}, {1, 3}, id="min_p"),
        pytest.param({"min_p": 1.0}, {1}, id="min_p 1"),
        pytest.param({"top_k": 3, "min_p": 0.5}, {1, 3}, id="top_k and min_p"),
    ],
)
def test_cuts_leave_exactly_the_tokens_they_should(cuts: dict[str, Any], allowed: set[int]) -> None:
    seen = draws(LOGITS, 3000, temperature=1.0, **cuts)
    assert set(seen) == allowed


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    top_k=st.sampled_from([0, 1, 5, 40, 2000]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 0.999, 1.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
)
def test_cuts_are_transformers(seed: int, top_k: int, top_p: float, temperature: float) -> None:
    """Over a vocabulary larger than what is ranked at first, so that the full sort is met too."""
    logits = torch.randn((1, RANKED * 2), generator=torch.Generator().manual_seed(seed)) * 2
    warped = transformers.TemperatureLogitsWarper(temperature)(None, logits.clone())
    if top_k:
        warped = transformers.TopKLogitsWarper(top_k)(None, warped)
    if top_p < 1.0:
        warped = transformers.TopPLogitsWarper(top_p)(None, warped)
    allowed = set(torch.isfinite(warped[0]).nonzero().flatten().tolist())
    held = [
        sequence([0], [], seed=each, top_k=top_k, top_p=top_p, temperature=temperature)
        for each in range(seed, seed + 40)
    ]
    assert {each.token for each in sample(logits.expand(40, -1), held)} <= allowed


def test_a_draw_depends_on_seed_and_position_and_not_on_company() -> None:
    logits = torch.randn((6, 3000), generator=torch.Generator().manual_seed(1))
    params: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 11},
        {"temperature": 1.0, "seed": 11, "top_p": 0.9},
        {"temperature": 0.0},
        {"temperature": 1.5, "seed": 12, "top_k": 50},
        {"temperature": 1.0, "seed": 13, "top_p": 0.99999},
        {"temperature": 0.7, "seed": 14, "min_p": 0.02, "frequency_penalty": 0.5},
    ]
    held = [sequence(list(range(20)), [], prompt_len=10, **each) for each in params]
    together = [each.token for each in sample(logits, held)]
    alone = [sample(logits[row : row + 1], [held[row]])[0].token for row in range(6)]
    assert together == alone
    backwards = [each.token for each in sample(logits.flip(0), held[::-1])]
    assert backwards[::-1] == together


def test_another_position_or_seed_draws_another_number() -> None:
    numbers = [uniform(seed, position) for seed in range(100) for position in range(100)]
    assert len(set(numbers)) == 10_000
    assert min(numbers) >= 0.0 and max(numbers) < 1.0
    assert sum(numbers) / 10_000 == pytest.approx(0.5, abs=0.02)
    assert uniform(7, 9) == pytest.approx(0.3208904805774696)  # fixed: a restart must not change answers


def test_a_request_without_a_seed_keeps_its_numbers_over_a_recompute() -> None:
    logits = torch.zeros((1, 1000))
    held = sequence([1, 2, 3], [], temperature=1.0)
    assert sample(logits, [held]) == sample(logits, [held])
    others = {sample(logits, [sequence([1, 2, 3], [], temperature=1.0)])[0].token for _ in range(20)}
    assert len(others) > 5


def test_the_last_number_below_one_never_picks_a_token_without_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsteward_engine.sampler.uniform", lambda seed, position: 1.0 - 2.0**-53)
    assert set(draws(LOGITS, 3, temperature=1.0)) == {5}
    assert set(draws(LOGITS, 3, temperature=1.0, top_k=3)) == {5}
    masked = torch.cat((LOGITS, torch.full((3,), -1e30)))
    assert set(draws(masked, 3, temperature=1.0)) == {5}


def test_penalties_count_the_output_and_not_the_prompt() -> None:
    flat = torch.zeros((1, 4))
    held = sequence([3, 3, 3, 1, 1, 2], [], prompt_len=3, frequency_penalty=0.5, presence_penalty=1.0, logprobs=0)
    kept = flat.clone()
    assert sample(flat, [held])[0].token == 0
    assert torch.equal(flat, kept)  # the model's logits are not changed
    # 1 was produced twice, which costs 2 x 0.5 + 1; 2 once, which costs 1.5; 3 only in the prompt, which costs nothing.
    assert sample(torch.tensor([[0.0, 2.1, 1.4, -9.0]]), [held])[0].token == 1
    assert sample(torch.tensor([[0.0, 1.9, 1.6, -9.0]]), [held])[0].token == 2
    assert sample(torch.tensor([[0.0, 1.9, 1.6, 0.2]]), [held])[0].token == 3
    rewarded = sequence([0, 1], [], prompt_len=1, presence_penalty=-1.0)
    assert sample(torch.tensor([[0.5, 0.0]]), [rewarded])[0].token == 1


def test_logprobs_are_the_models_own_and_only_of_those_who_ask() -> None:
    held = [
        sequence([0], []),
        sequence([0], [], logprobs=0),
        sequence([0], [], logprobs=2),
        sequence([0], [], temperature=2.0, top_k=1, logprobs=5),
    ]
    plain, chosen, two, five = sample(LOGITS.expand(4, -1), held)
    logs = torch.log_softmax(LOGITS, -1).tolist()
    assert plain.logprob is None and plain.top is None
    assert chosen.logprob == pytest.approx(logs[1]) and chosen.top == []
    assert two.top == [(1, pytest.approx(logs[1])), (3, pytest.approx(logs[3]))]
    assert five.logprob == pytest.approx(logs[1]) and [token for token, _ in five.top or ()] == [1, 3, 5, 2, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_of_logits_that_are_no_numbers_gives_no_token_and_spares_the_others(bad: float) -> None:
    logits = LOGITS.clone()
    logits[2] = bad
    asked = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=1.0, seed=1, top_k=2),
        SamplingParams(logprobs=2, frequency_penalty=1.0),
    ]
    sequences = [sequence([0], [1], each) for each in asked]
    alone = sample(LOGITS.repeat(4, 1), sequences)
    for row in range(4):
        mixed = LOGITS.repeat(4, 1)
        mixed[row] = logits
        assert [one for at, one in enumerate(sample(mixed, sequences)) if at != row] == alone[:row] + alone[row + 1 :]
        assert sample(mixed, sequences)[row] == Sampled(NO_TOKEN)


@pytest.mark.parametrize(
    "value",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": 2.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"seed": -1},
        {"seed": MAX_SEED + 1},
        {"logprobs": 21},
        {"frequency_penalty": 2.5},
        {"presence_penalty": -2.5},
    ],
    ids=str,
)
def test_sampling_parameters_out_of_range_are_refused_by_name(value: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(value))):
        SamplingParams(**value)

"""Equal bits, cold or chunked or reused, alone or in a batch; and a refusal where that can't be kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kvsteward_engine import deterministic
from kvsteward_engine.errors import NotDeterministic
from kvsteward_engine.models.llama import LlamaModel
from kvsteward_engine.runner import Runner
from kvsteward_engine.sequence import Step, Work
from support.oracle import Oracle, random_tokens, sequence, step

BLOCK = 8
LENGTH = 75


@pytest.fixture(
    scope="module",
    params=[
        (variant, dtype)
        for variant in ("llama-gqa", "llama-three-groups", "qwen2-mha", "qwen3-gqa")
        for dtype in ("FP32", "BF16")
    ],
    ids="-".join,
)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    variant, dtype = request.param
    oracle = Oracle(tmp_path_factory.mktemp("oracle"), variant)
    return Runner(oracle.folder, dtype, pages=90, block_tokens=BLOCK, deterministic=True, device="cpu", threads=1)


@pytest.fixture(scope="module")
def cold(runner: Runner) -> torch.Tensor:
    """Logits of each of the last 20 positions, each computed in one chunk alone."""
    tokens = random_tokens(LENGTH, seed=1)
    return torch.cat(
        [runner.logits(step((sequence(tokens, range(10)), 0, end))) for end in range(LENGTH - 19, LENGTH + 1)]
    )


def test_chunks_at_odd_places_give_the_cold_bits(runner: Runner, cold: torch.Tensor) -> None:
    held = sequence(random_tokens(LENGTH, seed=1), [33, 12, 40, 41, 20, 5, 6, 7, 8, 9])
    start = 0
    for count in (1, 2, 29, 5, 18, *[1] * 20):
        logits = runner.logits(step((held, start, count)))
        start += count
        if start > LENGTH - 20:
            assert torch.equal(logits[0], cold[start - LENGTH + 19])
    assert start == LENGTH


def test_reused_pages_give_the_cold_bits(runner: Runner, cold: torch.Tensor) -> None:
    tokens = random_tokens(LENGTH, seed=1)
    owner = sequence(tokens[:64] + random_tokens(20, seed=2), range(20, 31))
    runner.run(step((owner, 0, 84)))
    warm = sequence(tokens, [*range(20, 28), 50, 51])
    assert torch.equal(runner.logits(step((warm, 64, LENGTH - 64)))[0], cold[-1])


def test_company_in_the_batch_changes_no_bit(runner: Runner, cold: torch.Tensor) -> None:
    tokens = random_tokens(LENGTH, seed=1)
    decode, prefill, chunk = (sequence(tokens, range(first, first + 10), name=str(first)) for first in (0, 10, 20))
    others = [
        sequence(random_tokens(30, seed=30 + index), range(32 + 4 * index, 36 + 4 * index)) for index in range(12)
    ]
    runner.run(Step((Work(decode, 0, LENGTH - 1, sample=False), Work(chunk, 0, 41, sample=False))))
    runner.run(Step(tuple(Work(each, 0, 29, sample=False) for each in others[:11])))
    company = [(each, 29, 1) for each in others[:11]]
    works = [
        *company[:5],
        (decode, LENGTH - 1, 1),
        *company[5:],
        (prefill, 0, LENGTH),
        (others[11], 0, 30),
        (chunk, 41, LENGTH - 41),
    ]
    logits = runner.logits(step(*works))
    for row in (5, 12, 14):
        assert torch.equal(logits[row], cold[-1])


def test_the_fast_backend_agrees_with_the_deterministic_one(tmp_path: Path) -> None:
    """Otherwise the tests above could pass on a wrong result that is always the same."""
    oracle = Oracle(tmp_path, "llama-gqa")
    tokens = random_tokens(LENGTH, seed=3)
    runner = Runner(tmp_path, "FP32", pages=20, block_tokens=BLOCK, deterministic=True, device="cpu", threads=1)
    logits = runner.logits(step((sequence(tokens, range(10)), 0, LENGTH)))[0]
    assert float((logits - oracle.logits(tokens)[-1]).abs().max()) <= 1e-4


def test_rows_that_depend_on_their_place_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Oracle(tmp_path, "llama-gqa")
    after = LlamaModel.after

    def uneven(self: LlamaModel, layer: int, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        result = after(self, layer, x, attended)
        result[-1] *= 1 + 1e-6  # as a kernel that treats the rest of a block apart would
        return result

    monkeypatch.setattr(LlamaModel, "after", uneven)
    with pytest.raises(NotDeterministic, match="in another place of a tile"):
        Runner(tmp_path, "FP32", pages=20, deterministic=True, device="cpu", threads=1)


def test_attention_that_depends_on_the_cut_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Oracle(tmp_path, "llama-gqa")
    attend = deterministic.TiledAttention.attend

    def uneven(self, layer, q, k, v):  # type: ignore[no-untyped-def]
        return attend(self, layer, q, k, v) * (1 + 1e-6 * len(q))

    monkeypatch.setattr(deterministic.TiledAttention, "attend", uneven)
    with pytest.raises(NotDeterministic, match="cut in pieces"):
        Runner(tmp_path, "FP32", pages=20, deterministic=True, device="cpu", threads=1)


def test_a_wide_tile_with_other_bits_is_left_unused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Oracle(tmp_path, "llama-gqa")
    after = LlamaModel.after

    def other_when_wide(self: LlamaModel, layer: int, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return after(self, layer, x, attended) * (1 + 1e-6 * (len(x) > 128))

    monkeypatch.setattr(LlamaModel, "after", other_when_wide)
    runner = Runner(tmp_path, "FP32", pages=20, deterministic=True, device="cpu", threads=1)
    assert runner._model.wide <= 128  # type: ignore[attr-defined]


def test_a_pool_too_small_to_check_is_refused(tmp_path: Path) -> None:
    Oracle(tmp_path, "llama-gqa")
    with pytest.raises(NotDeterministic, match="at least two pages"):
        Runner(tmp_path, "FP32", pages=1, deterministic=True, device="cpu", threads=1)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(("dtype", "threads"), [("FP32", 1), ("BF16", 2)])
def test_smollm2_gives_equal_bits_cold_chunked_and_in_company(smollm2: Path, dtype: str, threads: int) -> None:
    runner = Runner(smollm2, dtype, pages=200, block_tokens=16, deterministic=True, device="cpu", threads=threads)
    tokens = random_tokens(700, seed=1, vocab=runner.vocab_size)
    cold = runner.logits(step((sequence(tokens, range(44)), 0, 700)))[0]
    other = sequence(random_tokens(60, seed=2, vocab=runner.vocab_size), range(90, 94))
    held = sequence(tokens, range(44, 88))
    start = 0
    for count in (130, 257, 300, 12):
        runner.run(step((other, 0, 20), (held, start, count)))
        start += count
    runner.run(step((other, 20, 39)))
    assert torch.equal(runner.logits(step((other, 59, 1), (held, 699, 1)))[1], cold)
    warm = sequence(tokens, [*range(40), 100, 101, 102, 103])
    assert torch.equal(runner.logits(step((warm, 640, 60)))[0], cold)

"""The same logits on a GPU as the oracle's; only where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kvsteward_engine.errors import NotDeterministic
from kvsteward_engine.runner import Runner
from kvsteward_engine.sequence import Step, Work
from support.oracle import VARIANTS, Oracle, random_tokens, sequence, step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_prefill_continuation_and_decodes_give_the_oracles_logits(tmp_path: Path, variant: str) -> None:
    oracle = Oracle(tmp_path, variant)
    runner = Runner(tmp_path, "FP32", pages=64, block_tokens=8, device="cuda")
    tokens = [random_tokens(length, seed=length) for length in (40, 200, 30, 50)]
    pages = iter(range(64))
    held = [sequence(each, [next(pages) for _ in range(-(-len(each) // 8))]) for each in tokens]
    runner.run(Step((Work(held[0], 0, 39, sample=False), Work(held[1], 0, 199, sample=False))))
    runner.run(Step((Work(held[2], 0, 11, sample=False),)))
    logits = runner.logits(step((held[0], 39, 1), (held[1], 199, 1), (held[2], 11, 19), (held[3], 0, 50)))
    for row, each in enumerate(tokens):
        assert float((logits[row].cpu() - oracle.logits(each)[-1]).abs().max()) <= 1e-4


@pytest.mark.parametrize("dtype", ["BF16", "FP16"])
def test_half_precision_stays_near_the_oracle(tmp_path: Path, dtype: str) -> None:
    oracle, tokens = Oracle(tmp_path, "llama-gqa"), random_tokens(50, seed=1)
    runner = Runner(tmp_path, dtype, pages=16, block_tokens=8, device="cuda")
    logits = runner.logits(step((sequence(tokens, range(7)), 0, 50)))[0].cpu()
    expected = oracle.logits(tokens)[-1]
    assert float((logits - expected).abs().mean()) < 0.03 * float(expected.abs().max())


def test_sampling_on_a_gpu_draws_the_tokens_it_draws_on_a_cpu(tmp_path: Path) -> None:
    Oracle(tmp_path, "llama-gqa")
    answers = []
    for device in ("cpu", "cuda"):
        runner = Runner(tmp_path, "FP32", pages=16, block_tokens=8, device=device)
        held = sequence(random_tokens(20, seed=1), range(8), temperature=1.0, top_p=0.9, seed=5, logprobs=2)
        start = 0
        while held.output_len < 20:
            held.tokens.append(runner.run(step((held, start, len(held.tokens) - start)))[0].token)
            start = len(held.tokens) - 1
        answers.append(held.output)
    assert answers[0] == answers[1]


def test_deterministic_mode_is_refused(tmp_path: Path) -> None:
    Oracle(tmp_path, "llama-gqa")
    with pytest.raises(NotDeterministic, match="proven on CPU only"):
        Runner(tmp_path, "FP32", pages=16, device="cuda", deterministic=True)

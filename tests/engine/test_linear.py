"""Packed and plain layers give the same results; which one is used follows what torch can do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from kvsteward_engine import linear
from kvsteward_engine.linear import PackedLinear, PlainLinear, pack
from kvsteward_engine.runner import Runner
from support.oracle import Oracle, random_tokens, sequence, step

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.1}


@pytest.mark.parametrize("kind", [PlainLinear, PackedLinear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("rows", [1, 7, 33])
def test_every_operation_is_the_formula(kind: type, dtype: torch.dtype, biased: bool, rows: int) -> None:
    if kind is PackedLinear and not linear.can_pack(dtype):
        pytest.skip("this torch has no oneDNN for the dtype")
    torch.manual_seed(0)
    weight, bias = (torch.randn(24, 40) / 6).to(dtype), torch.randn(24).to(dtype) if biased else None
    x, other = torch.randn(rows, 40).to(dtype), torch.randn(rows, 24).to(dtype)
    layer = kind(weight, bias)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    kept = other.clone()
    for result, expected in (
        (layer(x), exact),
        (layer.plus(x, other), exact + other),
        (layer.plus(x, other.double()), exact + other),
        (layer.times(x, other), exact * other),
        (layer.silu(x), F.silu(exact)),
    ):
        assert float((result - expected).abs().max()) <= TOLERANCES[dtype]
    assert layer.plus(x, other.float()).dtype == torch.float32
    assert torch.equal(other, kept)


def test_without_onednn_weights_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert isinstance(pack(torch.randn(4, 4)), PlainLinear)
    oracle = Oracle(tmp_path, "llama-biases")
    tokens = random_tokens(30, seed=1)
    for deterministic in (False, True):
        runner = Runner(tmp_path, "FP32", pages=8, deterministic=deterministic, device="cpu", threads=1)
        logits = runner.logits(step((sequence(tokens, range(2)), 0, 30)))[0]
        assert float((logits - oracle.logits(tokens)[-1]).abs().max()) <= 1e-4


def test_a_dtype_that_onednn_does_not_know_is_not_packed() -> None:
    assert not linear.can_pack(torch.float64)

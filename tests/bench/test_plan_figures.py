"""Figures of public models that the planner has to arrive at."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from kvsteward_bench.plan import catalogue
from kvsteward_bench.plan.architectures import shape_of
from kvsteward_bench.plan.arithmetic import Plan, Wish, plan
from kvsteward_bench.plan.report import as_json

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LONG = 128 * 1024


def of(name: str, tokens: int = LONG, changes: Mapping[str, Any] | None = None, **wish: Any) -> Plan:
    return plan(shape_of({**catalogue.load(name), **(changes or {})}), Wish(tokens, **wish))


@pytest.mark.parametrize(
    ("name", "per_token", "fixed"),
    [
        ("llama-3.1-8b", 128, 0),
        ("llama-3.1-70b", 320, 0),
        ("qwen2.5-7b", 56, 0),
        ("qwen3-8b", 144, 0),
        ("gemma-3-4b", 20, 116 * MIB),
        ("gemma-3-27b", 80, 416 * MIB),
        ("gpt-oss-20b", 24, 3 * MIB),
        ("gpt-oss-120b", 36, 9 * MIB // 2),
        ("deepseek-v2", 67.5, 0),
        ("deepseek-v3", 68.625, 0),
        ("smollm2-135m", 22.5, 0),
    ],
)
def test_bytes_per_token_and_fixed_state_of_known_models(name: str, per_token: float, fixed: int) -> None:
    """At bf16, the checkpoints' own."""
    planned = of(name)
    assert planned.dtype == "BF16"
    assert (planned.cost.bytes_per_token, planned.cost.fixed) == (per_token * KIB, fixed)
    assert planned.cost.total == LONG * per_token * KIB + fixed


def test_mistral_takes_128_kib_a_token_and_its_window_caps_it_at_512_mib() -> None:
    assert of("mistral-7b-v0.1", 1000).cost.total == 1000 * 128 * KIB
    for tokens in (4096, 4097, 32_768):
        planned = of("mistral-7b-v0.1", tokens)
        assert planned.capped
        assert (planned.cost.bytes_per_token, planned.cost.fixed) == (128 * KIB, 0)
        assert planned.cost.total == 512 * MIB
    assert of("mistral-7b-v0.1", 32_768, pool=8 * GIB).sequences == 16


def test_llama_70b_takes_40_gib_at_128k_tokens_and_320_with_as_many_kv_heads_as_query_heads() -> None:
    grouped = of("llama-3.1-70b")
    assert grouped.cost.total == 40 * GIB
    assert [(step.technique, step.cost.total // GIB) for step in grouped.steps] == [("FullAttention", 320), ("GQA", 40)]
    alone = of("llama-3.1-70b", changes={"num_key_value_heads": 64})
    assert (alone.cost.total, [step.technique for step in alone.steps]) == (320 * GIB, ["FullAttention"])


def test_qwen3_next_grows_by_24_kib_a_token_beside_a_float32_state_of_72_mib() -> None:
    planned = of("qwen3-next-80b")
    assert planned.cost.bytes_per_token == 24 * KIB
    recurrent = [state for state in planned.shape.fixed if state.what == "recurrent state"]
    assert {state.dtype for state in recurrent} == {"FP32"}
    assert 4 * sum(state.values for state in recurrent) == 72 * MIB
    # Beside it the last inputs of each layer's convolution: 36 layers, 8,192 channels, 4 inputs, bfloat16.
    assert planned.cost.fixed == 72 * MIB + 36 * 8192 * 4 * 2
    assert planned.cost.total - planned.cost.fixed == 3 * GIB


def test_qwen3_next_would_grow_four_times_as_fast_with_attention_in_all_layers() -> None:
    totals = {step.technique: step.cost.total for step in of("qwen3-next-80b").steps}
    assert totals["GQA"] == 12 * GIB
    whole = of("qwen3-next-80b", changes={"layer_types": ["full_attention"] * 48})
    assert (whole.cost.total, whole.cost.fixed) == (12 * GIB, 0)


def test_jamba_grows_by_16_kib_a_token_beside_about_9_mib() -> None:
    planned = of("jamba-v0.1", 256 * 1024)
    assert planned.cost.bytes_per_token == 16 * KIB
    assert round(planned.cost.fixed / MIB) == 9
    assert planned.cost.total - planned.cost.fixed == 4 * GIB  # as its authors report at 256K


def test_gemma_3n_keeps_the_caches_of_20_of_its_35_layers() -> None:
    """4 global layers and 16 local ones, of 2 heads of 256."""
    planned = of("gemma-3n-e4b")
    assert (planned.cost.bytes_per_token, planned.cost.fixed) == (4 * 2 * KIB, 16 * 512 * 2 * KIB)


def test_deepseek_v4_flash_keeps_about_a_fourteenth_of_what_v3_2_keeps() -> None:
    """Its authors report 7 % for the whole model at a million tokens, their precisions included."""
    new, old = (of(name, 1 << 20).cost.total for name in ("deepseek-v4-flash", "deepseek-v3.2"))
    assert 0.06 < new / old < 0.09


def test_fp8_doubles_the_tokens_that_8_gib_hold() -> None:
    plain, eight = (of("llama-3.1-70b", 4096, pool=8 * GIB, dtype=dtype) for dtype in ("Auto", "FP8"))
    assert (plain.cost.bytes_per_token, plain.pool_tokens) == (320 * KIB, 26_214)
    assert (eight.cost.bytes_per_token, eight.pool_tokens) == (160 * KIB, 52_428)


def test_cross_layer_attention_doubles_the_tokens_of_a_pool() -> None:
    shared = of("llama-3.1-70b", changes={"use_cla": True, "cla_share_factor": 2}, pool=8 * GIB)
    assert shared.pool_tokens == 52_428
    assert shared.cost.total == 20 * GIB


def test_techniques_multiply_from_40_gib_to_5() -> None:
    planned = of("llama-3.1-70b", changes={"use_cla": True, "cla_share_factor": 2}, dtype="FP8", budget_percent=50)
    assert [(step.technique, step.cost.total // GIB) for step in planned.steps] == [
        ("FullAttention", 320), ("GQA", 40), ("SharedLayers", 20), ("Dtype", 10), ("TokenBudget", 5),
    ]  # fmt: skip
    assert planned.cost.total == 5 * GIB


def test_a_window_of_1024_keeps_memory_flat_past_it() -> None:
    fixed = [of("gemma-3-4b", tokens).cost.fixed for tokens in (512, 1024, 1025, LONG)]
    assert fixed == [58 * MIB, 116 * MIB, 116 * MIB, 116 * MIB]


@pytest.mark.parametrize("name", catalogue.names())
def test_every_known_model_can_be_planned(name: str) -> None:
    planned = as_json(of(name, 8192, pool=80 * GIB))
    assert json.loads(json.dumps(planned)) == planned
    assert planned["steps"][-1]["totalBytes"] == planned["totalBytes"]
    assert planned["sequences"] >= 1


@pytest.mark.parametrize(
    ("served", "known"),
    [
        ("smollm2-135m-instruct", "smollm2-135m"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("deepseek-ai/DeepSeek-V3.2", "deepseek-v3.2"),
        ("qwen3-80b", None),
        ("qwen3-8bit", None),
        ("", None),
    ],
)
def test_a_served_name_stands_for_a_known_model_or_for_none(served: str, known: str | None) -> None:
    assert catalogue.find(served) == known

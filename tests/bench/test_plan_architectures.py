"""Config to shape: held against transformers, which keeps real caches of these models."""

from __future__ import annotations

from typing import Any

import pytest
from kvsteward_bench.plan.architectures import _BY_CLASS, _KINDS, shape_of
from kvsteward_bench.plan.errors import CannotPlan
from kvsteward_bench.plan.shape import Heads, Kind, Shape

TOKENS = 40
TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
MODELS = [
    pytest.param("llama", TINY, id="grouped-heads"),
    pytest.param("llama", {**TINY, "num_key_value_heads": 1}, id="one-kv-head"),
    pytest.param("mistral", {**TINY, "sliding_window": 16}, id="one-window"),
    pytest.param(
        "qwen2", {**TINY, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, id="later-layers"
    ),
    pytest.param("qwen3", {**TINY, "head_dim": 16, "sliding_window": 16}, id="window-not-used"),
    pytest.param("gemma2", {**TINY, "head_dim": 8, "sliding_window": 16}, id="every-second-layer"),
    pytest.param(
        "gemma3_text", {**TINY, "head_dim": 8, "sliding_window": 16, "num_hidden_layers": 7}, id="five-to-one"
    ),
    pytest.param(
        "gemma3n_text",
        {
            **TINY, "head_dim": 8, "sliding_window": 16, "num_hidden_layers": 10, "num_kv_shared_layers": 4,
            "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8,
        },
        id="shared-layers",
    ),
    pytest.param(
        "gpt_oss", {**TINY, "head_dim": 8, "sliding_window": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
        id="sinks",
    ),
    pytest.param(
        "qwen3_next",
        {
            **TINY, **MOE, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 8, "linear_value_head_dim": 16, "shared_expert_intermediate_size": 16,
        },
        id="gated-delta",
    ),
    pytest.param(
        "jamba", {**TINY, "attn_layer_period": 4, "attn_layer_offset": 1, "num_experts": 1, "num_experts_per_tok": 1,
                  "use_mamba_kernels": False, "mamba_dt_rank": 4}, id="mamba"
    ),
    pytest.param(
        "falcon_h1",
        {
            **TINY, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1,
        },
        id="attention-beside-mamba-2",
    ),
]  # fmt: skip


def held(shape: Shape, tokens: int) -> int:
    """Values that transformers keeps: of a window the newest but one, since the next token brings its own."""
    values = sum(one.values for one in shape.fixed)
    for layer in shape.layers:
        values += sum(keep.values * min(tokens, keep.window - 1 if keep.window else tokens) for keep in layer.keeps)
    return values


def counted(cache: Any) -> int:
    """Elements of every tensor in a transformers cache."""
    import torch

    seen: dict[int, int] = {}

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            seen[value.data_ptr()] = value.numel()
        elif isinstance(value, dict):
            for one in value.values():
                walk(one)
        elif isinstance(value, (list, tuple)):
            for one in value:
                walk(one)

    for layer in cache.layers:
        for name in ("keys", "values", "conv_states", "recurrent_states"):
            walk(getattr(layer, name, None))
    return sum(seen.values())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "config"), MODELS)
def test_a_shape_has_the_values_that_transformers_keeps(kind: str, config: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.for_model(kind, **config)
    model = AutoModelForCausalLM.from_config(settings, attn_implementation="eager").eval()
    with torch.no_grad():
        cache = model(torch.arange(TOKENS)[None] % 60 + 3, use_cache=True).past_key_values
    assert counted(cache) == held(shape_of({"model_type": kind, **config}), TOKENS)


@pytest.mark.slow
def test_compressed_entries_and_their_buffers_are_those_that_transformers_keeps() -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {
        **TINY, "head_dim": 16, "num_key_value_heads": 1, "q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2,
        "index_n_heads": 2, "index_head_dim": 8, "index_topk": 2, "sliding_window": 16, "moe_intermediate_size": 16,
        "n_routed_experts": 2, "num_experts_per_tok": 1, "num_hash_layers": 1,
        "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"] * 2,
        "num_hidden_layers": 6, "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("deepseek_v4", **config), attn_implementation="eager"
    ).eval()
    tokens = 47  # 11 groups of 4 and three tokens over; 5 groups of 8 and seven over
    with torch.no_grad():
        cache = model(torch.arange(tokens)[None] % 60 + 3, use_cache=True).past_key_values
    shape = shape_of({"model_type": "deepseek_v4", **config})
    for layer, kept in zip(shape.layers, cache.layers, strict=True):
        entries = [one for one in getattr(kept, "compressed_kv", {}).values() if one is not None]
        buffers = [
            one
            for name in ("buffer_kv", "buffer_gate", "overlap_kv", "overlap_gate")
            for one in getattr(kept, name, {}).values()
            if one is not None
        ]
        stored = kept.keys.numel() + sum(one.numel() for one in entries)
        assert stored == sum(
            keep.values * (min(tokens, keep.window - 1) if keep.window else tokens // keep.ratio)
            for keep in layer.keeps
        )
        most = sum(state.values for state in layer.states)
        assert most * 3 // 4 <= sum(one.numel() for one in buffers) <= most


# ---- what the files say, and what their classes add


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(kind for kind, (_, defaults) in _KINDS.items() if defaults))
def test_what_a_file_leaves_out_is_what_its_class_takes(kind: str) -> None:
    from transformers import AutoConfig

    settings = AutoConfig.for_model(kind)
    if kind == "gemma4_text":  # whose global layers differ: the first is a local one
        settings = settings.per_layer_config[0]
    for name, value in _KINDS[kind][1].items():
        if name not in ("period", "compress_rates", "full_attention_interval", "global_head_dim"):
            assert getattr(settings, name) == value, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "local", "whole"),
    [
        ("gemma2", "sliding_attention", "full_attention"),
        ("gemma3_text", "sliding_attention", "full_attention"),
        ("gemma3n_text", "sliding_attention", "full_attention"),
        ("gemma4_text", "sliding_attention", "full_attention"),
        ("gpt_oss", "sliding_attention", "full_attention"),
        ("qwen3_next", "linear_attention", "full_attention"),
        ("jamba", "linear_attention", "full_attention"),
    ],
)
def test_layers_follow_each_other_as_in_the_class(kind: str, local: str, whole: str) -> None:
    from transformers import AutoConfig

    types = AutoConfig.for_model(kind).layer_types
    fields = {"model_type": kind, **({"hidden_size": 4096} if kind == "jamba" else {})}
    shape = shape_of(fields)
    shared = sum(layer.kind is Kind.SHARED for layer in shape.layers)
    assert shared == (15 if kind == "gemma3n_text" else 0)
    for one, layer in list(zip(types, shape.layers, strict=True))[: len(types) - shared]:
        assert one == (whole if layer.kind is Kind.FULL else local)


def test_global_layers_may_have_heads_of_their_own() -> None:
    """Gemma 4: wider heads, and fewer of them where keys and values come from one projection."""
    config = {
        "model_type": "gemma4",
        "text_config": {
            "num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
            "global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True, "sliding_window": 1024,
        },
    }  # fmt: skip
    shape = shape_of(config)
    assert [layer.keeps[0].values for layer in shape.layers] == [2 * 8 * 256] * 5 + [2 * 2 * 512]
    config["text_config"]["attention_k_eq_v"] = False  # type: ignore[index]
    assert shape_of(config).layers[-1].keeps[0].values == 2 * 8 * 512


def test_layers_that_share_a_cache_have_none_of_their_own() -> None:
    shape = shape_of({"model_type": "hunyuan_v1_dense", **TINY, "use_cla": True, "cla_share_factor": 2})
    assert [layer.kind for layer in shape.layers] == [Kind.FULL, Kind.SHARED] * 2
    assert all(not layer.keeps for layer in shape.of(Kind.SHARED))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({"torch_dtype": "bfloat16"}, "BF16", id="old-name"),
        pytest.param({"dtype": "float16"}, "FP16", id="new-name"),
        pytest.param({"dtype": "torch.float32"}, "FP32", id="with-the-module"),
        pytest.param({}, "FP32", id="unsaid"),
        pytest.param({"quantization_config": {"quant_method": "mxfp4"}}, "BF16", id="quantised-weights"),
        pytest.param({"dtype": "float8_e4m3fn"}, "BF16", id="of-the-weights-alone"),
    ],
)
def test_the_checkpoints_dtype_is_read_or_assumed_with_a_note(fields: dict[str, Any], expected: str) -> None:
    shape = shape_of({"model_type": "llama", **TINY, **fields})
    assert shape.dtype == expected
    assert bool(shape.notes) == (
        not any(str(fields.get(key, "")).endswith(("16", "32")) for key in ("dtype", "torch_dtype"))
    )


def test_the_class_name_stands_in_for_a_missing_model_type() -> None:
    for name, kind in _BY_CLASS.items():
        assert kind in _KINDS
        if kind == "llama":
            assert shape_of({"architectures": [name], **TINY}).heads is Heads.GQA


@pytest.mark.parametrize(
    ("config", "said"),
    [
        pytest.param({}, "describes no model", id="nothing"),
        pytest.param({"model_type": "rwkv9", "architectures": ["RwkvForCausalLM"]}, "RwkvForCausalLM", id="unknown"),
        pytest.param({"model_type": "llama"}, "num_attention_heads is missing", id="no-sizes"),
        pytest.param({"model_type": "llama", **TINY, "num_hidden_layers": "4"}, "num_hidden_layers is '4'", id="text"),
        pytest.param({"model_type": "llama", **TINY, "num_hidden_layers": 0}, "num_hidden_layers is 0", id="no-layers"),
        pytest.param({"model_type": "llama", **TINY, "num_hidden_layers": True}, "is True", id="a-truth-value"),
        pytest.param({"model_type": "llama", **TINY, "num_hidden_layers": 10**12}, "10", id="absurd"),
        pytest.param({"model_type": "llama", **TINY, "num_key_value_heads": 3}, "not a multiple", id="uneven-heads"),
        pytest.param({"model_type": "llama", **TINY, "layer_types": ["mamba"] * 4}, "mamba", id="unknown-layers"),
        pytest.param({"model_type": "llama", **TINY, "layer_types": ["full_attention"]}, "each of the 4", id="too-few"),
        pytest.param({"model_type": "llama", **TINY, "use_cla": True}, "cla_share_factor is missing", id="no-factor"),
        pytest.param({"model_type": "deepseek_v4", "compress_ratios": [7] * 43}, "0, 4 or 128", id="unknown-ratio"),
        pytest.param({"model_type": "deepseek_v4", "compress_rates": 4}, "a mapping", id="no-mapping"),
        pytest.param(
            {"model_type": "gemma3", "text_config": {"sliding_window": -1}}, "sliding_window is -1", id="nested"
        ),
    ],
)
def test_what_cannot_be_read_is_said_in_one_sentence(config: dict[str, Any], said: str) -> None:
    with pytest.raises(CannotPlan, match=said) as refused:
        shape_of(config)
    assert str(refused.value).startswith("config.json")
    assert "\n" not in str(refused.value)

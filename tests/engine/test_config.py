"""Reading config.json: both spellings of every field, and a sentence for what can't be run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from kvsteward_engine.config import ModelConfig, Rope, load_config, parse_config
from kvsteward_engine.errors import BadCheckpoint, UnsupportedModel
from kvsteward_engine.models.llama import inverse_frequencies
from support.oracle import LLAMA3

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}


def changed(**fields: Any) -> dict[str, Any]:
    return {key: value for key, value in {**LLAMA, **fields}.items() if value is not ...}


def test_a_plain_llama_is_read() -> None:
    config = parse_config(LLAMA)
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert config.dtype == "BF16" and config.rope == Rope(10000.0) and config.eos_token_ids == ()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({"num_key_value_heads": ...}, {"kv_heads": 4}, id="no KV heads means MHA"),
        pytest.param({"head_dim": 32}, {"head_dim": 32}, id="a head dimension of its own"),
        pytest.param({"rope_theta": 5e5}, {"rope": Rope(5e5)}, id="theta the old way"),
        pytest.param(
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, {"rope": Rope(5e5)}, id="theta, new"
        ),
        pytest.param(
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}},
            {"rope": Rope(5e5, "linear", 4.0)},
            id="linear scaling the old way",
        ),
        pytest.param(
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            {"rope": Rope(5e5, "llama3", 4.0, 1.0, 4.0, 64)},
            id="llama3 scaling the old way",
        ),
        pytest.param({"torch_dtype": ..., "dtype": "float16"}, {"dtype": "FP16"}, id="dtype the new way"),
        pytest.param({"torch_dtype": ...}, {"dtype": "FP32"}, id="no dtype means float32"),
        pytest.param({"eos_token_id": [7, 8]}, {"eos_token_ids": (7, 8)}, id="several ends"),
        pytest.param({"attention_bias": True}, {"qkv_bias": True, "output_bias": True}, id="attention bias"),
        pytest.param(
            {"architectures": ["Qwen2ForCausalLM"]}, {"qkv_bias": True, "output_bias": False}, id="Qwen2's biases"
        ),
        pytest.param({"architectures": ["Qwen3ForCausalLM"]}, {"qk_norm": True, "qkv_bias": False}, id="Qwen3's norms"),
        pytest.param(
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 128, "use_sliding_window": False},
            {"heads": 4},
            id="a window that Qwen2 doesn't use",
        ),
        pytest.param(
            {"architectures": ["MistralForCausalLM"], "sliding_window": 512},
            {"heads": 4},
            id="a window as long as the context",
        ),
    ],
)
def test_fields_are_understood(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    config = parse_config(changed(**fields))
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        pytest.param({"architectures": ["GPT2LMHeadModel"]}, UnsupportedModel, "GPT2LMHeadModel", id="architecture"),
        pytest.param({"architectures": ..., "model_type": "mamba"}, UnsupportedModel, "mamba", id="model type"),
        pytest.param(
            {"architectures": ["MistralForCausalLM"], "sliding_window": 128},
            UnsupportedModel,
            "MistralForCausalLM with a sliding window .128 tokens",
            id="Mistral's window",
        ),
        pytest.param(
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 128, "use_sliding_window": True},
            UnsupportedModel,
            "sliding window",
            id="Qwen2's window",
        ),
        pytest.param(
            {"layer_types": ["full_attention", "sliding_attention"]},
            UnsupportedModel,
            "sliding window",
            id="window layers",
        ),
        pytest.param(
            {"rope_scaling": {"rope_type": "yarn", "factor": 4}}, UnsupportedModel, "rope scaling yarn", id="yarn"
        ),
        pytest.param(
            {"rope_scaling": {"rope_type": "linear"}}, BadCheckpoint, "rope.*factor", id="scaling without factor"
        ),
        pytest.param({"partial_rotary_factor": 0.5}, UnsupportedModel, "partial_rotary_factor", id="partial rotation"),
        pytest.param({"hidden_act": "gelu"}, UnsupportedModel, "gelu", id="activation"),
        pytest.param({"quantization_config": {"quant_method": "gptq"}}, UnsupportedModel, "gptq", id="quantised"),
        pytest.param({"torch_dtype": "float8_e4m3fn"}, UnsupportedModel, "float8_e4m3fn", id="dtype"),
        pytest.param({"num_hidden_layers": ...}, BadCheckpoint, "num_hidden_layers", id="no layers"),
        pytest.param({"hidden_size": "64"}, BadCheckpoint, "hidden_size", id="a size that is text"),
        pytest.param({"num_key_value_heads": 3}, BadCheckpoint, "not a multiple", id="heads that don't divide"),
        pytest.param({"head_dim": 15}, UnsupportedModel, "odd", id="odd head dimension"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_sentence(
    fields: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        parse_config(changed(**fields))
    assert "\n" not in str(caught.value)


def test_generation_config_names_the_ends(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(changed(eos_token_id=3)))
    assert load_config(tmp_path).eos_token_ids == (3,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    assert load_config(tmp_path).eos_token_ids == (4, 5)


@pytest.mark.parametrize("content", [None, "not json", "[1]"], ids=["missing", "no JSON", "no object"])
def test_an_unreadable_config_is_a_bad_checkpoint(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        load_config(tmp_path)


def test_bytes_per_token_of_known_models() -> None:
    """bf16 figures: Llama-3.1-8B 128 KiB, Qwen2.5-7B 56 KiB."""
    llama = parse_config(
        changed(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096, head_dim=128)
    )
    qwen = parse_config(
        changed(num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, hidden_size=3584, head_dim=128)
    )
    assert (llama.bytes_per_token("BF16"), qwen.bytes_per_token("BF16")) == (128 * 1024, 56 * 1024)
    assert llama.bytes_per_token("FP32") == 256 * 1024


@pytest.mark.parametrize("scaling", [LLAMA3, {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192}])
def test_llama3_frequencies_are_transformers(scaling: dict[str, Any]) -> None:
    theirs = transformers.LlamaConfig(
        hidden_size=512, num_attention_heads=4, rope_parameters={"rope_theta": 5e5, **scaling}
    )
    expected, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](theirs, device="cpu")
    ours: ModelConfig = parse_config(changed(rope_theta=5e5, rope_scaling=scaling))
    assert torch.equal(inverse_frequencies(ours.rope, 128), expected)

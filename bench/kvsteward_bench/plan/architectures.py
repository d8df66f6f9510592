"""From a Hugging Face config.json to a Shape: which reader and which defaults a model type has.

Field names and defaults are those of the models' own classes; tests hold them against transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvsteward_bench.plan.attention_layers import Read, compressed, latent, plain, windowed
from kvsteward_bench.plan.config_fields import Fields, dtype_of, text_part
from kvsteward_bench.plan.errors import CannotPlan
from kvsteward_bench.plan.shape import Shape
from kvsteward_bench.plan.state_layers import falcon_h1, gated_delta, jamba


def shape_of(raw: Mapping[str, Any], where: str = "config.json") -> Shape:
    """Raises CannotPlan: an architecture that isn't known, or a field that can't be right."""
    inner, kind = text_part(raw)
    named = raw.get("architectures") or inner.get("architectures") or []
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    kind = kind or _BY_CLASS.get(architecture, "")
    if kind not in _KINDS:
        what = f"{architecture} (model type {kind})" if architecture and kind else architecture or kind or "no model"
        raise CannotPlan(
            f"{where} describes {what}, whose cache this planner does not know; it knows {', '.join(sorted(_KINDS))}"
        )
    reader, defaults = _KINDS[kind]
    fields = Fields(inner, where, defaults)
    read = reader(fields)
    dtype, note = dtype_of(raw, inner)
    return Shape(
        architecture or kind,
        read.layers,
        read.heads,
        fields.integer("num_attention_heads"),
        read.kv_heads,
        dtype,
        fields.integer_or("max_position_embeddings", 0, least=0),
        (note,) if note else (),
    )


_GEMMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}

# Model type: reader, and what its class takes where config.json says nothing (`period` is ours: 1 global layer in so
# many). Plain decoders have to name their sizes, as the engine wants them to.
_KINDS: dict[str, tuple[Callable[[Fields], Read], dict[str, Any]]] = {
    **{
        kind: (plain, {})
        for kind in (
            "llama mistral ministral mixtral phi3 granite olmo2 gemma starcoder2 hunyuan_v1_dense hunyuan_v1_moe"
        ).split()
    },
    **{
        kind: (plain, {"use_sliding_window": False, "max_window_layers": 28})
        for kind in ("qwen2", "qwen2_moe", "qwen3")
    },
    "qwen3_moe": (plain, {"use_sliding_window": False}),
    "gemma2": (windowed, {**_GEMMA, "num_hidden_layers": 26, "sliding_window": 4096, "period": 2}),
    "gemma3_text": (
        windowed,
        {**_GEMMA, "num_hidden_layers": 26, "sliding_window": 4096, "max_position_embeddings": 131_072, "period": 6},
    ),
    "gemma3n_text": (
        windowed,
        {
            "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "num_hidden_layers": 35,
            "sliding_window": 512, "num_kv_shared_layers": 15, "max_position_embeddings": 32_768, "period": 5,
        },
    ),
    "gemma4_text": (
        windowed,
        {
            **_GEMMA, "num_hidden_layers": 30, "sliding_window": 512, "global_head_dim": 512,
            "max_position_embeddings": 131_072, "period": 6,
        },
    ),
    "gpt_oss": (
        windowed,
        {
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 36,
            "sliding_window": 128, "max_position_embeddings": 131_072, "period": 2,
        },
    ),
    "deepseek_v2": (latent, _MLA),
    "deepseek_v3": (latent, _MLA),
    "deepseek_v32": (latent, {**_MLA, "index_topk": 2048, "index_head_dim": 128}),
    "deepseek_v4": (
        compressed,
        {
            "num_attention_heads": 64, "head_dim": 512, "num_hidden_layers": 43, "sliding_window": 128,
            "index_head_dim": 128, "index_topk": 512, "max_position_embeddings": 1_048_576, "compress_rates": {},
        },
    ),
    "qwen3_next": (
        gated_delta,
        {
            "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_hidden_layers": 48,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
            "max_position_embeddings": 32_768,
        },
    ),
    "jamba": (
        jamba,
        {
            "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "num_hidden_layers": 32,
            "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "attn_layer_period": 8, "attn_layer_offset": 4,
            "max_position_embeddings": 262_144,
        },
    ),
    "falcon_h1": (
        falcon_h1,
        {
            "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "num_hidden_layers": 32,
            "mamba_d_ssm": 1024, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
            "max_position_embeddings": 8192,
        },
    ),
}  # fmt: skip
_BY_CLASS = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text", "GptOssForCausalLM": "gpt_oss", "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3", "DeepseekV4ForCausalLM": "deepseek_v4",
    "Qwen3NextForCausalLM": "qwen3_next", "JambaForCausalLM": "jamba", "FalconH1ForCausalLM": "falcon_h1",
}  # fmt: skip

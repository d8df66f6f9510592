"""Writes an oracle's weights as a GGUF file, the way llama.cpp's converter lays them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import transformers
from support.oracle import Oracle

TOKENS = ["<|end|>", "<|start|>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "he", "Ġhe"]


def llama_cpp_permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter writes it, for Llama's query and key rows."""
    rows = weights.shape[0]
    return weights.reshape(heads, 2, rows // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def write_gguf(
    path: Path, oracle: Oracle, kind: str, quantise: gguf.GGMLQuantizationType | None = None, **fields: Any
) -> Path:
    """Write the oracle's weights the way llama.cpp's converter does; `fields` override or (None) drop metadata."""
    config = oracle.model.config
    writer = gguf.GGUFWriter(path, kind)
    numbers = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        **fields,
    }
    for key, value in numbers.items():
        if value is not None:
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(f"{kind}.{key}", value)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["h e", "Ġ he"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages }}")
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, kind.upper()), config.num_hidden_layers)
    for name, tensor in oracle.model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = llama_cpp_permute(values, heads).copy()
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if quantise is not None and values.ndim == 2:
            writer.add_tensor(stored, gguf.quantize(values, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(stored, values)
    if config.rope_parameters["rope_type"] == "llama3":
        plain = 1.0 / config.rope_parameters["rope_theta"] ** (np.arange(0, 16, 2) / 16)
        scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
        writer.add_tensor("rope_freqs.weight", (plain / scaled.numpy()).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

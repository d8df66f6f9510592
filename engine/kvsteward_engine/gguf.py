"""Reads a GGUF file as a checkpoint: its metadata as a Hugging Face config, its tensors dequantised to float32.

Dequantised values are float32-exact: what GGUF's own formulas give.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from kvsteward_engine.config import ModelConfig, Rope, parse_config
from kvsteward_engine.errors import BadCheckpoint, UnsupportedModel
from kvsteward_engine.gguf_file import GgufFile

if TYPE_CHECKING:
    import torch

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Hugging Face name -> GGUF name; {} is the layer.
_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_PER_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class GgufCheckpoint:
    """A GGUF file, memory-mapped. Raises `BadCheckpoint` for a broken file, `UnsupportedModel` for another kind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GgufFile(path)
        self._names = self._name_map()

    def field(self, key: str, default: Any = None) -> Any:
        """A metadata value, or `default`."""
        return self._file.fields.get(key, default)

    @cached_property
    def hf_config(self) -> dict[str, Any]:
        """What the file says of the model, as a Hugging Face config.json."""
        kind = self.field("general.architecture")
        if kind not in ARCHITECTURES:
            raise UnsupportedModel(f"{self.path} is of architecture {kind}; supported are {', '.join(ARCHITECTURES)}")
        heads = self._needed(f"{kind}.attention.head_count")
        hidden = self._needed(f"{kind}.embedding_length")
        config = {
            "architectures": [ARCHITECTURES[kind]],
            "model_type": kind,
            "num_hidden_layers": self._needed(f"{kind}.block_count"),
            "hidden_size": hidden,
            "intermediate_size": self._needed(f"{kind}.feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.field(f"{kind}.attention.head_count_kv", heads),
            "head_dim": self.field(f"{kind}.attention.key_length", hidden // heads),
            "vocab_size": int(self._embedding_shape()[0]),
            "max_position_embeddings": self._needed(f"{kind}.context_length"),
            "rms_norm_eps": self._needed(f"{kind}.attention.layer_norm_rms_epsilon"),
            "rope_theta": self.field(f"{kind}.rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(kind),
            "sliding_window": self.field(f"{kind}.attention.sliding_window"),
            "attention_bias": "blk.0.attn_q.bias" in self._file.tensors,
            "mlp_bias": "blk.0.ffn_down.bias" in self._file.tensors,
            "hidden_act": "silu",
            "tie_word_embeddings": "output.weight" not in self._file.tensors,
            "dtype": "bfloat16",  # quantised weights have no dtype of their own; this is the one they run fastest in
            "bos_token_id": self.field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.field("tokenizer.ggml.eos_token_id"),
        }
        return {key: value for key, value in config.items() if value is not None}

    @cached_property
    def config(self) -> ModelConfig:
        """The model's description. llama3-style scaling is stored as one divisor for each frequency."""
        config = parse_config(self.hf_config, where=str(self.path))
        if "rope_freqs.weight" not in self._file.tensors:
            return config
        factors = tuple(self._file.read("rope_freqs.weight").tolist())
        return replace(config, rope=Rope(config.rope.theta, "factors", factors=factors))

    def names(self) -> frozenset[str]:
        return frozenset(self._names)

    def read(self, name: str) -> torch.Tensor:
        import torch  # slow to load, and not needed to describe the model

        stored = self._names.get(name)
        if stored is None:
            raise BadCheckpoint(f"{self.path} has no tensor for {name}; the file is incomplete")
        values = self._file.read(stored)
        if self.field("general.architecture") == "llama" and (".attn_q." in stored or ".attn_k." in stored):
            heads = self.config.heads if ".attn_q." in stored else self.config.kv_heads
            values = halves_from_pairs(values, heads)
        return torch.from_numpy(values)

    def _needed(self, key: str) -> Any:
        value = self.field(key)
        if value is None:
            raise BadCheckpoint(f"{self.path} has no {key}; the file is incomplete")
        return value

    def _embedding_shape(self) -> tuple[int, ...]:
        tensor = self._file.tensors.get("token_embd.weight")
        if tensor is None:
            raise BadCheckpoint(f"{self.path} has no token_embd.weight; the file is incomplete")
        return tensor.shape

    def _rope_scaling(self, kind: str) -> dict[str, Any] | None:
        scaling = self.field(f"{kind}.rope.scaling.type", "none")
        if scaling == "none":
            return None
        return {"rope_type": scaling, "factor": self.field(f"{kind}.rope.scaling.factor", 1.0)}

    def _name_map(self) -> dict[str, str]:
        layers = self.field(f"{self.field('general.architecture')}.block_count", 0)
        wanted = dict(_WHOLE)
        for layer in range(layers):
            for name, stored in _PER_LAYER.items():
                for part in ("weight", "bias"):
                    wanted[f"model.layers.{layer}.{name}.{part}"] = f"blk.{layer}.{stored}.{part}"
        return {name: stored for name, stored in wanted.items() if stored in self._file.tensors}


def halves_from_pairs(values: numpy.ndarray, heads: int) -> numpy.ndarray:
    """Undo llama.cpp's reordering of query and key rows, (heads * head_dim, ...) in and out.

    It stores each head's rows so that rotated pairs lie next to each other; Hugging Face rotates row i with row
    i + head_dim / 2.
    """
    shape = values.shape
    return values.reshape(heads, shape[0] // heads // 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape).copy()

"""Tiny random checkpoints made by transformers, and its logits: what the engine's own must equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from kvsteward_engine.sequence import SamplingParams, Sequence, Step, Work

SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# name -> (transformers' config class, what differs from SIZES)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("LlamaConfig", {}),
    "llama-mqa": ("LlamaConfig", {"num_key_value_heads": 1}),
    "llama-mha-tied": ("LlamaConfig", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("LlamaConfig", {"head_dim": 32}),
    "llama3-rope": ("LlamaConfig", {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}),
    "llama-linear-rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}},
    ),
    "llama-three-groups": ("LlamaConfig", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}),
    "qwen2-gqa": ("Qwen2Config", {}),
    "qwen2-mha": ("Qwen2Config", {"num_key_value_heads": 4}),
    "qwen3-gqa": ("Qwen3Config", {"head_dim": 32}),
    "qwen3-mqa": ("Qwen3Config", {"head_dim": 16, "num_key_value_heads": 1}),
    "mistral-gqa": ("MistralConfig", {"sliding_window": None}),
}


class Oracle:
    """One random model of transformers, saved in `folder`."""

    def __init__(self, folder: Path, variant: str, seed: int = 0, **save: Any) -> None:
        self.variant = variant
        kind, changes = VARIANTS[variant]
        config = getattr(transformers, kind)(**{**SIZES, **changes})
        torch.manual_seed(seed)
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                # Wide weights and uneven norms and biases, so that a mistake in any of them shows in the logits.
                if parameter.dim() > 1:
                    parameter.normal_(std=1.5 / parameter.shape[-1] ** 0.5)
                else:
                    parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
        self.folder = folder
        self.model.save_pretrained(folder, **save)

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """(len(tokens), vocab), computed at once from nothing."""
        return self.model(torch.tensor([tokens])).logits[0]


def sequence(
    tokens: list[int], pages: list[int], name: str = "s", prompt_len: int | None = None, **sampling: Any
) -> Sequence:
    """A sequence that holds `pages`."""
    return Sequence(name, list(tokens), prompt_len or len(tokens), SamplingParams(**sampling), pages=list(pages))


def step(*works: tuple[Sequence, int, int]) -> Step:
    """A step that samples from each (sequence, start, count)."""
    return Step(tuple(Work(held, start, count, sample=True) for held, start, count in works))


def random_tokens(count: int, seed: int, vocab: int = SIZES["vocab_size"]) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()

"""The Llama family: Llama, Mistral, Qwen2 (biases) and Qwen3 (normed heads), one definition with flags.

In half precision the residual stream and the norms stay in float32: only matrix products and attention are computed
in 16 bits, which takes a third off the error of the logits for a few percent of the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvsteward_engine.config import ModelConfig, Rope
from kvsteward_engine.errors import BadCheckpoint
from kvsteward_engine.linear import Linear, pack
from kvsteward_engine.weights import Checkpoint

REFINED = 32  # likeliest tokens whose logits are computed in float32


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; q, k and v are fused, gate and up are not, as their activations are instead."""

    input_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate: Linear
    up: Linear
    down: Linear


class LlamaModel:
    """See `Model` for the stages."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, positions: int
    ) -> None:
        self.config = config
        self.layers = config.layers
        self._dtype = dtype
        loader = _Loader(config, checkpoint, dtype, device)
        self._embedding = loader.tensor("model.embed_tokens.weight", (config.vocab, config.hidden))
        self._stack = [loader.layer(index) for index in range(config.layers)]
        self._norm = loader.norm("model.norm.weight", config.hidden)
        tied = config.tied_embeddings and "lm_head.weight" not in checkpoint.names()
        head = self._embedding if tied else loader.tensor("lm_head.weight", (config.vocab, config.hidden))
        self._head = pack(head)
        self._head_rows = head if dtype.itemsize < 4 else None
        self._cos, self._sin = rotary_table(config.rope, config.head_dim, positions, dtype, device)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self._embedding).float()

    def rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    def before(
        self, layer: int, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights, config = self._stack[layer], self.config
        rotated = config.heads + config.kv_heads
        qkv = weights.qkv(self._normed(x, weights.input_norm)).unflatten(1, (-1, config.head_dim))
        qk = qkv[:, :rotated]
        if weights.query_norm is not None and weights.key_norm is not None:
            q = self._normed(qk[:, : config.heads], weights.query_norm)
            qk = torch.cat((q, self._normed(qk[:, config.heads :], weights.key_norm)), dim=1)
        cos, sin = rotation
        qk = torch.addcmul(qk * cos, qk.roll(config.head_dim // 2, -1), sin)
        return qk[:, : config.heads], qk[:, config.heads :], qkv[:, rotated:]

    def after(self, layer: int, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        weights = self._stack[layer]
        x = weights.output.plus(attended, x)
        normed = self._normed(x, weights.mlp_norm)
        return weights.down.plus(weights.up.times(normed, weights.gate.silu(normed)), x)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """In half precision the likeliest tokens' logits are computed again in float32: rounded to 8 or 11 bits they
        would often tie, and the first of a tie is a wrong answer."""
        normed = self._normed(x, self._norm)
        logits = self._head(normed).float()
        if self._head_rows is not None:
            likeliest = logits.topk(min(REFINED, logits.shape[-1]), dim=-1).indices
            rows = F.embedding(likeliest, self._head_rows).float()
            logits.scatter_(-1, likeliest, torch.bmm(rows, normed.float().unsqueeze(-1)).squeeze(-1))
        return logits

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Computed in float32, given in the dtype of the matrix products."""
        return F.rms_norm(x.float(), weight.shape, weight, self.config.norm_eps).to(self._dtype)


def rotary_table(
    rope: Rope, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, each (positions, head_dim), for x * cos + halves_swapped(x) * sin.

    The sines of the first half are negated, which spares a negation a layer. Angles are computed in float32, as
    transformers does, and rounded to `dtype` last.
    """
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    cos, sin = angles.cos(), angles.sin()
    table = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return table[0].to(device, dtype), table[1].to(device, dtype)


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """(head_dim / 2,) radians a position, after the checkpoint's scaling."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    base = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "factors":
        return base / torch.tensor(rope.factors, dtype=torch.float32)
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / base
        context = rope.original_positions
        smooth = (context / wavelength - rope.low) / (rope.high - rope.low)
        blended = (1 - smooth) * base / rope.factor + smooth * base
        scaled = torch.where(wavelength > context / rope.low, base / rope.factor, base)
        middle = (wavelength >= context / rope.high) & (wavelength <= context / rope.low)
        return torch.where(middle, blended, scaled)
    return base


class _Loader:
    """Reads tensors by Hugging Face name, checks their shapes against the config, fuses and places them."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._checked(name, shape).to(self._device, self._dtype)

    def _checked(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        read = self._checkpoint.read(name)
        if tuple(read.shape) != shape:
            raise BadCheckpoint(f"tensor {name} is {tuple(read.shape)} where the config asks for {shape}")
        return read

    def norm(self, name: str, size: int) -> torch.Tensor:
        """A norm's weight, always float32."""
        return self._checked(name, (size,)).to(self._device, torch.float32)

    def layer(self, index: int) -> Layer:
        config, prefix = self._config, f"model.layers.{index}."
        query, key, width = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.intermediate
        attention, hidden = prefix + "self_attn.", config.hidden
        return Layer(
            input_norm=self.norm(prefix + "input_layernorm.weight", hidden),
            qkv=self._fused(
                {attention + "q_proj": query, attention + "k_proj": key, attention + "v_proj": key},
                hidden,
                config.qkv_bias,
            ),
            query_norm=self.norm(attention + "q_norm.weight", config.head_dim) if config.qk_norm else None,
            key_norm=self.norm(attention + "k_norm.weight", config.head_dim) if config.qk_norm else None,
            output=self._fused({attention + "o_proj": hidden}, query, config.output_bias),
            mlp_norm=self.norm(prefix + "post_attention_layernorm.weight", hidden),
            gate=self._fused({prefix + "mlp.gate_proj": width}, hidden, config.mlp_bias),
            up=self._fused({prefix + "mlp.up_proj": width}, hidden, config.mlp_bias),
            down=self._fused({prefix + "mlp.down_proj": hidden}, width, config.mlp_bias),
        )

    def _fused(self, outputs: dict[str, int], width: int, biased: bool) -> Linear:
        weight = torch.cat([self.tensor(f"{name}.weight", (size, width)) for name, size in outputs.items()])
        bias = torch.cat([self.tensor(f"{name}.bias", (size,)) for name, size in outputs.items()]) if biased else None
        return pack(weight, bias)

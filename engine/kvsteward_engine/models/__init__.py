"""Model definitions by architecture. A model knows its weights and row-wise maths; it knows nothing of pages.

To add an architecture: a module with the stages of `Model`, and a line in `load_model`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from kvsteward_engine.attention import Attention
from kvsteward_engine.batch import Batch
from kvsteward_engine.config import ModelConfig
from kvsteward_engine.models.llama import LlamaModel
from kvsteward_engine.weights import Checkpoint

Rotation = tuple[torch.Tensor, torch.Tensor]
QueryKeyValue = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Model(Protocol):
    """A decoder cut at its attention: each stage works on rows (hidden states) that don't look at each other."""

    layers: int

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """(rows,) -> (rows, hidden)."""

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """(rows,) -> cosines and signed sines, each (rows, 1, head_dim)."""

    def before(self, layer: int, x: torch.Tensor, rotation: Rotation) -> QueryKeyValue:
        """(rows, hidden) -> rotated queries, rotated keys, values, each (rows, heads of its kind, head_dim)."""

    def after(self, layer: int, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of the layer: (rows, hidden) and (rows, heads * head_dim) -> (rows, hidden)."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, hidden) -> (rows, vocab) float32."""


def load_model(
    config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, positions: int
) -> LlamaModel:
    """Read a checkpoint's weights onto the device; `positions` bounds the rotary table."""
    return LlamaModel(config, checkpoint, dtype, device, positions)


def forward(model: Model, attention: Attention, batch: Batch) -> torch.Tensor:
    """One pass over a step's rows; float32 logits (sampling works, vocab), (0, 0) if nothing is sampled."""
    attention.begin(batch)
    x = model.embed(batch.tokens)
    rotation = model.rotation(batch.positions)
    for layer in range(model.layers):
        attended = attention.attend(layer, *model.before(layer, x, rotation))
        if layer == model.layers - 1:  # all keys and values are stored: only sampled rows matter from here on
            if not len(batch.samples):
                return x.new_empty((0, 0), dtype=torch.float32)
            x, attended = x[batch.samples], attended[batch.samples]
        x = model.after(layer, x, attended)
    return model.logits(x)

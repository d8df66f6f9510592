"""What a model keeps of each token, layer by layer. Counts values, not bytes; knows no file format."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What makes a layer's cache differ from that of plain attention."""

    FULL = "full"  # keeps every token
    WINDOW = "window"  # keeps the newest tokens
    SHARED = "shared"  # reads the cache of an earlier layer and keeps none
    RECURRENT = "recurrent"  # keeps a state whose size never changes
    PARALLEL = "parallel"  # attention and a recurrent state side by side
    COMPRESSED = "compressed"  # keeps one entry for several tokens, and a window


class Heads(Enum):
    """How query heads share keys and values within a layer."""

    MHA = "MHA"  # each has its own
    GQA = "GQA"  # a group shares one pair
    MQA = "MQA"  # all share one pair
    MLA = "MLA"  # one latent for all, with a rotary key beside it


@dataclass(frozen=True, slots=True)
class Keep:
    """Entries of `values` numbers each: one for every `ratio` tokens, the newest `window` tokens only unless it is 0.

    A step reads at most the `top` best of them unless it is 0.
    """

    values: int
    window: int = 0
    ratio: int = 1
    top: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """A fixed number of values a sequence holds. `dtype` None: the checkpoint's own."""

    what: str
    values: int
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """`alone`: values a token would take if every query head kept its own key and value. `full`: with the model's
    heads, but without window, sharing, compression or recurrence. `keeps` and `states`: what is really held."""

    kind: Kind
    alone: int
    full: int
    keeps: tuple[Keep, ...]
    states: tuple[State, ...] = ()


@dataclass(frozen=True, slots=True)
class Shape:
    """A model as the planner sees it."""

    architecture: str
    layers: tuple[Layer, ...]
    heads: Heads
    query_heads: int
    kv_heads: int  # of most layers
    dtype: str  # the checkpoint's own: BF16, FP16 or FP32
    max_positions: int  # 0: not said
    notes: tuple[str, ...] = ()

    def of(self, kind: Kind) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.kind is kind)

    @property
    def fixed(self) -> tuple[State, ...]:
        """Every layer's states."""
        return tuple(state for layer in self.layers for state in layer.states)

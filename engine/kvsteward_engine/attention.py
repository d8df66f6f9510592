"""Paged attention with grouped queries: a pool of token-major pages, and how a step's queries read it.

Pages are (block_tokens, kv_heads, head_dim); a layer's pages are gathered into a preallocated scratch, then read in
place by grouped scaled-dot-product attention. Keys and values are never repeated per query head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from kvsteward_engine.batch import Batch, Chunk, DecodeGroup


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one page holds, in every layer."""

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token, all layers."""
        return self.layers * self.layer_bytes_per_token

    @property
    def layer_bytes_per_token(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


class PagePool:
    """The pages of all layers: `keys` and `values` are (layers, pages, block_tokens, kv_heads, head_dim).

    Zeroed at the start and page by page as they change hands, so that a masked read of an unwritten slot is finite
    and no page shows its new holder what the last one left.
    """

    def __init__(self, layout: KVLayout, pages: int, device: torch.device) -> None:
        shape = (layout.layers, pages, layout.block_tokens, layout.kv_heads, layout.head_dim)
        self.layout = layout
        self.pages = pages
        self.keys = torch.zeros(shape, dtype=layout.dtype, device=device)
        self.values = torch.zeros(shape, dtype=layout.dtype, device=device)
        width = layout.kv_heads * layout.head_dim
        self._slots = [
            (keys.view(-1, width), values.view(-1, width)) for keys, values in zip(self.keys, self.values, strict=True)
        ]
        self._pages = [
            (keys.view(pages, -1), values.view(pages, -1)) for keys, values in zip(self.keys, self.values, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.keys.nbytes + self.values.nbytes

    def clear(self, pages: torch.Tensor) -> None:
        """Zero pages (int64 ids) in every layer."""
        self.keys.index_fill_(1, pages, 0)
        self.values.index_fill_(1, pages, 0)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values, each (rows, kv_heads, head_dim), at slots (rows,)."""
        into_keys, into_values = self._slots[layer]
        into_keys.index_copy_(0, slots, keys.reshape(len(slots), -1))
        into_values.index_copy_(0, slots, values.reshape(len(slots), -1))

    def gather(self, layer: int, table: torch.Tensor, scratch: Scratch) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of pages in table order, each (len(table) * block_tokens, kv_heads, head_dim)."""
        from_keys, from_values = self._pages[layer]
        keys, values = scratch.take(len(table), from_keys.shape[1])
        torch.index_select(from_keys, 0, table, out=keys)
        torch.index_select(from_values, 0, table, out=values)
        shape = (-1, self.layout.kv_heads, self.layout.head_dim)
        return keys.view(shape), values.view(shape)


class Scratch:
    """Room for gathered pages, kept between layers and steps; it grows to the largest step met."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._room = torch.empty((2, 0), dtype=dtype, device=device)

    def take(self, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Two views (rows, width), valid until the next call."""
        size = rows * width
        if self._room.shape[1] < size:
            self._room = torch.empty((2, size + size // 4), dtype=self._room.dtype, device=self._room.device)
        return self._room[0, :size].view(rows, width), self._room[1, :size].view(rows, width)


class Attention(Protocol):
    """Writes a step's keys and values to the pool and attends to what each row may see."""

    group_tokens: int  # keys that a group of decodes should gather at most

    def begin(self, batch: Batch) -> None:
        """Prepare for a step."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q (rows, heads, head_dim), k and v (rows, kv_heads, head_dim) -> (rows, heads * head_dim)."""


# Keys and values of a group are gathered and read at once, so on CPU they should stay in a core's own cache between.
CACHE_BYTES = 1 << 20


class BatchedAttention:
    """The fast backend: one attention call for each group of decodes and each prefill chunk."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        on_cpu = pool.keys.device.type == "cpu"
        self.group_tokens = CACHE_BYTES // pool.layout.layer_bytes_per_token if on_cpu else 1 << 62
        self._scratch = Scratch(pool.layout.dtype, pool.keys.device)
        self._batch: Batch | None = None
        self._masks: dict[int, torch.Tensor] = {}  # first row of a group or chunk -> additive mask

    def begin(self, batch: Batch) -> None:
        self._batch = batch
        block = self._pool.layout.block_tokens
        self._masks = {}
        for group in batch.groups:
            if group.size > 1:
                self._masks[group.first] = self._length_mask(group, len(group.table) // group.size * block)
        for chunk in batch.chunks:
            if chunk.start:
                self._masks[chunk.first] = self._causal_mask(chunk)
        if batch.fresh_pages is not None:
            self._pool.clear(batch.fresh_pages)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        batch = self._batch
        if batch is None:
            raise RuntimeError("attend() was called before begin()")
        self._pool.write(layer, batch.slots, k, v)
        parts = [self._decode(layer, q, group) for group in batch.groups]
        parts += [self._prefill(layer, q, k, v, chunk) for chunk in batch.chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, layer: int, q: torch.Tensor, group: DecodeGroup) -> torch.Tensor:
        layout = self._pool.layout
        keys, values = self._pool.gather(layer, group.table, self._scratch)
        keys = keys.view(group.size, -1, layout.kv_heads, layout.head_dim)
        values = values.view(group.size, -1, layout.kv_heads, layout.head_dim)
        mask = self._masks.get(group.first)
        if mask is None:  # a lone sequence: cut to its length instead
            keys, values = keys[:, : group.length], values[:, : group.length]
        queries = q[group.first : group.first + group.size].unflatten(1, (layout.kv_heads, -1))
        out = F.scaled_dot_product_attention(queries, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask)
        return out.reshape(group.size, -1)

    def _prefill(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        rows = slice(chunk.first, chunk.first + chunk.count)
        if chunk.start == 0:
            return grouped_attention(q[rows], k[rows], v[rows], None)
        end = chunk.start + chunk.count
        keys, values = self._pool.gather(layer, chunk.pages, self._scratch)
        return grouped_attention(q[rows], keys[:end], values[:end], self._masks[chunk.first])

    def _length_mask(self, group: DecodeGroup, padded: int) -> torch.Tensor:
        """(size, 1, 1, padded): 0 where a key exists, -inf where it's padding."""
        device = self._pool.keys.device
        lengths = torch.tensor(group.lengths, device=device)
        hidden = torch.arange(padded, device=device)[None, :] >= lengths[:, None]
        mask = torch.zeros(hidden.shape, dtype=self._pool.layout.dtype, device=device)
        return mask.masked_fill_(hidden, float("-inf"))[:, None, None, :]

    def _causal_mask(self, chunk: Chunk) -> torch.Tensor:
        """(count, end): row i sees keys up to position start + i."""
        end = chunk.start + chunk.count
        mask = torch.full(
            (chunk.count, end), float("-inf"), dtype=self._pool.layout.dtype, device=self._pool.keys.device
        )
        return mask.triu_(chunk.start + 1)


def grouped_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """q (n, heads, d) over k, v (m, kv_heads, d) of one sequence -> (n, heads * d); `mask` None: causal, n = m.

    The query heads of a group become the batch dimension, over which the keys have stride 0: nothing is copied, and
    the mask stays (n, m).
    """
    kv_heads = k.shape[1]
    queries = q.unflatten(1, (kv_heads, -1)).permute(2, 1, 0, 3)
    group = queries.shape[0]
    keys = k.transpose(0, 1).expand(group, -1, -1, -1)
    values = v.transpose(0, 1).expand(group, -1, -1, -1)
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=mask is None)
    return out.permute(2, 1, 0, 3).reshape(q.shape[0], -1)

"""The same bits whatever else is in the batch, however a prompt was cut, and wherever its pages came from.

Two rules make it so. Row-wise stages run on tiles of a fixed number of rows, so that the same kernels run at every
step. Attention runs for one sequence at a time, on tiles of queries that start at fixed positions over a number of
keys that depends on the tile's position alone, so that every reduction has one order. That a row's bits don't depend
on its place in a tile or on its neighbours is a property of the machine's kernels: it is tried out at start with the
model's own weights, and the engine refuses to start where it doesn't hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from kvsteward_engine.attention import PagePool, Scratch
from kvsteward_engine.batch import Batch, plan
from kvsteward_engine.config import ModelConfig
from kvsteward_engine.errors import NotDeterministic
from kvsteward_engine.models import Model, QueryKeyValue, Rotation, forward
from kvsteward_engine.sequence import SamplingParams, Sequence, Step, Work

NARROW = (8, 16, 32)  # rows a tile; the first that proves itself
WIDE = (256, 128, 64, 32)  # rows a tile for long prompts, where bits equal those of the narrow tile
QUERY_TILE = 16  # positions
KEY_TILE = 512  # positions; torch's CPU kernel reduces over blocks of as many keys


class TiledModel:
    """A model whose stages see tiles of `narrow` rows only, or of `wide` rows where that gives equal bits."""

    def __init__(self, model: Model, narrow: int, wide: int) -> None:
        self._model = model
        self.layers = model.layers
        self.narrow = narrow
        self.wide = wide

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._model.embed(tokens)

    def rotation(self, positions: torch.Tensor) -> Rotation:
        return self._model.rotation(positions)

    def before(self, layer: int, x: torch.Tensor, rotation: Rotation) -> QueryKeyValue:
        parts = self._tiled(lambda rows, cos, sin: self._model.before(layer, rows, (cos, sin)), x, *rotation)
        q, k, v = (torch.cat(each) for each in zip(*parts, strict=True))
        return q, k, v

    def after(self, layer: int, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        parts = self._tiled(lambda rows, seen: (self._model.after(layer, rows, seen),), x, attended)
        return torch.cat([part for (part,) in parts])

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        tiles = [(first, min(first + self.narrow, len(x)), self.narrow) for first in range(0, len(x), self.narrow)]
        return torch.cat([self._model.logits(_tile(x, *tile))[: tile[1] - tile[0]] for tile in tiles])

    def _tiled(
        self, stage: Callable[..., tuple[torch.Tensor, ...]], *rows: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        for first, last, width in self._tiles(len(rows[0])):
            results = stage(*(_tile(each, first, last, width) for each in rows))
            yield tuple(result[: last - first] for result in results)

    def _tiles(self, rows: int) -> Iterator[tuple[int, int, int]]:
        """(first, last, width): wide tiles while they are at least half full, then narrow ones."""
        first = 0
        while first < rows:
            width = self.wide if (rows - first) * 2 >= self.wide else self.narrow
            last = min(first + width, rows)
            yield first, last, width
            first = last


def _tile(rows: torch.Tensor, first: int, last: int, width: int) -> torch.Tensor:
    """Rows [first, last) in a buffer of its own, so that alignment is always the same, padded with zeros to `width`."""
    tile = rows.new_zeros((width, *rows.shape[1:]))
    tile[: last - first] = rows[first:last]
    return tile


class TiledAttention:
    """Attention of one sequence at a time; see the module's docstring. Same contract as `BatchedAttention`."""

    def __init__(self, pool: PagePool, positions: int) -> None:
        self._pool = pool
        self.group_tokens = 0  # every sequence is attended to alone anyway
        self._scratch = Scratch(pool.layout.dtype, pool.keys.device)
        self._reach = -(-positions // KEY_TILE) * KEY_TILE
        # A tile at position p reads columns [reach - p, reach - p + keys): zero up to its rows' own positions.
        columns = torch.arange(2 * self._reach)[None, :] - self._reach
        hidden = columns > torch.arange(QUERY_TILE)[:, None]
        self._mask = torch.zeros(hidden.shape, dtype=pool.layout.dtype).masked_fill_(hidden, float("-inf"))
        self._batch: Batch | None = None
        self._tables: list[torch.Tensor] = []

    def begin(self, batch: Batch) -> None:
        self._batch = batch
        self._tables = []
        block = self._pool.layout.block_tokens
        for work in batch.works:
            pages = work.sequence.pages
            wanted = -(-_keys(work.start + work.count - 1) // block)
            # Padded with the sequence's own first page: masked, and nobody else's numbers are touched.
            table = pages[:wanted] + pages[:1] * (wanted - len(pages))
            self._tables.append(torch.tensor(table, dtype=torch.int64))
        if batch.fresh_pages is not None:
            self._pool.clear(batch.fresh_pages)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        batch = self._batch
        if batch is None:
            raise RuntimeError("attend() was called before begin()")
        self._pool.write(layer, batch.slots, k, v)
        parts: list[torch.Tensor] = []
        first = 0
        for work, table in zip(batch.works, self._tables, strict=True):
            keys, values = self._pool.gather(layer, table, self._scratch)
            position, end = work.start, work.start + work.count
            while position < end:
                origin = position - position % QUERY_TILE
                count = min(origin + QUERY_TILE, end) - position
                rows = q[first : first + count]
                parts.append(self._attend_tile(rows, keys, values, origin, position - origin))
                position, first = position + count, first + count
        return torch.cat(parts)

    def _attend_tile(
        self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, origin: int, offset: int
    ) -> torch.Tensor:
        """Rows (n, heads, dim) at positions origin + offset and on, in the tile of queries that starts at `origin`."""
        reach = _keys(origin)
        kv_heads = self._pool.layout.kv_heads
        tile = rows.new_zeros((QUERY_TILE, *rows.shape[1:]))
        tile[offset : offset + len(rows)] = rows
        queries = tile.unflatten(1, (kv_heads, -1)).permute(2, 1, 0, 3)
        group = queries.shape[0]
        out = F.scaled_dot_product_attention(
            queries,
            keys[:reach].transpose(0, 1).expand(group, -1, -1, -1),
            values[:reach].transpose(0, 1).expand(group, -1, -1, -1),
            attn_mask=self._mask[:, self._reach - origin : self._reach - origin + reach],
        )
        return out[:, :, offset : offset + len(rows)].permute(2, 1, 0, 3).reshape(len(rows), -1)


def _keys(position: int) -> int:
    """Keys that the query tile holding `position` reads."""
    end = position - position % QUERY_TILE + QUERY_TILE
    return -(-end // KEY_TILE) * KEY_TILE


def deterministic_parts(model: Model, pool: PagePool, config: ModelConfig) -> tuple[TiledModel, TiledAttention]:
    """The tiled model and attention, proven on this machine with these weights. Raises `NotDeterministic`."""
    if pool.keys.device.type != "cpu":
        raise NotDeterministic("--deterministic is proven on CPU only; choose --device cpu or leave it out")
    dtype = pool.layout.dtype
    narrow = next((width for width in NARROW if _rows_are_alone(model, config, dtype, width)), None)
    if narrow is None:
        raise NotDeterministic(
            "--deterministic can't be kept: this CPU's matrix kernels give a row other bits in another place of a tile;"
            " choose another --dtype or leave it out"
        )
    wide = next((width for width in WIDE if _tiles_agree(model, config, dtype, narrow, width)), narrow)
    tiled = TiledModel(model, narrow, wide)
    attention = TiledAttention(pool, min(config.max_positions, pool.pages * pool.layout.block_tokens))
    prove(tiled, attention, pool, config)
    return tiled, attention


def prove(model: Model, attention: TiledAttention, pool: PagePool, config: ModelConfig) -> None:
    """Compute a prompt at once and alone, then cut beside another. Raises `NotDeterministic` if bits differ."""
    block = pool.layout.block_tokens
    half = pool.pages // 2
    if half < 1:
        raise NotDeterministic("--deterministic needs at least two pages for its check; raise --capacity")
    length = max(2, min(3 * QUERY_TILE + 5, half * block, config.max_positions))
    pages = -(-length // block)
    tokens = torch.randint(config.vocab, (length,), generator=torch.Generator().manual_seed(1)).tolist()

    def held(first: int, order: int) -> Sequence:
        return Sequence("check", tokens[::order], length, SamplingParams(), pages=list(range(first, first + pages)))

    def run(*works: tuple[Sequence, int, int]) -> torch.Tensor:
        step = Step(tuple(Work(sequence, start, count, sample=True) for sequence, start, count in works))
        return forward(model, attention, plan(step, block, pool.keys.device))

    alone, cut, other = held(0, 1), held(half, 1), held(0, -1)
    cold = run((alone, 0, length))[0].clone()
    kept = pool.keys[:, :pages].clone(), pool.values[:, :pages].clone()
    third = max(1, length // 3)
    run((other, 0, third), (cut, 0, third))
    if length - third > 1:
        run((cut, third, length - third - 1), (other, third, length - third - 1))
    again = run((other, length - 1, 1), (cut, length - 1, 1))[1]
    same = torch.equal(cold, again)
    same = same and torch.equal(kept[0], pool.keys[:, half : half + pages])
    same = same and torch.equal(kept[1], pool.values[:, half : half + pages])
    pool.clear(torch.tensor([*range(pages), *range(half, half + pages)]))
    if not same:
        raise NotDeterministic(
            "--deterministic can't be kept: a prompt cut in pieces beside another gave other bits than at once and"
            " alone; choose another --dtype or leave it out"
        )


def _rows_are_alone(model: Model, config: ModelConfig, dtype: torch.dtype, width: int) -> bool:
    """Whether each row of a tile gives the same bits in every place and beside other rows, in every stage."""
    inputs = _Inputs(model, config, dtype, width)
    for stage in inputs.stages():
        rows, strangers = inputs.rows(1), inputs.rows(2)
        expected = stage(rows)
        for shift in range(1, width):
            if not torch.equal(stage(rows.roll(shift, 0)), expected.roll(shift, 0)):
                return False
        strangers[0] = rows[0]
        if not torch.equal(stage(strangers)[0], expected[0]):
            return False
    return True


def _tiles_agree(model: Model, config: ModelConfig, dtype: torch.dtype, narrow: int, wide: int) -> bool:
    """Whether a wide tile gives the bits of narrow ones, in every stage but the logits, which are always narrow."""
    inputs = _Inputs(model, config, dtype, wide)
    for stage in inputs.stages(head=False):
        rows = inputs.rows(3)
        for shift in (0, 3):
            moved = rows.roll(shift, 0)
            parts = [stage(_tile(moved, first, first + narrow, narrow)) for first in range(0, wide, narrow)]
            if not torch.equal(stage(moved), torch.cat(parts)):
                return False
    return True


class _Inputs:
    """Random rows that carry the input of every stage side by side: hidden, attended and position."""

    def __init__(self, model: Model, config: ModelConfig, dtype: torch.dtype, width: int) -> None:
        self._model = model
        self._hidden = config.hidden
        self._attended = config.heads * config.head_dim
        self._width = width
        self._attended_dtype = dtype

    def rows(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn((self._width, self._hidden + self._attended), generator=generator)

    def stages(self, head: bool = True) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        for layer in range(self._model.layers):
            yield partial(self._before, layer)
            yield partial(self._after, layer)
        if head:
            yield self._logits

    def _before(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        rotation = self._model.rotation(torch.ones(len(rows), dtype=torch.int64))
        return torch.cat([each.flatten(1) for each in self._model.before(layer, self._split(rows)[0], rotation)], dim=1)

    def _after(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        return self._model.after(layer, *self._split(rows))

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        return self._model.logits(self._split(rows)[0])

    def _split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, attended = rows.split((self._hidden, self._attended), dim=1)
        return hidden.contiguous(), attended.to(self._attended_dtype).contiguous()

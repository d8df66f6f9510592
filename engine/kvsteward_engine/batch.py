"""A step's geometry: which row of the flattened batch is which position, where its keys go, what it may look at.

Built once a step, read by every layer. Rows of single-position works (decodes) come first, grouped by length; then
each longer work (a prefill chunk) as one run of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvsteward_engine.sequence import Step, Work

# A group's keys are gathered padded to its longest member, so a member may be at most so much shorter: to less than
# half, by more than 16 pages.
GROUP_SHRINK = 2
GROUP_PAGES = 16


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [first, first + count) are positions [start, start + count) of one sequence whose pages are `pages`."""

    first: int
    start: int
    count: int
    pages: torch.Tensor  # (pages up to the chunk's end,) int64


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows [first, first + size): one position each of `size` sequences."""

    first: int
    size: int
    length: int  # keys of the longest member, its newest included
    table: torch.Tensor  # (size * pages of the longest,) int64, padded with the member's own first page
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """All rows of a step. `samples[i]` is the row whose logits the i-th sampling work wants."""

    works: tuple[Work, ...]  # in row order
    tokens: torch.Tensor  # (rows,) int64
    positions: torch.Tensor  # (rows,) int64
    slots: torch.Tensor  # (rows,) int64: page * block_tokens + offset
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]
    fresh_pages: torch.Tensor | None  # pages first written in this step and not filled by it
    samples: torch.Tensor  # (sampling works,) int64


def plan(step: Step, block_tokens: int, device: torch.device, group_tokens: int = 1 << 62) -> Batch:
    """Lay out a step; a group of decodes gathers at most `group_tokens`, or has one member.

    Raises `ValueError` for a work that reaches past its sequence's tokens or pages.
    """
    for work in step.works:
        _check(work, block_tokens)
    decodes = sorted(
        (work for work in step.works if work.count == 1), key=lambda work: work.start // block_tokens, reverse=True
    )
    works = (*decodes, *(work for work in step.works if work.count > 1))
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    fresh: list[int] = []
    last_row: dict[int, int] = {}
    chunks: list[Chunk] = []
    for work in works:
        end = work.start + work.count
        pages = work.sequence.pages
        if work.count > 1:
            reach = -(-end // block_tokens)
            chunks.append(Chunk(len(tokens), work.start, work.count, _ids(pages[:reach], device)))
        tokens.extend(work.sequence.tokens[work.start : end])
        positions.extend(range(work.start, end))
        slots.extend(pages[p // block_tokens] * block_tokens + p % block_tokens for p in range(work.start, end))
        if end % block_tokens and work.start <= end - end % block_tokens:
            fresh.append(pages[end // block_tokens])
        last_row[id(work)] = len(tokens) - 1
    return Batch(
        works=works,
        tokens=_ids(tokens, device),
        positions=_ids(positions, device),
        slots=_ids(slots, device),
        groups=_groups(decodes, block_tokens, device, group_tokens // block_tokens),
        chunks=tuple(chunks),
        fresh_pages=_ids(fresh, device) if fresh else None,
        samples=_ids([last_row[id(work)] for work in step.works if work.sample], device),
    )


def _check(work: Work, block_tokens: int) -> None:
    end = work.start + work.count
    if work.count < 1 or work.start < 0 or end > len(work.sequence.tokens):
        raise ValueError(f"work [{work.start}, {end}) is outside sequence {work.sequence.id}'s tokens")
    if end > len(work.sequence.pages) * block_tokens:
        held = len(work.sequence.pages)
        raise ValueError(f"sequence {work.sequence.id} holds {held} pages, too few for position {end - 1}")


def _groups(decodes: list[Work], block_tokens: int, device: torch.device, most_pages: int) -> tuple[DecodeGroup, ...]:
    groups: list[DecodeGroup] = []
    first = 0
    while first < len(decodes):
        longest = decodes[first].start // block_tokens + 1
        last = first
        while last < len(decodes):
            pages = decodes[last].start // block_tokens + 1
            if pages * GROUP_SHRINK < longest and longest - pages > GROUP_PAGES:
                break
            if last > first and (last - first + 1) * longest > most_pages:
                break
            last += 1
        members = decodes[first:last]
        table: list[int] = []
        for work in members:
            pages = work.start // block_tokens + 1
            table.extend(work.sequence.pages[:pages])
            table.extend(work.sequence.pages[:1] * (longest - pages))
        lengths = tuple(work.start + 1 for work in members)
        groups.append(DecodeGroup(first, len(members), max(lengths), _ids(table, device), lengths))
        first = last
    return tuple(groups)


def _ids(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)

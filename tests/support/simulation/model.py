"""A model small enough to check by hand, whose every answer depends on all that it reads through the pages.

The state at a position is a mix of the state before it, read back from its page, and the token; the next token depends
on the states of all positions, each read through the sequence's page table. So a page that belongs to another prompt,
is half written, or was overwritten gives other tokens than `cold_tokens`, which uses no pages at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvsteward_engine.sequence import Sampled, Step, Work
from kvsteward_engine.sequence import Sequence as Running

VOCABULARY = 251
_MASK = (1 << 61) - 1


def _mix(state: int, token: int) -> int:
    return ((state ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _MASK


def _token(total: int) -> int:
    return int((total ^ (total >> 23)) % VOCABULARY)


@lru_cache(maxsize=4096)
def cold_tokens(revision: str, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """What the model of this revision answers when nothing was ever computed before."""
    state = total = _start(revision)
    for token in prompt:
        state = _mix(state, token)
        total = (total * 31 + state) & _MASK
    answer = []
    for _ in range(count):
        token = _token(total)
        answer.append(token)
        state = _mix(state, token)
        total = (total * 31 + state) & _MASK
    return tuple(answer)


def _start(revision: str) -> int:
    return int(sum(byte * 257**place for place, byte in enumerate(revision.encode()))) & _MASK


@dataclass(frozen=True, slots=True)
class Slot:
    """One position's state in a page, and who wrote it. `position` and `token` say what it is the state of."""

    state: int
    writer: str  # request id


@dataclass(frozen=True, slots=True)
class Use:
    """A sequence reads pages that it didn't compute since it was admitted."""

    request: str
    tokens: int
    writers: tuple[str, ...]  # of the slots read, each once, in order; "" = a slot that nobody wrote
    admitted: bool  # at its admission to this step; else a page of its own was exchanged after its last step


class PagedModel:
    """A `Runner` over pages of `Slot`s. Reads what was there before the step: nothing of another sequence computed in
    the same step can be relied on. `used` hears of each use of pages that were computed by someone else or before."""

    vocab_size = VOCABULARY
    bytes_per_token = 8
    max_positions = 1 << 20

    def __init__(self, revision: str, pages: int, block_tokens: int, used: Callable[[Running, Use], None]) -> None:
        self._start = _start(revision)
        self._size = block_tokens
        self._slots: list[list[Slot | None]] = [[None] * block_tokens for _ in range(pages)]
        self._used = used
        self._next: dict[str, int] = {}  # request -> the position after the last one computed
        self._tables: dict[str, list[int]] = {}  # request -> its pages when it last ran

    def run(self, step: Step) -> list[Sampled]:
        """Computes all works, then stores what they computed."""
        writes: list[tuple[int, int, Slot]] = []
        sampled = []
        for work in step.works:
            states = self._compute(work, writes)
            if work.sample:
                total = self._start
                for state in states:
                    total = (total * 31 + state) & _MASK
                sampled.append(Sampled(_token(total)))
        for page, place, slot in writes:
            self._slots[page][place] = slot
        return sampled

    def _compute(self, work: Work, writes: list[tuple[int, int, Slot]]) -> list[int]:
        sequence, size = work.sequence, self._size
        read = [self._slots[sequence.pages[p // size]][p % size] for p in range(work.start)]
        self._notice(work, read)
        states = [slot.state if slot is not None else 0 for slot in read]
        state = states[-1] if states else self._start
        for position in range(work.start, work.start + work.count):
            state = _mix(state, sequence.tokens[position])
            states.append(state)
            writes.append((sequence.pages[position // size], position % size, Slot(state, sequence.id)))
        self._next[sequence.id] = work.start + work.count
        self._tables[sequence.id] = list(sequence.pages)
        return states

    def _notice(self, work: Work, read: Sequence[Slot | None]) -> None:
        """Says it when the sequence was admitted with pages, or got another's page in place of its own."""
        sequence = work.sequence
        pages = -(-work.start // self._size)
        fresh = work.start != self._next.get(sequence.id, 0)
        if work.start and (fresh or self._tables[sequence.id][:pages] != sequence.pages[:pages]):
            writers = dict.fromkeys("" if slot is None else slot.writer for slot in read)
            self._used(sequence, Use(sequence.id, work.start, tuple(writers), fresh))

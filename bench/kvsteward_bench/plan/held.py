"""What a model holds for one sequence, and what that costs in bytes.

A sequence's cache has a part that grows with every token and a fixed part: layers with a window, once it is full, and
recurrent states. Where every layer has a window nothing grows for ever; then `bytes_per_token` is what a token inside
the window takes, and the total stops growing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from kvsteward_bench.plan.shape import Keep, State
from kvsteward_bench.plan.sizes import VALUE_BYTES


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one sequence; `read`: bytes of the cache that the attention of one new token reads."""

    bytes_per_token: int
    fixed: int
    total: int
    read: int


@dataclass(frozen=True, slots=True)
class Held:
    """What a model keeps, by one set of techniques. `pages`: those that sparse reads choose, of `block` tokens each."""

    keeps: tuple[Keep, ...]
    states: tuple[State, ...]
    value_bytes: Fraction
    state_dtype: str  # of states that name none
    budget: int = 100
    pages: int = 0
    block: int = 1

    @property
    def growing(self) -> tuple[Keep, ...]:
        return tuple(keep for keep in self.keeps if not keep.window)

    @property
    def windows(self) -> tuple[Keep, ...]:
        return tuple(keep for keep in self.keeps if keep.window)

    @property
    def capped(self) -> bool:
        return bool(self.windows) and not self.growing

    @property
    def state_bytes(self) -> int:
        return sum(int(one.values * VALUE_BYTES[one.dtype or self.state_dtype]) for one in self.states)

    def per_token(self) -> Fraction:
        if self.capped:
            return self._bytes(keep.values for keep in self.windows)
        return self._bytes(Fraction(keep.values, keep.ratio) for keep in self.growing) * self.budget / 100

    def grown(self, tokens: int, block: int = 1) -> int:
        """Bytes of the growing part, in whole pages of `block` tokens."""
        kept = up(-(-tokens * self.budget // 100), block)
        return math.ceil(self._bytes(keep.values * (kept // keep.ratio) for keep in self.growing))

    def windowed(self, tokens: int, block: int = 1) -> int:
        """Bytes of the windows. A page goes when no token in it is within the window any more."""
        return math.ceil(
            self._bytes(
                keep.values * min(up(tokens, block), up(keep.window - 1, block) + block) for keep in self.windows
            )
        )

    def fixed(self, tokens: int, block: int = 1) -> int:
        return self.state_bytes + (0 if self.capped else self.windowed(tokens, block))

    def total(self, tokens: int, block: int = 1) -> int:
        return self.grown(tokens, block) + self.windowed(tokens, block) + self.state_bytes

    def read(self, tokens: int) -> int:
        """Bytes; sparse reads look at two summary vectors of each page, the smallest and the largest keys."""
        kept = -(-tokens * self.budget // 100)
        values = Fraction(0)
        for keep in self.growing:
            entries = kept // keep.ratio
            if self.pages and keep.ratio == 1 and not keep.top:
                pages = -(-entries // self.block)
                if self.pages < pages:
                    values += keep.values * (self.pages * self.block + pages)
                    continue
            values += keep.values * min(entries, keep.top or entries)
        return math.ceil(values * self.value_bytes) + self.windowed(tokens) + self.state_bytes

    def cost(self, tokens: int) -> Cost:
        return Cost(math.ceil(self.per_token()), self.fixed(tokens), self.total(tokens), self.read(tokens))

    def _bytes(self, values: Iterable[int | Fraction]) -> Fraction:
        return sum(values, Fraction(0)) * self.value_bytes


def up(tokens: int, block: int) -> int:
    return -(-tokens // block) * block

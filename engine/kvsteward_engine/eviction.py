"""Which retained page goes next: the seam for value policies, and LRU behind it.

The block manager decides what comes before value (expired pages, scopes over their quota) and asks the policy for the
rest. A policy knows records and times; it never touches pages, references or the index.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from kvsteward_engine.page import PageRecord, ScopeAccount


class EvictionPolicy(Protocol):
    """Orders the retained pages. All calls are O(1) or O(log n) in the number of retained pages."""

    def retain(self, record: PageRecord) -> None:
        """`record` lost its last reference at `record.last_use`. Of one release, the deepest page comes first."""

    def reclaim(self, record: PageRecord) -> None:
        """`record` is in use again, or has been evicted: no longer a candidate."""

    def victim(self, now: float, account: ScopeAccount | None = None) -> PageRecord | None:
        """The retained page worth least, of one scope or of all; never one with a published child. None: there is
        none."""


class LRU:
    """The page let go longest ago goes first. A release lets the deepest page go first, and whoever uses a page uses
    its parents too, so children always stand before their parents."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, PageRecord] = OrderedDict()

    def retain(self, record: PageRecord) -> None:
        """See `EvictionPolicy`."""
        self._order[record.page] = record

    def reclaim(self, record: PageRecord) -> None:
        """See `EvictionPolicy`."""
        del self._order[record.page]

    def victim(self, now: float, account: ScopeAccount | None = None) -> PageRecord | None:
        """See `EvictionPolicy`."""
        if account is not None:
            return account.head()
        return next(iter(self._order.values()), None)

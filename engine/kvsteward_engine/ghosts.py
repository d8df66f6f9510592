"""A bounded memory of evicted pages: tells "evicted" from "never seen", and what an eviction cost."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from kvsteward_engine.page import PageRecord


class GhostList:
    """The newest `limit` evicted pages by key. Holds records, never content."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._records: OrderedDict[bytes, PageRecord] = OrderedDict()
        self.get = self._records.get  # bound once: asked for every page that misses

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: PageRecord) -> None:
        """Remember a page just evicted; the oldest memory goes when there are too many."""
        records = self._records
        records[record.key] = record
        records.move_to_end(record.key)
        if len(records) > self._limit:
            records.popitem(last=False)

    def forget(self, key: bytes) -> None:
        """The page is resident again."""
        self._records.pop(key, None)

    def newest_first(self, offset: int, limit: int) -> Iterator[PageRecord]:
        """A slice for the ledger; costs O(offset + limit)."""
        return islice(reversed(self._records.values()), offset, offset + limit)

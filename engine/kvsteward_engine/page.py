"""What is known of a page beside its content, and of the scope that owns it. Plain data; the block manager moves it."""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum


class Eviction(str, Enum):
    """Why a page left the cache."""

    EXPIRED = "Expired"  # unused for longer than its scope's max age
    OVER_QUOTA = "OverQuota"  # its scope retains more than its share
    CAPACITY = "Capacity"  # running work needed the room


class PageRecord:
    """A published page. Kept after eviction by the ghost list, then with `reason` set and no page."""

    __slots__ = (
        "account",
        "children",
        "content",
        "created",
        "depth",
        "evicted",
        "key",
        "last_use",
        "page",
        "parent",
        "reason",
        "retention",
        "scope",
        "uses",
        "version",
    )

    def __init__(
        self,
        page: int,
        key: bytes,
        content: bytes,
        account: ScopeAccount,
        retention: str,
        version: str,
        parent: PageRecord | None,
        now: float,
    ) -> None:
        self.page = page
        self.key = key
        self.content = content
        self.account = account
        self.scope = account.scope  # compared at every match, apart from the salt inside the key
        self.retention = retention
        self.version = version
        self.parent = parent
        self.children = 0  # published pages that chain on this one
        self.depth: int = parent.depth + 1 if parent else 1  # pages of prefill that a hit up to here saves
        self.created = now
        self.last_use = now  # start or end of the latest use
        self.uses = 0  # hits
        self.evicted = 0.0
        self.reason: Eviction | None = None


class ScopeAccount:
    """One scope's pages and limits. Lives as long as the scope has a published page."""

    __slots__ = ("due", "limit", "max_age", "resident", "retained", "retention", "scope")

    def __init__(self, scope: str, retention: str) -> None:
        self.scope = scope
        self.retention = retention  # class named by the scope's latest request
        self.limit = 0  # retained pages it may have
        self.max_age = 0.0  # seconds since last use, 0 = no limit
        self.resident = 0  # published pages, held or retained
        # Unreferenced pages in the order they were let go: an end of use is later for a parent than for its children,
        # so the head is always the oldest and never has a resident child.
        self.retained: OrderedDict[int, PageRecord] = OrderedDict()
        self.due: float | None = None  # when expired pages are looked for here next

    def head(self) -> PageRecord | None:
        """The page let go longest ago."""
        return next(iter(self.retained.values()), None)

    def expired(self, now: float) -> PageRecord | None:
        """The page let go longest ago, if that is longer ago than max age."""
        head = self.head() if self.max_age else None
        return head if head is not None and now - head.last_use >= self.max_age else None

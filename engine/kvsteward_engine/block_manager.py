"""The page pool of one engine: who holds which page, which pages can be matched, and which go when room is needed.

Knows page numbers, keys and scopes; never content, so the same class serves as the content-free shadow index. No torch,
no clock: `now` (seconds, any origin, never going back) is an argument. Costs are O(pages touched): nothing here looks
at a page that a call neither takes, gives back nor evicts.

Invariants (`audit.py` checks them all):
- a page is free, private (held, unpublished), published and held, or published and retained (held by nobody);
- whoever holds a published page holds its whole chain of parents, so a retained page has no held descendants and every
  retained page can be evicted, children before parents;
- a key is published once; a holding publishes its pages in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from kvsteward_contract.directive import MissReason, Retention

from kvsteward_engine.accounts import ScopeAccounts
from kvsteward_engine.errors import BrokenInvariant
from kvsteward_engine.eviction import EvictionPolicy
from kvsteward_engine.ghosts import GhostList
from kvsteward_engine.keychain import KeyChain
from kvsteward_engine.page import Eviction, PageRecord, ScopeAccount


@dataclass(frozen=True, slots=True)
class Match:
    """What a lookup found for one prompt. Valid until the pool next changes."""

    records: tuple[PageRecord, ...] = ()  # the leading resident pages
    eligible: int = 0  # leading pages seen within max age: resident, or evicted since
    misses: Mapping[MissReason, int] = field(default_factory=lambda: MappingProxyType({}))
    regret: int = 0  # eligible pages evicted within the regret window
    violation: bool = False  # a key matched in another scope; then there are no records


NO_MATCH = Match()


class Published(Enum):
    """What became of a page offered for publishing."""

    STORED = "stored"  # matchable from now on
    SHARED = "shared"  # the same page was there already: the holding uses that one now, its own is free again
    VIOLATION = "violation"  # the key is taken in another scope; the page stays private


class Holding:
    """The pages one sequence holds, first position first; `pages` may be a list that others read."""

    __slots__ = ("pages", "published")

    def __init__(self, pages: list[int]) -> None:
        self.pages = pages
        self.published = 0  # leading pages that are published


class BlockManager:
    """See the module. Illegal calls raise `BrokenInvariant`."""

    def __init__(
        self, pages: int, block_tokens: int, policy: EvictionPolicy, ghosts: int, regret_window: float
    ) -> None:
        self.total = pages
        self.block_tokens = block_tokens
        self.evictions: Counter[Eviction] = Counter()
        self.regret_tokens = 0
        self.resident_by_kind: Counter[str] = Counter()  # scope kind ("Private") -> published pages
        self.ghosts = GhostList(ghosts)
        self.accounts = ScopeAccounts(pages)
        self._policy = policy
        self._regret_window = regret_window
        self._free = list(range(pages - 1, -1, -1))
        self._refs = [0] * pages
        self._records: list[PageRecord | None] = [None] * pages
        self._index: dict[bytes, PageRecord] = {}
        self._contents: dict[bytes, PageRecord] = {}  # the latest page published with this content, in any scope
        self._retained = 0

    @property
    def available(self) -> int:
        """Pages that running work can still get."""
        return len(self._free) + self._retained

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def retained(self) -> int:
        """Published pages that nobody holds."""
        return self._retained

    def record(self, page: int) -> PageRecord | None:
        """The record of a published page."""
        return self._records[page]

    def references(self, page: int) -> int:
        """Sequences that hold the page."""
        return self._refs[page]

    def set_retention(self, table: Mapping[str, Retention]) -> None:
        """Put new limits in force; O(scopes). What they make excessive goes in the next sweeps or when room is
        needed. An empty table keeps the last one."""
        self.accounts.set_table(table)

    # ---- matching

    def lookup(self, chain: KeyChain, scope: str, retention: str, pages: int, now: float) -> Match:
        """What the first `pages` pages of the chain would find; drops what has expired in this scope, changes nothing
        else."""
        account = self.accounts.get(scope, retention)
        if account is not None:
            self._expire(account, now)
        max_age = self.accounts.max_age(retention)
        index, keys = self._index, chain.keys
        records: list[PageRecord] = []
        for key in keys[:pages]:
            record = index.get(key)
            if record is None:
                break
            if record.scope != scope:
                return Match(violation=True)
            records.append(record)
        resident = len(records)
        if resident == pages:
            return Match(tuple(records), resident)
        misses: Counter[MissReason] = Counter()
        eligible, regret, leading = resident, 0, True
        gap = MissReason.UNSEEN_BLOCK
        for place in range(resident, pages):
            reason = self._miss(keys[place], chain.contents[place], scope, max_age, now)
            if reason is None:  # resident behind a gap: lost for the gap's reason
                reason = gap
            gap = reason
            misses[reason] += 1
            leading = leading and reason is MissReason.EVICTED
            if leading:
                eligible += 1
                ghost = self.ghosts.get(keys[place])
                regret += ghost is not None and now - ghost.evicted <= self._regret_window
        return Match(tuple(records), eligible, MappingProxyType(misses), regret)

    def _miss(self, key: bytes, content: bytes, scope: str, max_age: float, now: float) -> MissReason | None:
        """Why a page can't be used; None if it is resident."""
        ghost = self.ghosts.get(key)
        if ghost is not None and ghost.scope == scope:
            expired = ghost.reason is Eviction.EXPIRED or (max_age and now - ghost.last_use >= max_age)
            return MissReason.EXPIRED_PAGE if expired else MissReason.EVICTED
        if key in self._index:
            return None
        other = self._contents.get(content)
        if other is None:
            return MissReason.UNSEEN_BLOCK
        return MissReason.VERSION_MISMATCH if other.scope == scope else MissReason.SCOPE_MISMATCH

    # ---- holding pages

    def can_hold(self, match: Match, pages: int, spare: int = 0) -> bool:
        """Whether a sequence can get `pages` pages, the matched ones included, and `spare` stay available."""
        refs = self._refs
        revived = sum(1 for record in match.records if not refs[record.page])
        return pages - len(match.records) + spare <= self.available - revived

    def acquire(self, holding: Holding, match: Match, pages: int, now: float) -> None:
        """Give a sequence its matched pages and fresh ones up to `pages`. Ask `can_hold` first."""
        if holding.pages or not self.can_hold(match, pages):
            raise BrokenInvariant("a sequence was given pages it has no room for, or twice")
        for record in match.records:
            if self._index.get(record.key) is not record:
                raise BrokenInvariant("a match was used after the pool had changed")
            self._hold(record, now)
            record.uses += 1
            holding.pages.append(record.page)
        holding.published = len(match.records)
        self.regret_tokens += match.regret * self.block_tokens
        self._take(holding, pages, now)

    def grow(self, holding: Holding, pages: int, now: float) -> bool:
        """Let a holding have `pages` pages; False, and nothing changed, if the pool can't."""
        if pages - len(holding.pages) > self.available:
            return False
        self._take(holding, pages, now)
        return True

    def release(self, holding: Holding, now: float) -> None:
        """Take all pages back: published ones stay matchable, within their scope's quota; the others are free."""
        account: ScopeAccount | None = None
        refs, records = self._refs, self._records
        for page in reversed(holding.pages):  # the deepest first: children stand before their parents
            if refs[page] <= 0:
                raise BrokenInvariant(f"page {page} was given back by someone who did not hold it")
            refs[page] -= 1
            if refs[page]:
                continue
            record = records[page]
            if record is None:
                self._free.append(page)
            else:
                record.last_use = now
                account = record.account
                account.retained[page] = record
                self._policy.retain(record)
                self._retained += 1
        holding.pages.clear()
        holding.published = 0
        if account is not None:
            self.accounts.watch(account)
            while len(account.retained) > account.limit:
                self._evict_over_quota(account, now)

    def _hold(self, record: PageRecord, now: float) -> None:
        page = record.page
        if not self._refs[page]:
            del record.account.retained[page]
            self._policy.reclaim(record)
            self._retained -= 1
        self._refs[page] += 1
        record.last_use = now

    def _take(self, holding: Holding, pages: int, now: float) -> None:
        """Fresh pages from the free list, after making room for them."""
        count = pages - len(holding.pages)
        if count <= 0:
            return
        free = self._free
        while len(free) < count:
            self._make_room(now)
        taken = free[-count:]
        del free[-count:]
        for page in taken:
            self._refs[page] = 1
        holding.pages += taken

    # ---- publishing

    def publish(
        self, holding: Holding, key: bytes, content: bytes, scope: str, retention: str, version: str, now: float
    ) -> Published:
        """Make the holding's next unpublished page matchable under `key`. Only for a page whose content is complete:
        the caller vouches for it."""
        place = holding.published
        page = holding.pages[place]
        if self._records[page] is not None or self._refs[page] != 1:
            raise BrokenInvariant(f"page {page} was offered for publishing but is not its holder's own")
        found = self._index.get(key)
        if found is not None and found.scope != scope:
            return Published.VIOLATION
        if found is not None and not self._refs[found.page]:
            self._expire(found.account, now)
            found = self._index.get(key)
        parent = self._records[holding.pages[place - 1]] if place else None
        if place and parent is None:
            raise BrokenInvariant("a page was published before its parent")
        if found is not None:
            if found.parent is not parent:
                raise BrokenInvariant("a page was shared with a sequence that does not hold its parent")
            self._hold(found, now)
            holding.pages[place] = found.page
            holding.published = place + 1
            self._refs[page] = 0
            self._free.append(page)
            return Published.SHARED
        account = self.accounts.open(scope, retention)
        record = PageRecord(page, key, content, account, retention, version, parent, now)
        if parent is not None:
            parent.children += 1
        self._records[page] = self._index[key] = self._contents[content] = record
        account.resident += 1
        self.resident_by_kind[scope.partition("/")[0]] += 1
        self.ghosts.forget(key)
        holding.published = place + 1
        return Published.STORED

    # ---- eviction

    def sweep(self, now: float, pages: int) -> None:
        """Evict up to about `pages` pages that are expired or over quota, wanted room or not."""
        stop = self._retained - pages
        while self._retained > max(stop, 0) and self._evict_excess(now):
            pass

    def _make_room(self, now: float) -> None:
        if self._evict_excess(now):
            return
        victim = self._policy.victim(now)
        if victim is None:
            raise BrokenInvariant("no page can be evicted although the pool counts retained ones")
        self._evict(victim, Eviction.CAPACITY, now)

    def _evict_excess(self, now: float) -> bool:
        """Evict one expired page, else one over quota; False if there is neither."""
        expired = self.accounts.expired(now)
        if expired is not None:
            self._evict(expired, Eviction.EXPIRED, now)
            return True
        account = self.accounts.over_quota()
        if account is not None:
            self._evict_over_quota(account, now)
            return True
        return False

    def _expire(self, account: ScopeAccount, now: float) -> None:
        """Drop what has expired in one scope."""
        while (head := account.expired(now)) is not None:
            self._evict(head, Eviction.EXPIRED, now)

    def _evict_over_quota(self, account: ScopeAccount, now: float) -> None:
        victim = self._policy.victim(now, account)
        if victim is None:
            raise BrokenInvariant(f"scope {account.scope} is over quota with nothing to evict")
        self._evict(victim, Eviction.OVER_QUOTA, now)

    def _evict(self, record: PageRecord, reason: Eviction, now: float) -> None:
        page = record.page
        if self._refs[page] or record.children or self._records[page] is not record:
            raise BrokenInvariant(f"page {page} was chosen for eviction while in use or before its children")
        account = record.account
        del account.retained[page]
        self._policy.reclaim(record)
        self._retained -= 1
        del self._index[record.key]
        if self._contents.get(record.content) is record:
            del self._contents[record.content]
        if record.parent is not None:
            record.parent.children -= 1
            record.parent = None
        account.resident -= 1
        if not account.resident:
            self.accounts.close(account)
        self.resident_by_kind[account.scope.partition("/")[0]] -= 1
        self._records[page] = None
        self._free.append(page)
        record.page = -1
        record.reason = reason
        record.evicted = now
        self.evictions[reason] += 1
        self.ghosts.add(record)

"""What each scope may keep, and which scopes keep too much or too long. No pages, no keys; the block manager evicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import heappop, heappush

from kvsteward_contract.directive import Retention

from kvsteward_engine.page import PageRecord, ScopeAccount


class ScopeAccounts:
    """Accounts of the scopes that have published pages, under the table of retention classes in force. Finding what
    has expired or is over quota costs O(log scopes) a page found, and nothing where there is none."""

    def __init__(self, pages: int) -> None:
        self._pages = pages
        self._table: Mapping[str, Retention] = {}
        self._accounts: dict[str, ScopeAccount] = {}
        self._due: list[tuple[float, str]] = []  # heap: when to look for expired pages in which scope
        self._over: dict[str, ScopeAccount] = {}  # scopes that a new table left over quota

    def __iter__(self) -> Iterator[ScopeAccount]:
        return iter(self._accounts.values())

    def set_table(self, table: Mapping[str, Retention]) -> None:
        """Put new limits in force; O(scopes). An empty table keeps the last one: nobody is evicted because a table
        could not be read."""
        if not table:
            return
        self._table = table
        self._over.clear()
        self._due.clear()
        for account in self._accounts.values():
            self._limit(account)
            account.due = None
            self.watch(account)

    def max_age(self, retention: str) -> float:
        """Seconds since last use that a page of the class may be reused for; 0 = no limit."""
        limits = self._table.get(retention)
        return float(limits.max_age_seconds) if limits is not None else 0.0

    def get(self, scope: str, retention: str) -> ScopeAccount | None:
        """The scope's account, from now on under the class that this, its latest request, names."""
        account = self._accounts.get(scope)
        if account is not None and account.retention != retention:
            account.retention = retention
            self._limit(account)
            account.due = None
            self.watch(account)
        return account

    def open(self, scope: str, retention: str) -> ScopeAccount:
        """The scope's account, a new one if it has none."""
        account = self.get(scope, retention)
        if account is None:
            account = self._accounts[scope] = ScopeAccount(scope, retention)
            self._limit(account)
        return account

    def close(self, account: ScopeAccount) -> None:
        """The scope's last published page is gone."""
        del self._accounts[account.scope]
        self._over.pop(account.scope, None)

    def watch(self, account: ScopeAccount) -> None:
        """Pages were retained: see to it that their expiry is noticed. One heap entry a scope, which may come early
        but never late."""
        head = account.head() if account.max_age and account.due is None else None
        if head is not None:
            account.due = head.last_use + account.max_age
            heappush(self._due, (account.due, account.scope))

    def expired(self, now: float) -> PageRecord | None:
        """A retained page that has outlived its scope's max age."""
        while self._due and self._due[0][0] <= now:
            due, scope = self._due[0]
            account = self._accounts.get(scope)
            if account is not None and account.due == due:
                head = account.expired(now)
                if head is not None:
                    return head
                account.due = None
            heappop(self._due)
            if account is not None:
                self.watch(account)
        return None

    def over_quota(self) -> ScopeAccount | None:
        """A scope that retains more than it may."""
        while self._over:
            account = next(iter(self._over.values()))
            if len(account.retained) > account.limit:
                return account
            del self._over[account.scope]
        return None

    def _limit(self, account: ScopeAccount) -> None:
        limits = self._table.get(account.retention)
        if limits is None:
            return
        account.limit = self._pages * limits.quota_percent // 100
        account.max_age = float(limits.max_age_seconds)
        if len(account.retained) > account.limit:
            self._over[account.scope] = account

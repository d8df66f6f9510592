"""The page pool: what can be matched, what goes when room is needed, and that nothing is ever counted wrongly."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvsteward_contract.directive import MissReason, Retention
from kvsteward_engine.audit import faults
from kvsteward_engine.block_manager import NO_MATCH, BlockManager, Holding, Match, Published
from kvsteward_engine.errors import BrokenInvariant
from kvsteward_engine.eviction import LRU
from kvsteward_engine.keychain import KeyChain
from kvsteward_engine.page import Eviction

SIZE = 2
CONTENT = b"c" * 32


def manager(pages: int = 16, ghosts: int = 64, **table: Retention) -> BlockManager:
    """A pool with a class `plain` without limits, or the classes given."""
    made = BlockManager(pages, SIZE, LRU(), ghosts, 300.0)
    made.set_retention(table or {"plain": Retention()})
    return made


def chain_of(tokens: list[int], scope: str = "Private/a", revision: bytes = b"") -> KeyChain:
    """Keys of all full pages, under a root of the scope's own."""
    chain = KeyChain((scope.encode() + revision).ljust(32, b"."), CONTENT, SIZE)
    chain.extend(tokens, len(tokens) // SIZE)
    return chain


def find(pool: BlockManager, chain: KeyChain, now: float, scope: str = "Private/a", retention: str = "plain") -> Match:
    """Look the whole chain up."""
    return pool.lookup(chain, scope, retention, len(chain.keys), now)


def hold(
    pool: BlockManager, chain: KeyChain, now: float, scope: str = "Private/a", retention: str = "plain"
) -> tuple[Holding, list[Published]]:
    """Match, take and publish every page of a chain."""
    holding = Holding([])
    match = find(pool, chain, now, scope, retention)
    pool.acquire(holding, match, len(chain.keys), now)
    results = []
    for place in range(holding.published, len(chain.keys)):
        results.append(pool.publish(holding, chain.keys[place], chain.contents[place], scope, retention, "v1", now))
        if results[-1] is Published.VIOLATION:
            break
    return holding, results


def use(pool: BlockManager, chain: KeyChain, now: float, scope: str = "Private/a", retention: str = "plain") -> None:
    """Hold every page of a chain, publish it, and let it go."""
    holding, _ = hold(pool, chain, now, scope, retention)
    pool.release(holding, now)


def test_a_released_chain_is_found_again_up_to_the_first_other_token() -> None:
    pool = manager()
    use(pool, chain_of([1, 2, 3, 4, 5, 6]), 0.0)
    assert len(find(pool, chain_of([1, 2, 3, 4, 5, 6]), 1.0).records) == 3
    assert len(find(pool, chain_of([1, 2, 3, 4, 5, 7]), 1.0).records) == 2
    assert find(pool, chain_of([9, 2, 3, 4, 5, 6]), 1.0).records == ()


def test_a_page_that_was_not_published_is_never_found() -> None:
    pool = manager()
    holding = Holding([])
    pool.acquire(holding, NO_MATCH, 3, 0.0)
    assert find(pool, chain_of([1, 2, 3, 4]), 0.0).records == ()
    pool.release(holding, 0.0)
    assert find(pool, chain_of([1, 2, 3, 4]), 0.0).records == ()
    assert pool.free == pool.total


def test_pages_in_use_are_not_evicted_for_others() -> None:
    pool = manager(4)
    holding, _ = hold(pool, chain_of([1, 2, 3, 4]), 0.0)
    other = Holding([])
    pool.acquire(other, NO_MATCH, 2, 1.0)
    assert not pool.grow(other, 3, 1.0)
    assert len(find(pool, chain_of([1, 2, 3, 4]), 1.0).records) == 2
    assert faults(pool, [holding, other]) == []


def test_the_least_recently_used_chain_goes_first_and_its_children_before_their_parents() -> None:
    pool = manager(6)
    old, new = chain_of([1, 2, 3, 4, 5, 6]), chain_of([7, 8, 9, 10, 11, 12])
    use(pool, old, 0.0)
    use(pool, new, 1.0)
    pool.acquire(Holding([]), NO_MATCH, 2, 2.0)
    assert len(find(pool, old, 2.0).records) == 1
    assert len(find(pool, new, 2.0).records) == 3


def test_a_shared_prefix_outlives_the_tails_that_were_used_with_it() -> None:
    pool = manager(5)
    first, second = chain_of([1, 2, 3, 4, 5, 6]), chain_of([1, 2, 3, 4, 7, 8])
    use(pool, first, 0.0)
    use(pool, second, 1.0)
    pool.acquire(Holding([]), NO_MATCH, 3, 2.0)
    assert len(find(pool, first, 2.0).records) == 2


def test_a_matched_page_with_another_scope_beside_its_key_is_a_violation_and_gives_nothing() -> None:
    pool = manager()
    chain = chain_of([1, 2, 3, 4])
    use(pool, chain, 0.0, "Private/a")
    match = find(pool, chain, 1.0, "Private/b")
    assert match.violation and match.records == ()
    holding, results = hold(pool, chain, 1.0, "Private/b")
    assert results == [Published.VIOLATION]
    assert faults(pool, [holding]) == []


def test_the_second_of_two_equal_prompts_takes_over_the_pages_of_the_first() -> None:
    pool = manager(8)
    chain = chain_of([1, 2, 3, 4])
    first, second = Holding([]), Holding([])
    for holding in (first, second):
        pool.acquire(holding, find(pool, chain, 0.0), 2, 0.0)
    for holding, wanted in ((first, Published.STORED), (second, Published.SHARED)):
        for place in range(2):
            result = pool.publish(holding, chain.keys[place], chain.contents[place], "Private/a", "plain", "v1", 0.0)
            assert result is wanted
    assert first.pages == second.pages
    assert pool.free == 6
    pool.release(first, 1.0)
    assert len(find(pool, chain, 1.0).records) == 2
    pool.release(second, 1.0)
    assert faults(pool, []) == []


def test_an_expired_page_is_not_taken_over_when_the_same_content_is_published_again() -> None:
    pool = manager(8, plain=Retention(max_age_seconds=10))
    chain = chain_of([1, 2])
    holding = Holding([])
    pool.acquire(holding, NO_MATCH, 1, 0.0)
    use(pool, chain, 0.0)
    result = pool.publish(holding, chain.keys[0], chain.contents[0], "Private/a", "plain", "v1", 11.0)
    assert result is Published.STORED
    assert pool.evictions == {Eviction.EXPIRED: 1}


def test_a_quota_is_a_ceiling_on_retained_pages_and_does_not_touch_held_ones() -> None:
    pool = manager(20, plain=Retention(quota_percent=10))
    chain = chain_of(list(range(16)))
    holding, _ = hold(pool, chain, 0.0)
    assert len(holding.pages) == 8
    assert len(find(pool, chain, 0.0).records) == 8
    pool.release(holding, 1.0)
    assert pool.retained == 2
    assert len(find(pool, chain, 1.0).records) == 2
    assert pool.evictions == {Eviction.OVER_QUOTA: 6}


def test_one_scopes_quota_leaves_the_pages_of_others_alone() -> None:
    pool = manager(20, plain=Retention(), small=Retention(quota_percent=5))
    kept = chain_of([1, 2, 3, 4])
    use(pool, kept, 0.0)
    for seed in range(5):
        use(pool, chain_of([seed, 50], "Private/b"), 1.0 + seed, "Private/b", "small")
    assert len(find(pool, kept, 9.0).records) == 2
    assert pool.resident_by_kind == {"Private": 3}


def test_a_lowered_quota_is_met_by_sweeps() -> None:
    pool = manager(20)
    use(pool, chain_of(list(range(16))), 0.0)
    pool.set_retention({"plain": Retention(quota_percent=10)})
    assert pool.retained == 8
    pool.sweep(1.0, 3)
    assert pool.retained == 5
    pool.sweep(1.0, 100)
    assert pool.retained == 2


def test_an_empty_table_keeps_the_last_one() -> None:
    pool = manager(20, plain=Retention(quota_percent=50))
    use(pool, chain_of(list(range(16))), 0.0)
    pool.set_retention({})
    pool.sweep(1.0, 100)
    assert pool.retained == 8


def test_pages_unused_for_longer_than_max_age_are_not_matched_and_go_first() -> None:
    pool = manager(8, plain=Retention(max_age_seconds=10), short=Retention(max_age_seconds=3))
    use(pool, chain_of([1, 2, 3, 4]), 0.0)
    use(pool, chain_of([1, 2, 3, 4], "Private/b"), 1.0, "Private/b", "short")
    pool.acquire(Holding([]), NO_MATCH, 5, 5.0)
    assert pool.evictions == {Eviction.EXPIRED: 1}
    assert len(find(pool, chain_of([1, 2, 3, 4]), 5.0).records) == 2
    assert find(pool, chain_of([1, 2, 3, 4]), 10.0).misses == {MissReason.EXPIRED_PAGE: 2}


def test_use_renews_a_pages_age_and_holding_it_keeps_it_young() -> None:
    pool = manager(8, plain=Retention(max_age_seconds=10))
    chain = chain_of([1, 2])
    use(pool, chain, 0.0)
    use(pool, chain, 9.0)
    holding, _ = hold(pool, chain, 18.0)
    pool.sweep(100.0, 100)
    assert len(find(pool, chain, 100.0).records) == 1
    pool.release(holding, 100.0)
    pool.sweep(110.0, 100)
    assert find(pool, chain, 110.0).misses == {MissReason.EXPIRED_PAGE: 1}


def test_a_class_with_another_max_age_counts_from_the_scopes_next_request_on() -> None:
    pool = manager(8, plain=Retention(), short=Retention(max_age_seconds=5))
    chain = chain_of([1, 2])
    use(pool, chain, 0.0)
    assert len(find(pool, chain, 100.0).records) == 1
    assert find(pool, chain, 100.0, retention="short").misses == {MissReason.EXPIRED_PAGE: 1}


def test_each_missed_page_has_its_reason() -> None:
    pool = manager(4, plain=Retention(max_age_seconds=100))
    use(pool, chain_of([1, 2, 3, 4]), 0.0)
    assert find(pool, chain_of([1, 2, 9, 9]), 1.0).misses == {MissReason.UNSEEN_BLOCK: 1}
    assert find(pool, chain_of([1, 2, 3, 4], "Private/b"), 1.0, "Private/b").misses == {MissReason.SCOPE_MISMATCH: 2}
    other = chain_of([1, 2, 3, 4], revision=b"2")
    assert find(pool, other, 1.0).misses == {MissReason.VERSION_MISMATCH: 2}
    holding = Holding([])
    pool.acquire(holding, NO_MATCH, 3, 2.0)
    match = find(pool, chain_of([1, 2, 3, 4, 5, 6]), 3.0)
    assert (len(match.records), match.eligible) == (1, 2)
    assert match.misses == {MissReason.EVICTED: 1, MissReason.UNSEEN_BLOCK: 1}
    assert find(pool, chain_of([1, 2, 3, 4]), 101.0).misses == {MissReason.EXPIRED_PAGE: 2}


def test_a_page_wanted_again_soon_after_its_eviction_is_regretted() -> None:
    pool = manager(2)
    use(pool, chain_of([1, 2, 3, 4]), 0.0)
    use(pool, chain_of([5, 6, 7, 8]), 1.0)
    use(pool, chain_of([1, 2, 3, 4]), 2.0)
    assert pool.regret_tokens == 2 * SIZE
    use(pool, chain_of([5, 6, 7, 8]), 1000.0)
    assert pool.regret_tokens == 2 * SIZE


def test_the_ghost_list_forgets_the_oldest() -> None:
    pool = manager(1, ghosts=2)
    for seed in range(5):
        use(pool, chain_of([seed, seed]), float(seed))
    assert len(pool.ghosts) == 2
    assert find(pool, chain_of([3, 3]), 9.0).misses == {MissReason.EVICTED: 1}
    assert find(pool, chain_of([0, 0]), 9.0).misses == {MissReason.UNSEEN_BLOCK: 1}


def test_giving_a_page_back_twice_is_refused() -> None:
    pool = manager()
    holding = Holding([])
    pool.acquire(holding, NO_MATCH, 1, 0.0)
    twin = Holding(list(holding.pages))
    pool.release(holding, 0.0)
    with pytest.raises(BrokenInvariant):
        pool.release(twin, 0.0)


def test_a_match_is_refused_once_its_pages_are_gone() -> None:
    pool = manager(2)
    use(pool, chain_of([1, 2, 3, 4]), 0.0)
    match = find(pool, chain_of([1, 2, 3, 4]), 0.0)
    other = Holding([])
    pool.acquire(other, NO_MATCH, 2, 1.0)
    pool.release(other, 1.0)
    with pytest.raises(BrokenInvariant):
        pool.acquire(Holding([]), match, 2, 2.0)


class PoolMachine(RuleBasedStateMachine):
    """Sequences of three tenants come and go over a few token strings, against a plain model of who holds what."""

    @initialize(pages=st.integers(6, 24), ghosts=st.integers(1, 30))
    def start(self, pages: int, ghosts: int) -> None:
        self.pool = BlockManager(pages, SIZE, LRU(), ghosts, 300.0)
        self.pool.set_retention({"plain": Retention()})
        self.now = 0.0
        self.held: dict[int, tuple[Holding, KeyChain, str, int]] = {}
        self.names = 0
        self.contents: dict[int, tuple[bytes, str]] = {}  # page -> key and scope written into it last

    @rule(
        tenant=st.sampled_from(["Private/a", "Private/b", "Public/docs"]),
        stem=st.integers(0, 3),
        length=st.integers(1, 5),
        tail=st.integers(0, 2),
    )
    def admit(self, tenant: str, stem: int, length: int, tail: int) -> None:
        tokens = [stem] * (length * SIZE) + [10 + tail] * SIZE
        chain = chain_of(tokens, tenant)
        match = self.pool.lookup(chain, tenant, "plain", len(chain.keys) - 1, self.now)
        assert not match.violation
        for place, record in enumerate(match.records):
            assert self.contents[record.page] == (chain.keys[place], tenant)
        pages = len(chain.keys)
        if not self.pool.can_hold(match, pages):
            with pytest.raises(BrokenInvariant):
                self.pool.acquire(Holding([]), match, pages, self.now)
            return
        holding = Holding([])
        self.pool.acquire(holding, match, pages, self.now)
        self.held[self.names] = (holding, chain, tenant, len(match.records))
        self.names += 1
        for page in holding.pages[len(match.records) :]:
            self.contents.pop(page, None)  # fresh: what it held is gone

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def compute_a_page_and_publish_it(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        holding, chain, tenant, _ = self.held[name]
        place = holding.published
        if place == len(holding.pages):
            return
        self.contents[holding.pages[place]] = (chain.keys[place], tenant)
        result = self.pool.publish(holding, chain.keys[place], chain.contents[place], tenant, "plain", "v1", self.now)
        assert result in (Published.STORED, Published.SHARED)
        assert self.contents[holding.pages[place]] == (chain.keys[place], tenant)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), more=st.integers(1, 3))
    def grow(self, data: st.DataObject, more: int) -> None:
        holding = self.held[data.draw(st.sampled_from(sorted(self.held)))][0]
        before = list(holding.pages)
        wanted = len(before) + more
        room = self.pool.available >= more
        assert self.pool.grow(holding, wanted, self.now) is room
        assert holding.pages[: len(before)] == before and len(holding.pages) == (wanted if room else len(before))
        del holding.pages[len(before) :]  # pages past the chain have no keys here: give them back one by one
        if room:
            self.pool.release(Holding(self._last_taken(before, holding)), self.now)

    def _last_taken(self, before: list[int], holding: Holding) -> list[int]:
        held = {page for each, _, _, _ in self.held.values() for page in each.pages}
        loose = [page for page in range(self.pool.total) if self.pool.references(page) and page not in held]
        for page in loose:
            self.contents.pop(page, None)
        return loose

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.release(self.held.pop(name)[0], self.now)

    @rule(seconds=st.sampled_from([0.0, 1.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(quota=st.sampled_from([0, 10, 40, 100]), age=st.sampled_from([0, 5, 30]), sweep=st.booleans())
    def limit(self, quota: int, age: int, sweep: bool) -> None:
        self.pool.set_retention({"plain": Retention(quota_percent=quota, max_age_seconds=age)})
        if sweep:
            self.pool.sweep(self.now, 1000)
            assert all(len(account.retained) <= account.limit for account in self.pool.accounts)

    @invariant()
    def nothing_is_counted_wrongly(self) -> None:
        if hasattr(self, "pool"):
            assert faults(self.pool, [holding for holding, _, _, _ in self.held.values()]) == []

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for holding, _, _, _ in self.held.values():
                self.pool.release(holding, self.now)
            assert self.pool.available == self.pool.total


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

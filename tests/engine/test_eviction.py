"""The seam for eviction policies, and LRU behind it."""

from __future__ import annotations

import pytest
from kvsteward_contract.directive import Retention
from kvsteward_engine.block_manager import NO_MATCH, BlockManager, Holding
from kvsteward_engine.errors import BrokenInvariant
from kvsteward_engine.eviction import LRU
from kvsteward_engine.keychain import KeyChain
from kvsteward_engine.page import Eviction, PageRecord, ScopeAccount


class Deepest:
    """A policy that values pages by their depth alone: the deepest, or the shallowest, goes first."""

    def __init__(self, sign: int) -> None:
        self.sign = sign
        self.candidates: dict[int, PageRecord] = {}

    def retain(self, record: PageRecord) -> None:
        self.candidates[record.page] = record

    def reclaim(self, record: PageRecord) -> None:
        del self.candidates[record.page]

    def victim(self, now: float, account: ScopeAccount | None = None) -> PageRecord | None:
        chosen = [record for record in self.candidates.values() if account in (None, record.account)]
        return max(chosen, key=lambda record: self.sign * record.depth, default=None)


def filled(policy: Deepest | LRU, quota: int = 100) -> tuple[BlockManager, list[KeyChain]]:
    """Two chains of five and two pages, the longer one used last."""
    pool = BlockManager(7, 1, policy, 16, 60.0)
    pool.set_retention({"plain": Retention(quota_percent=quota)})
    chains = []
    for seed, length in ((1, 2), (2, 5)):
        chain = KeyChain(bytes([seed]) * 32, b"c" * 32, 1)
        chain.extend([seed] * length, length)
        chains.append(chain)
        holding = Holding([])
        pool.acquire(holding, NO_MATCH, length, float(seed))
        for place in range(length):
            pool.publish(holding, chain.keys[place], chain.contents[place], "Private/a", "plain", "v1", float(seed))
        pool.release(holding, float(seed))
    return pool, chains


def resident(pool: BlockManager, chains: list[KeyChain]) -> list[int]:
    """Leading pages of each chain that are left."""
    return [len(pool.lookup(chain, "Private/a", "plain", len(chain.keys), 9.0).records) for chain in chains]


@pytest.mark.parametrize(("policy", "left"), [(LRU(), [0, 4]), (Deepest(1), [2, 2])], ids=["LRU", "deepest"])
def test_what_goes_for_room_is_the_policys_choice(policy: Deepest | LRU, left: list[int]) -> None:
    pool, chains = filled(policy)
    pool.acquire(Holding([]), NO_MATCH, 3, 9.0)
    assert resident(pool, chains) == left
    assert pool.evictions == {Eviction.CAPACITY: 3}


def test_what_goes_over_quota_is_the_policys_choice_too() -> None:
    pool, chains = filled(Deepest(1))
    pool.set_retention({"plain": Retention(quota_percent=60)})
    pool.sweep(9.0, 100)
    assert resident(pool, chains) == [2, 2]
    assert pool.evictions == {Eviction.OVER_QUOTA: 3}


def test_a_policy_that_would_strand_children_is_stopped() -> None:
    pool, _ = filled(Deepest(-1))
    with pytest.raises(BrokenInvariant, match="before its children"):
        pool.acquire(Holding([]), NO_MATCH, 1, 9.0)

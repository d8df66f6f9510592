"""The ledger: every resident page and the latest evictions, in slices, without content."""

from __future__ import annotations

from typing import Any

from kvsteward_contract.directive import Retention
from kvsteward_engine.sequence import SamplingParams
from support.fake_engine import FakeEngine, directive, prompt_of


def whole(engine: FakeEngine, limit: int = 3) -> list[dict[str, Any]]:
    """All slices together."""
    records: list[dict[str, Any]] = []
    cursor: str | None = ""
    while cursor is not None:
        part = engine.ledger(limit, cursor)
        assert len(part["pages"]) <= limit
        records += part["pages"]
        cursor = part["cursor"]
    return records


def test_every_page_is_told_once_with_its_owner_state_and_worth() -> None:
    engine = FakeEngine(32)
    engine.permit()
    engine.complete("1", prompt_of(1, 12), 1, directive("a"))
    engine.clock.now += 7
    engine.submit("2", prompt_of(1, 13), SamplingParams(max_tokens=50), directive("a"))
    engine.complete("3", prompt_of(1, 8), 1, directive("b"))
    records = whole(engine)
    assert len({record["key"] for record in records}) == len(records)
    shared = [record for record in records if record["savedTokens"] <= 12 and record["scope"] == "Private/a"]
    assert [(record["state"], record["refcount"], record["uses"]) for record in shared] == [("InUse", 1, 1)] * 3
    assert {record["created"] for record in shared} == {1700001000.0}
    assert {record["lastUse"] for record in shared} == {1700001007.0}
    others = [record for record in records if record["scope"] == "Private/b"]
    assert sorted((record["state"], record["savedTokens"]) for record in others) == [("Retained", 4), ("Retained", 8)]
    assert {record["version"] for record in records} == {"v1"}


def test_evicted_pages_are_told_with_the_reason_after_the_resident_ones() -> None:
    engine = FakeEngine(32)
    engine.permit(private=Retention(quota_percent=10))
    engine.complete("1", prompt_of(1, 24), 1, directive("a"))
    records = whole(engine)
    assert [record["state"] for record in records] == ["Retained"] * 3 + ["Evicted"] * 3
    assert {record["evictionReason"] for record in records[3:]} == {"OverQuota"}


def test_an_empty_pool_has_an_empty_ledger_and_an_odd_cursor_starts_again() -> None:
    engine = FakeEngine()
    assert engine.ledger(10) == {"pages": [], "cursor": None}
    assert engine.ledger(10, "not a cursor")["pages"] == []

"""The ledger: a record of every published page, and of those evicted lately, in slices. Digests only, no content."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvsteward_engine.block_manager import BlockManager
from kvsteward_engine.page import PageRecord

SCANNED = 50_000  # page numbers looked at in one call, so that a sparse pool can't hold up the engine


def ledger_slice(pages: BlockManager, limit: int, cursor: str, unix: Callable[[float], float]) -> dict[str, Any]:
    """Up to `limit` records from `cursor` on ("" = the start), and the cursor to go on with (None = the end).

    Resident pages come by page number, then evicted ones, newest first. A cursor is a position: pages that move between
    two calls may be missed or met twice. An unreadable cursor starts again. `unix` turns the engine's times into Unix
    seconds.
    """
    position = int(cursor) if cursor.isascii() and cursor.isdigit() and len(cursor) < 12 else 0
    records: list[dict[str, Any]] = []
    stop = min(pages.total, position + SCANNED)
    while position < stop and len(records) < limit:
        record = pages.record(position)
        if record is not None:
            records.append(_entry(record, pages.references(position), pages.block_tokens, unix))
        position += 1
    if position < pages.total:
        return {"pages": records, "cursor": str(position)}
    ghosts = pages.ghosts.newest_first(position - pages.total, limit - len(records))
    evicted = [_entry(ghost, 0, pages.block_tokens, unix) for ghost in ghosts]
    records += evicted
    position += len(evicted)
    more = position - pages.total < len(pages.ghosts)
    return {"pages": records, "cursor": str(position) if more else None}


def _entry(record: PageRecord, references: int, block_tokens: int, unix: Callable[[float], float]) -> dict[str, Any]:
    state = "Evicted" if record.reason else "InUse" if references else "Retained"
    return {
        "key": record.key.hex(),
        "scope": record.scope,
        "state": state,
        "refcount": references,
        "created": round(unix(record.created), 3),
        "lastUse": round(unix(record.last_use), 3),
        "uses": record.uses,
        "savedTokens": record.depth * block_tokens,  # prefill that a hit up to this page saves
        "retention": record.retention,
        "version": record.version,
        "evictionReason": record.reason.value if record.reason else "",
    }

"""A full check of a block manager's invariants, for tests and simulations: O(pool), never called while serving."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from kvsteward_engine.block_manager import BlockManager, Holding


def faults(pages: BlockManager, holdings: Collection[Holding]) -> list[str]:
    """Every way in which the pool contradicts itself or the holdings, which must be all there are; empty if none."""
    held = Counter(page for holding in holdings for page in holding.pages)
    free = set(pages._free)
    found = []
    if len(free) != len(pages._free):
        found.append("a page is on the free list twice")
    retained = 0
    for page in range(pages.total):
        references, record = pages._refs[page], pages._records[page]
        if references != held[page]:
            found.append(f"page {page}: {references} references counted, {held[page]} held")
        if (page in free) != (references == 0 and record is None):
            found.append(f"page {page}: free list, references and record disagree")
        if record is None:
            continue
        if record.page != page or pages._index.get(record.key) is not record or record.reason is not None:
            found.append(f"page {page}: its record or the index points elsewhere")
        if (page in record.account.retained) != (references == 0):
            found.append(f"page {page}: its scope counts it as retained wrongly")
        if record.parent is not None:
            parent = record.parent
            if pages._records[parent.page] is not parent or parent.depth != record.depth - 1:
                found.append(f"page {page}: resident without its parent")
            elif pages._refs[parent.page] < references:
                found.append(f"page {page}: held by someone who does not hold its parent")
        retained += references == 0
    children = Counter(id(record.parent) for record in pages._index.values() if record.parent)
    found += [
        f"page {record.page}: {record.children} children counted, {children[id(record)]} there"
        for record in pages._index.values()
        if record.children != children[id(record)]
    ]
    if retained != pages.retained:
        found.append(f"{pages.retained} retained pages counted, {retained} there")
    for account in pages.accounts:
        resident = sum(1 for record in pages._index.values() if record.account is account)
        if resident != account.resident or not resident:
            found.append(f"scope {account.scope}: {account.resident} pages counted, {resident} there")
    found += [
        "a holding counts a private page as published"
        for holding in holdings
        if any(pages._records[page] is None for page in holding.pages[: holding.published])
    ]
    return found

"""How a step is laid out: rows, slots, groups of decodes, pages that change hands."""

from __future__ import annotations

import torch
from kvsteward_engine.batch import Batch, plan
from kvsteward_engine.sequence import Sequence, Step, Work
from support.oracle import sequence, step

BLOCK = 4


def laid_out(works: Step, group_tokens: int = 1 << 30) -> Batch:
    return plan(works, BLOCK, torch.device("cpu"), group_tokens)


def decode(length: int, first_page: int, name: str = "s") -> tuple[Sequence, int, int]:
    """A sequence of `length` tokens whose last one is to be computed."""
    pages = range(first_page, first_page + -(-length // BLOCK))
    return sequence(list(range(100, 100 + length)), list(pages), name), length - 1, 1


def test_decodes_come_first_and_longest_first_and_samples_keep_the_works_order() -> None:
    chunk = (sequence(list(range(10)), [7, 3, 9]), 2, 6)
    batch = laid_out(step(decode(3, 20), chunk, decode(9, 30)))
    assert batch.tokens.tolist() == [108, 102, 2, 3, 4, 5, 6, 7]
    assert batch.positions.tolist() == [8, 2, 2, 3, 4, 5, 6, 7]
    assert batch.slots.tolist() == [32 * 4, 20 * 4 + 2, 30, 31, 12, 13, 14, 15]
    assert batch.samples.tolist() == [1, 7, 0]


def test_a_work_that_samples_nothing_has_no_sample_row() -> None:
    held = sequence(list(range(8)), [0, 1])
    assert laid_out(Step((Work(held, 0, 8, sample=False),))).samples.tolist() == []


def test_a_group_is_padded_with_each_members_own_pages() -> None:
    (group,) = laid_out(step(decode(9, 30), decode(3, 20))).groups
    assert (group.first, group.size, group.length, group.lengths) == (0, 2, 9, (9, 3))
    assert group.table.tolist() == [30, 31, 32, 20, 20, 20]


def test_much_shorter_members_get_a_group_of_their_own() -> None:
    groups = laid_out(step(decode(200, 0), decode(190, 50), decode(70, 100), decode(8, 120))).groups
    assert [group.lengths for group in groups] == [(200, 190), (70, 8)]
    assert [group.first for group in groups] == [0, 2]


def test_a_group_gathers_no_more_than_it_may_but_has_a_member() -> None:
    decodes = [decode(16, 4 * index) for index in range(5)]
    assert [group.size for group in laid_out(step(*decodes), group_tokens=32).groups] == [2, 2, 1]
    assert [group.size for group in laid_out(step(*decodes), group_tokens=0).groups] == [1] * 5


def test_pages_first_written_and_not_filled_are_fresh() -> None:
    def fresh(start: int, count: int) -> list[int]:
        pages = laid_out(step((sequence(list(range(12)), [5, 6, 7]), start, count))).fresh_pages
        return [] if pages is None else pages.tolist()

    assert fresh(0, 3) == [5]  # the only page, not filled
    assert fresh(0, 4) == []  # filled at once
    assert fresh(0, 10) == [7]
    assert fresh(4, 1) == [6]  # a decode that begins a page
    assert fresh(5, 1) == []  # its page was begun before
    assert fresh(2, 1) == []
    assert fresh(5, 4) == [7]

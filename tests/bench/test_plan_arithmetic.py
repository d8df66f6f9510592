"""Pages, pools and what may be asked together."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvsteward_bench.plan import catalogue
from kvsteward_bench.plan.architectures import shape_of
from kvsteward_bench.plan.arithmetic import Plan, Wish, plan
from kvsteward_bench.plan.errors import CannotPlan
from kvsteward_bench.plan.report import as_text
from kvsteward_bench.plan.sizes import VALUE_BYTES, readable, tokens_of

KIB, GIB = 1 << 10, 1 << 30
SHAPES = {name: shape_of(catalogue.load(name)) for name in catalogue.names()}
names = st.sampled_from(sorted(SHAPES))
tokens_drawn = st.integers(1, 200_000)
blocks = st.sampled_from([1, 16, 64])


def of(name: str, tokens: int, **wish: Any) -> Plan:
    return plan(SHAPES[name], Wish(tokens, **wish))


@given(names, tokens_drawn, st.sampled_from([None, *VALUE_BYTES]), blocks)
def test_what_fits_fits_and_one_more_does_not(name: str, tokens: int, dtype: str | None, block: int) -> None:
    pool = 64 * GIB
    planned = of(name, tokens, pool=pool, dtype=dtype or "Auto", block_tokens=block)
    assert planned.sequences is not None and planned.pool_tokens is not None
    # Page by page: at most what the pages of a sequence take, at least what its tokens take.
    assert planned.sequences * planned.cost.total <= pool
    alone = of(name, tokens, pool=pool, dtype=dtype or "Auto").sequences
    assert alone is not None and planned.sequences <= alone
    assert (alone + 1) * planned.cost.total > pool
    assert planned.pool_tokens % block == 0
    assert planned.pool_tokens * planned.cost.bytes_per_token <= pool + planned.pool_tokens  # rounded up a byte


@given(names, tokens_drawn, tokens_drawn)
def test_more_tokens_never_take_less(name: str, one: int, other: int) -> None:
    less, more = sorted((one, other))
    assert of(name, less).cost.total <= of(name, more).cost.total
    assert of(name, less).cost.read <= of(name, more).cost.read


@given(names, tokens_drawn)
def test_a_step_reads_no_more_than_is_kept(name: str, tokens: int) -> None:
    cost = of(name, tokens).cost
    assert 0 < cost.read <= cost.total


def test_whole_pages_are_counted_where_a_page_size_is_given() -> None:
    planned = of("llama-3.1-70b", 1025, pool=8 * GIB, block_tokens=16)
    assert planned.pool_tokens == 26_208  # 1,638 pages
    assert planned.sequences == 1638 // 65
    assert planned.cost.total == 1025 * 320 * KIB  # payload alone


def test_a_window_holds_the_page_that_is_only_partly_out_of_it() -> None:
    """A window of 1,024 in pages of 16 spans 65 of them."""
    pages = of("gemma-3-4b", 100_000, pool=GIB * 400, block_tokens=16)
    growing = -(-100_000 // 16) * 16 * 20 * KIB
    assert pages.sequences == GIB * 400 // (growing + 65 * 16 * 29 * 4 * KIB)


def test_a_shared_prefix_is_held_once_in_whole_pages() -> None:
    wish = {"pool": 512 * 144 * KIB * 10, "block_tokens": 16}
    assert of("qwen3-8b", 512, **wish).sequences == 10
    assert of("qwen3-8b", 512, shared_prefix=264, **wish).sequences == 1 + 9 * 512 // (512 - 256)
    assert of("qwen3-8b", 512, shared_prefix=15, **wish).sequences == 10


def test_sparse_reads_make_a_step_read_less_and_keep_as_much() -> None:
    plain, sparse = (of("llama-3.1-8b", 32_768, block_tokens=16, sparse_pages=k) for k in (0, 64))
    assert plain.cost.total == sparse.cost.total == plain.cost.read
    # 64 of 2,048 pages, and the smallest and largest keys of each page.
    assert sparse.cost.read == (64 * 16 + 2048) * 128 * KIB
    assert [step.technique for step in sparse.steps][-1] == "SparseReads"
    assert of("llama-3.1-8b", 1024, block_tokens=16, sparse_pages=64).cost.read == 1024 * 128 * KIB


def test_host_memory_holds_whole_pages_too() -> None:
    assert of("llama-3.1-70b", 4096, offload=16 * GIB, block_tokens=16).offload_tokens == 52_416


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"tokens": 0}, "at least one token"),
        ({"tokens": 8, "dtype": "FP4"}, "FP4 is none of"),
        ({"tokens": 8, "budget_percent": 0}, "not within 1 to 100"),
        ({"tokens": 8, "budget_percent": 101}, "not within 1 to 100"),
        ({"tokens": 8, "sparse_pages": -1}, "negative"),
        ({"tokens": 8, "pool": -1}, "negative"),
        ({"tokens": 8, "shared_prefix": 8}, "leaves nothing"),
        ({"tokens": 8, "shared_prefix": 4, "budget_percent": 50}, "share no prefix"),
    ],
)
def test_what_contradicts_itself_is_refused(wish: dict[str, Any], said: str) -> None:
    with pytest.raises(CannotPlan, match=said):
        Wish(**wish)


def test_what_does_not_fit_is_said() -> None:
    planned = of("llama-3.1-70b", 32_768, pool=8 * GIB)
    assert (planned.sequences, planned.pool_tokens) == (0, 26_214)
    assert "not one sequence of 32,768 tokens fits: it takes 10 GiB" in planned.notes
    assert of("jamba-v0.1", 10, pool=1 << 20).pool_tokens == 0  # its state alone is larger


def test_a_context_that_the_model_does_not_have_is_noted() -> None:
    assert any("8,192" in note for note in of("smollm2-135m", 8193).notes)
    assert not of("smollm2-135m", 8192).notes


def test_the_text_has_every_step_and_every_answer() -> None:
    text = as_text(of("gemma-3-4b", 131_072, pool=8 * GIB, dtype="FP8"), ["FP8 pages"])
    for part in ("FullAttention", "GQA", "SlidingWindow", "29 of 34 layers keep the newest 1,024", "10,240 (10 KiB)"):
        assert part in text
    assert "planned, not served by this engine yet: FP8 pages" in text
    assert max(len(line) for line in text.splitlines()) <= 120


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0"), (1, "1 B"), (1023, "1,023 B"), (1024, "1 KiB"), (70_272, "68.6 KiB"), (1 << 20, "1 MiB"),
     ((1 << 30) - 1, "1 GiB"), (40 << 30, "40 GiB"), (5 << 50, "5,120 TiB")],
)  # fmt: skip
def test_sizes_are_readable(size: int, text: str) -> None:
    assert readable(size) == text


@pytest.mark.parametrize(("text", "count"), [("4096", 4096), ("128K", 131_072), ("1m", 1 << 20)])
def test_tokens_may_be_counted_in_thousands(text: str, count: int) -> None:
    assert tokens_of(text) == count


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5K", "8G", "9" * 13, "999999999M"])
def test_what_is_no_count_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(CannotPlan, match="not a number of tokens"):
        tokens_of(text)

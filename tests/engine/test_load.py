"""What an engine is, as its pages' identity has it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvsteward_contract.identity import root_key
from kvsteward_engine.load import Wanted, load
from support.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Wanted:
    return Wanted(
        model=make_tiny_model(tmp_path_factory.mktemp("models") / "tiny"),
        name="tiny",
        model_revision="1",
        tokenizer_revision="1",
        dtype="FP32",
        device="cpu",
        threads=1,
        deterministic=False,
        capacity=1 << 20,
        block_tokens=16,
        max_tokens=None,
        max_concurrent=4,
        max_waiting=4,
        prefill_chunk=64,
    )


def root(wanted: Wanted) -> bytes:
    """The key that pages of one engine, and of one scope, chain on."""
    engine = load(wanted, print).engine
    try:
        return root_key(engine.engine.settings.identity)  # type: ignore[attr-defined]
    finally:
        engine.stop()  # type: ignore[attr-defined]


def test_what_changes_the_meaning_of_a_page_changes_its_key_and_what_does_not_changes_none(wanted: Wanted) -> None:
    """A revision or a format left out would let pages of one be taken for the other's, where they outlive an engine."""
    plain = root(wanted)
    keys = {
        "model revision": root(replace(wanted, model_revision="2")),
        "tokenizer revision": root(replace(wanted, tokenizer_revision="2")),
        "revisions that only together are the same": root(replace(wanted, model_revision="11", tokenizer_revision="")),
        "format": root(replace(wanted, dtype="BF16")),
        "tokens a page": root(replace(wanted, block_tokens=8)),
        "build": root(replace(wanted, deterministic=True)),
    }
    assert len({plain, *keys.values()}) == len(keys) + 1
    assert root(replace(wanted, name="other", capacity=2 << 20, max_concurrent=2, prefill_chunk=32)) == plain

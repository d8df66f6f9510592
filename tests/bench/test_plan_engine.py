"""The planner's figures are those of the engine that runs."""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path

import pytest
from kvsteward_bench.plan import catalogue
from kvsteward_bench.plan.architectures import shape_of
from kvsteward_bench.plan.arithmetic import Wish, plan
from kvsteward_engine.config import parse_config
from kvsteward_engine.errors import UnsupportedModel
from kvsteward_engine.load import Wanted, load, sizes
from kvsteward_engine.main import make_parser
from kvsteward_engine.serve import wanted_of
from support.tiny_model import make_tiny_model


def wanted(model: Path, *flags: str) -> Wanted:
    asked: argparse.Namespace = make_parser().parse_args(["serve", "--model", str(model), *flags])
    return wanted_of(asked)


def served() -> list[str]:
    """Known models that the engine accepts."""
    names = []
    for name in catalogue.names():
        try:
            parse_config(catalogue.load(name))
        except UnsupportedModel:
            continue
        names.append(name)
    return names


def test_some_known_models_are_served_and_none_is_incomplete() -> None:
    assert {"llama-3.1-8b", "qwen2.5-7b", "qwen3-8b", "smollm2-135m"} <= set(served())


@pytest.mark.parametrize("name", served())
@pytest.mark.parametrize("dtype", ["Auto", "BF16", "FP16", "FP32"])
@pytest.mark.parametrize("block", [1, 16, 48])
def test_the_engine_makes_as_many_pages_as_are_planned(name: str, dtype: str, block: int) -> None:
    raw = catalogue.load(name)
    flags = ("--capacity", "1Gi", "--block-tokens", str(block), "--dtype", dtype)
    made = sizes(wanted(Path(name), *flags), parse_config(raw))
    planned = plan(shape_of(raw), Wish(1024, dtype, 1 << 30, block))
    assert (made.dtype, made.bytes_per_token) == (planned.dtype, planned.cost.bytes_per_token)
    assert made.pages * block == planned.pool_tokens


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["Auto", "BF16"])
def test_a_running_engine_reports_what_was_planned(tmp_path: Path, dtype: str) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    loaded = load(wanted(model, "--capacity", "3Mi", "--dtype", dtype, "--block-tokens", "16"), on_failure=pytest.fail)
    try:
        state = loaded.engine.state()
        planned = plan(shape_of(json.loads((model / "config.json").read_text())), Wish(256, dtype, 3 << 20, 16))
        assert (state.dtype, state.bytes_per_token) == (planned.dtype, planned.cost.bytes_per_token)
        assert (state.pool_tokens, state.block_tokens) == (planned.pool_tokens, 16)
    finally:
        loaded.engine.stop()
        gc.unfreeze()

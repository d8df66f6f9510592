"""Reading safetensors, whole or sharded; every kind of broken checkpoint is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kvsteward_engine.errors import BadCheckpoint
from kvsteward_engine.runner import Runner
from kvsteward_engine.weights import SafetensorsCheckpoint
from safetensors.torch import load_file, save_file
from support.oracle import Oracle, random_tokens, sequence, step


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Oracle(tmp_path, "llama-gqa").folder


def load(folder: Path, **settings: Any) -> Runner:
    return Runner(folder, "FP32", pages=8, device="cpu", threads=1, **settings)


def test_a_sharded_checkpoint_gives_the_same_logits_as_a_whole_one(tmp_path: Path) -> None:
    whole = Oracle(tmp_path / "whole", "llama-gqa")
    sharded = Oracle(tmp_path / "sharded", "llama-gqa", max_shard_size="100KB")
    assert len(list(sharded.folder.glob("*.safetensors"))) > 1
    tokens = random_tokens(20, seed=1)
    logits = [load(each.folder).logits(step((sequence(tokens, range(2)), 0, 20))) for each in (whole, sharded)]
    assert torch.equal(*logits)


def test_names_and_tensors_are_those_of_the_file(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    with SafetensorsCheckpoint(folder) as opened:
        assert opened.names() == stored.keys()
        assert all(torch.equal(opened.read(name), stored[name]) for name in stored)


def test_a_truncated_file_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors is truncated"):
        load(folder)


def test_a_file_that_is_something_else_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"<html>not found</html>")
    with pytest.raises(BadCheckpoint, match="no safetensors file"):
        load(folder)


def test_a_missing_file_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match="only safetensors and GGUF"):
        load(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 112}))
    with pytest.raises(
        BadCheckpoint, match=r"mlp\.gate_proj\.weight is \(96, 64\) where the config asks for \(112, 64\)"
    ):
        load(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = Oracle(tmp_path, "llama-gqa", max_shard_size="100KB").folder
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(BadCheckpoint, match=f"{shard.name} is missing"):
        load(folder)


def test_a_shard_that_lacks_a_tensor_of_the_index_is_named(tmp_path: Path) -> None:
    folder = Oracle(tmp_path, "llama-gqa", max_shard_size="100KB").folder
    shard = sorted(folder.glob("*.safetensors"))[1]
    tensors = load_file(shard)
    gone = min(tensors)
    del tensors[gone]
    save_file(tensors, shard)
    with pytest.raises(BadCheckpoint, match=f"{shard.name} lacks {gone}"):
        load(folder)


def test_an_index_without_a_map_is_refused(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(BadCheckpoint, match="no weight_map"):
        load(folder)

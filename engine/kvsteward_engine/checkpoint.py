"""Opens what `--model` names: a folder in Hugging Face's layout, a folder with one GGUF file, or such a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvsteward_engine.config import ModelConfig, load_config
from kvsteward_engine.errors import BadCheckpoint

if TYPE_CHECKING:
    from kvsteward_engine.weights import Checkpoint


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint's description and its tensors; the tensors can be read while the checkpoint is open."""

    config: ModelConfig
    tensors: Checkpoint


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that `path` is or holds, or None if it is a Hugging Face folder. Raises `BadCheckpoint`."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise BadCheckpoint(f"{path} is a file that doesn't end in .gguf; name a model folder or a GGUF file")
        return path
    if not path.is_dir():
        raise BadCheckpoint(f"{path} doesn't exist; name a model folder or a GGUF file")
    files = sorted(path.glob("*.gguf"))
    if (path / "config.json").exists() or not files:
        return None
    if len(files) > 1:
        raise BadCheckpoint(f"{path} holds {len(files)} GGUF files; name the one to load")
    return files[0]


def describe(path: Path) -> ModelConfig:
    """The model's sizes, without reading its weights."""
    file = find_gguf(path)
    if file is None:
        return load_config(path)
    from kvsteward_engine.gguf import GgufCheckpoint  # the gguf package is slow to import and seldom needed

    return GgufCheckpoint(file).config


@contextmanager
def open_checkpoint(path: Path) -> Iterator[Opened]:
    """Open a checkpoint for loading. Raises `BadCheckpoint` or `UnsupportedModel`."""
    file = find_gguf(path)
    if file is not None:
        from kvsteward_engine.gguf import GgufCheckpoint

        tensors = GgufCheckpoint(file)
        yield Opened(tensors.config, tensors)
        return
    from kvsteward_engine.weights import SafetensorsCheckpoint  # torch: sizes are wanted long before weights are

    config = load_config(path)
    with SafetensorsCheckpoint(path) as opened:
        yield Opened(config, opened)

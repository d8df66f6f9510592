"""Reads a safetensors checkpoint, one file or sharded, tensor by tensor, and says plainly what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch
from safetensors import SafetensorError, safe_open

from kvsteward_engine.config import read_json
from kvsteward_engine.errors import BadCheckpoint

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Checkpoint(Protocol):
    """Tensors by their Hugging Face names; safetensors folders and GGUF files both look like this."""

    def names(self) -> frozenset[str]: ...

    def read(self, name: str) -> torch.Tensor:
        """A CPU tensor in the dtype it is stored in (GGUF: dequantised float32)."""


class SafetensorsCheckpoint:
    """Memory-maps the files of one folder; a context manager, as the maps must be closed."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, safe_open] = {}
        self._where = self._locate(folder)

    def names(self) -> frozenset[str]:
        return frozenset(self._where)

    def read(self, name: str) -> torch.Tensor:
        path = self._where.get(name)
        if path is None:
            raise BadCheckpoint(f"the checkpoint has no tensor {name}; config.json and weights don't belong together")
        return self._open(path).get_tensor(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for opened in self._files.values():
            opened.__exit__(kind, error, trace)
        self._files.clear()

    def _locate(self, folder: Path) -> Mapping[str, Path]:
        if (folder / INDEX).exists():
            shards = read_json(folder / INDEX).get("weight_map")
            if not isinstance(shards, dict):
                raise BadCheckpoint(f"{folder / INDEX} has no weight_map")
            where = {name: folder / shard for name, shard in shards.items()}
            for path in sorted(set(where.values())):
                missing = {name for name, shard in where.items() if shard == path} - set(self._open(path).keys())
                if missing:
                    raise BadCheckpoint(f"{path} lacks {min(missing)}, which the index puts there")
            return where
        path = folder / SINGLE
        if not path.exists():
            raise BadCheckpoint(f"{folder} holds neither {SINGLE} nor {INDEX}; only safetensors and GGUF are read")
        return dict.fromkeys(self._open(path).keys(), path)

    def _open(self, path: Path) -> safe_open:
        opened = self._files.get(str(path))
        if opened is None:
            try:
                opened = safe_open(str(path), framework="pt", device="cpu")
                opened.__enter__()
            except FileNotFoundError:
                raise BadCheckpoint(f"{path} is missing, though {INDEX} names it; download it again") from None
            except (SafetensorError, OSError) as error:
                raise BadCheckpoint(
                    f"{path} is truncated or no safetensors file ({error}); download it again"
                ) from None
            self._files[str(path)] = opened
        return opened

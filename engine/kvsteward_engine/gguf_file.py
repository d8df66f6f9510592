"""The GGUF container: metadata fields and tensors of a memory-mapped file, checked against its length.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. The `gguf` package
reads it too, but takes seconds over a vocabulary, as it makes several objects of each token.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from kvsteward_engine.errors import BadCheckpoint, UnsupportedModel

ALIGNMENT = 32  # of the tensors' data, unless the file names another
STRING, ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOATS = {GGMLQuantizationType.F32: numpy.float32, GGMLQuantizationType.F16: numpy.float16}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies; `shape` is in the usual order, rows first."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int  # bytes from the start of the file
    size: int  # bytes


class GgufFile:
    """Raises `BadCheckpoint` for a file that is truncated or something else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fields: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with path.open("rb") as opened:
                self._bytes = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            self._parse(_Cursor(self._bytes))
        except (OSError, ValueError, struct.error, KeyError) as error:
            raise BadCheckpoint(f"{path} is truncated or not a GGUF file ({error}); download it again") from None

    def read(self, name: str) -> numpy.ndarray:
        """A tensor's values, dequantised to float32, in memory of their own. Raises `UnsupportedModel`."""
        tensor = self.tensors[name]
        dtype = _FLOATS.get(tensor.kind, numpy.uint8)
        stored = numpy.frombuffer(self._bytes, numpy.uint8, tensor.size, tensor.start).view(dtype)
        rows = tensor.shape[:-1]
        try:
            values = dequantize(stored.reshape(*rows, -1), tensor.kind)
        except NotImplementedError:
            raise UnsupportedModel(f"{self.path}: {name} is stored as {tensor.kind.name}, which isn't read") from None
        return numpy.array(values, dtype=numpy.float32)

    def _parse(self, cursor: _Cursor) -> None:
        magic, version = cursor.take("<4sI")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"it starts with {magic!r} and version {version}")
        tensors, fields = cursor.take("<QQ")
        for _ in range(fields):
            key = cursor.string()
            self.fields[key] = cursor.value(cursor.number("I"))
        described = [self._describe(cursor) for _ in range(tensors)]
        alignment = self.fields.get("general.alignment", ALIGNMENT)
        origin = -(-cursor.place // alignment) * alignment
        for name, shape, kind, offset in described:
            block, stored = GGML_QUANT_SIZES[kind]
            count = int(numpy.prod(shape, dtype=numpy.int64))
            tensor = GgufTensor(shape, kind, origin + offset, count // block * stored)
            if tensor.start + tensor.size > len(self._bytes):
                raise ValueError(f"tensor {name} reaches past the end of the file")
            self.tensors[name] = tensor

    @staticmethod
    def _describe(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = cursor.string()
        sizes = cursor.take(f"<{cursor.number('I')}Q")
        kind, offset = cursor.take("<IQ")
        return name, tuple(reversed(sizes)), GGMLQuantizationType(kind), offset


class _Cursor:
    """Reads values one after the other; past the end of the file `struct.error` or `ValueError` is raised."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self.place = 0

    def take(self, pattern: str) -> tuple[Any, ...]:
        values = struct.unpack_from(pattern, self._content, self.place)
        self.place += struct.calcsize(pattern)
        return values

    def number(self, pattern: str) -> Any:
        return self.take("<" + pattern)[0]

    def string(self) -> str:
        length = self.number("Q")
        end = self.place + length
        if end > len(self._content):
            raise ValueError("a text reaches past the end of the file")
        text = self._content[self.place : end].decode()
        self.place = end
        return text

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.number(_NUMBERS[kind])
        of, count = self.take("<IQ")
        if count > len(self._content):
            raise ValueError("a list reaches past the end of the file")
        if of in _NUMBERS:
            return list(self.take(f"<{count}{_NUMBERS[of]}"))
        read: Callable[[], Any] = self.string if of == STRING else lambda: self.value(of)
        return [read() for _ in range(count)]

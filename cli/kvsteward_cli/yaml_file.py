"""YAML documents of a file or of stdin, with what the API server would refuse refused: a key that occurs twice."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from kvsteward_cli.errors import CommandFailed

LARGEST = 4 << 20  # bytes; a resource of a cluster has at most 1.5 MB


class _Strict(yaml.SafeLoader):
    """A key given twice is an error: YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"the key {key.value!r} occurs twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_documents(file: str) -> list[Any]:
    """Every document that isn't empty; `-` is stdin. Raises CommandFailed."""
    try:
        content = sys.stdin.buffer.read(LARGEST + 1) if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise CommandFailed(f"{file} can't be read: {error.strerror}", 2) from None
    if len(content) > LARGEST:
        raise CommandFailed(f"{file} has more than {LARGEST >> 20} MiB: no resource is that large", 2)
    try:
        loaded = list(yaml.load_all(content.decode("utf-8"), Loader=_Strict))
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CommandFailed(f"{file} is no YAML: {' '.join(str(error).split())}", 2) from None
    return [one for one in loaded if one is not None]

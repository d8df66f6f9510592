"""YAML documents of a file or of stdin."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kvsteward_sidecar.yaml_text import LARGEST, InvalidYaml, documents

from kvsteward_cli.errors import CommandFailed


def read_documents(file: str) -> list[Any]:
    """Every document that isn't empty; `-` is stdin. Raises CommandFailed."""
    try:
        content = sys.stdin.buffer.read(4 * LARGEST) if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise CommandFailed(f"{file} can't be read: {error.strerror}", 2) from None
    try:
        return documents(content.decode("utf-8"))
    except (InvalidYaml, UnicodeDecodeError) as error:
        raise CommandFailed(f"{file} is no YAML: {error}", 2) from None

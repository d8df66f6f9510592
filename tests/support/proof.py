"""Measured figures for docs/proof/: written only when a test runs under `make prove`, always printed."""

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("kvsteward", "torch", "transformers", "aiohttp", "kopf")


def record(name: str, line: str, figures: dict[str, Any]) -> None:
    """`line` is the claim in words, `figures` what was measured for it."""
    print(f"\nproof {name}: {json.dumps(figures)}")
    if os.environ.get("PROVE") != "1":
        return
    found = {
        "line": line,
        "figures": figures,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _commit(),
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {package: _version(package) for package in PACKAGES},
    }
    (ROOT / "docs/proof" / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _commit() -> str:
    head = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(head, cwd=ROOT, text=True, capture_output=True, check=False).stdout.strip()

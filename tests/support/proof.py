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


def record(name: str, line: str, figures: dict[str, Any], part: str = "") -> None:
    """`line` is the claim in words, `figures` what was measured for it, by one `part` of several where it is named."""
    print(f"\nproof {name} {part}: {json.dumps(figures)}")
    if os.environ.get("PROVE") != "1":
        return
    file = ROOT / "docs/proof" / f"{name}.json"
    if part:
        before = json.loads(file.read_text())["figures"] if file.exists() else {}
        figures = {**before, part: figures}
    found = {
        "line": line,
        "figures": figures,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _commit(),
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {package: _version(package) for package in PACKAGES},
    }
    file.write_text(json.dumps(found, indent=2) + "\n")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _commit() -> str:
    head = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(head, cwd=ROOT, text=True, capture_output=True, check=False).stdout.strip()

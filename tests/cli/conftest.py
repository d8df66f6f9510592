"""The real checkpoint, made once and kept between runs."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a checkpoint folder."""
    from kvsteward_engine.smollm2 import fetch

    folder = ROOT / ".cache" / "models" / "smollm2"
    fetch(folder)
    return folder

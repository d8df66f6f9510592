"""Well-known models by name: their config.json without what no plan needs."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from kvsteward_bench.plan.errors import CannotPlan

_FOLDER = files("kvsteward_bench.plan") / "models"


def names() -> list[str]:
    return sorted(entry.name.removesuffix(".json") for entry in _FOLDER.iterdir() if entry.name.endswith(".json"))


def find(name: str) -> str | None:
    """The entry that a served model's name stands for: `Qwen/Qwen3-8B-Base` is `qwen3-8b`."""
    plain = name.rpartition("/")[2].lower().removeprefix("meta-")
    fitting = [known for known in names() if plain == known or plain.startswith(f"{known}-")]
    return max(fitting, key=len, default=None)


def load(name: str) -> dict[str, Any]:
    """Raises CannotPlan."""
    known = find(name)
    if known is None:
        raise CannotPlan(
            f"{name} is not a model this command knows; give its config.json, or one of {', '.join(names())}"
        )
    raw: dict[str, Any] = json.loads((_FOLDER / f"{known}.json").read_text(encoding="utf-8"))
    return raw

"""A Hugging Face config.json as a mapping with checked values. The text part of a multimodal one counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvsteward_bench.plan.errors import CannotPlan

# What the wrappers of multimodal models call their text part where that doesn't say it itself.
TEXT_TYPES = {"gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "gemma4": "gemma4_text", "mistral3": "mistral"}
DTYPES = {"float32": "FP32", "bfloat16": "BF16", "float16": "FP16"}
MOST = 1 << 24  # no dimension of a model is larger: a slip, and numbers without end


class Fields:
    """`raw` over `defaults`: what the model's class takes where the file says nothing."""

    def __init__(self, raw: Mapping[str, Any], where: str, defaults: Mapping[str, Any] | None = None) -> None:
        self.raw, self.where, self.defaults = raw, where, defaults or {}

    def get(self, name: str) -> Any:
        value = self.raw.get(name)
        return self.defaults.get(name) if value is None else value

    def integer(self, name: str, least: int = 1) -> int:
        """Raises CannotPlan."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            said = "is missing" if value is None else f"is {value!r}"
            raise CannotPlan(f"{self.where}: {name} {said}; a whole number from {least} to {MOST} is needed")
        return value

    def integer_or(self, name: str, otherwise: int, least: int = 1) -> int:
        """Raises CannotPlan."""
        return otherwise if self.get(name) is None else self.integer(name, least)

    def layer_types(self, allowed: frozenset[str], layers: int) -> list[str] | None:
        """Raises CannotPlan where the list doesn't fit the model."""
        types = self.get("layer_types")
        if types is None:
            return None
        if not isinstance(types, list) or len(types) < layers:
            raise CannotPlan(f"{self.where}: layer_types does not name each of the {layers} layers")
        if unknown := [str(one) for one in types[:layers] if one not in allowed]:
            raise CannotPlan(f"{self.where}: layer_types has {unknown[0]}, whose cache this planner does not know")
        return types[:layers]


def text_part(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The language model's own fields, and its model type ('' if none is named)."""
    inner = raw.get("text_config")
    kind = str(raw.get("model_type") or "")
    if not isinstance(inner, Mapping):
        return raw, kind
    return inner, str(inner.get("model_type") or TEXT_TYPES.get(kind, kind))


def dtype_of(raw: Mapping[str, Any], inner: Mapping[str, Any]) -> tuple[str, str]:
    """The checkpoint's dtype as the policy names it, and a sentence where it had to be assumed ('' otherwise)."""
    name = next(
        (str(value).removeprefix("torch.") for part in (raw, inner) for key in ("dtype", "torch_dtype")
         if (value := part.get(key)) is not None), "",
    )  # fmt: skip
    if name in DTYPES:
        return DTYPES[name], ""
    if raw.get("quantization_config") or name:
        said = f"config.json says dtype {name}" if name else "config.json names no dtype and has quantised weights"
        return "BF16", f"{said}: the cache is taken to be BF16; --dtype plans another"
    return "FP32", "config.json names no dtype, which means FP32; --dtype plans another"

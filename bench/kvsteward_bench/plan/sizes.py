"""Bytes: of a value in each dtype, and as people read and write them."""

from __future__ import annotations

import re
from fractions import Fraction

from kvsteward_bench.plan.errors import CannotPlan

# Payload alone: the scales of quantised pages come on top.
VALUE_BYTES = {
    "FP32": Fraction(4), "BF16": Fraction(2), "FP16": Fraction(2),
    "FP8": Fraction(1), "INT8": Fraction(1), "INT4": Fraction(1, 2),
}  # fmt: skip
QUANTISED = ("FP8", "INT8", "INT4")
_UNITS = ("KiB", "MiB", "GiB", "TiB")
_COUNT = re.compile(r"^([0-9]{1,12})([KkMm]?)$")
_FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20}
MOST_TOKENS = 1 << 40


def readable(size: int) -> str:
    """67.5 KiB, 40 GiB, 0: one decimal at most."""
    if size < 1024:
        return f"{size:,} B" if size else "0"
    value = float(size)
    for unit in _UNITS:
        value /= 1024
        if value < 1023.95 or unit == _UNITS[-1]:
            break
    return f"{value:,.1f}".removesuffix(".0") + f" {unit}"


def tokens_of(text: str) -> int:
    """4096, 128K or 1M; K is 1,024. Raises CannotPlan."""
    found = _COUNT.match(text)
    count = int(found[1]) * _FACTORS[found[2].lower()] if found else 0
    if not 1 <= count <= MOST_TOKENS:
        raise CannotPlan(f"{text!r} is not a number of tokens such as 4096 or 128K")
    return count

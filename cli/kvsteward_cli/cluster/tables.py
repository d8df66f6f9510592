"""Text for a terminal: tables, ages, moments. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

NOTHING = "-"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Columns as wide as their widest cell, three spaces between; no line ends in spaces."""
    lines = [list(head), *([cell(value) for value in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    padded = ("   ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)


def cell(value: Any) -> str:
    """One value on one line. What came from the cluster can't move the cursor or change colours."""
    if value is None or value == "":
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "".join(character if character.isprintable() else " " for character in str(value))


def ago(seconds: float) -> str:
    """As kubectl writes ages: 45s, 12m, 5h, 3d."""
    whole = max(0, int(seconds))
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if whole >= 2 * size:
            return f"{whole // size}{unit}"
    return f"{whole}s"


def unix(text: str | None) -> float | None:
    """Unix seconds of an RFC 3339 time; None for what isn't one."""
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        return None


def since(text: str | None, now: float) -> str:
    """The age of an RFC 3339 time, "" for what isn't one."""
    then = unix(text)
    return "" if then is None else ago(now - then)


def moment(seconds: float) -> str:
    """A Unix time as people and scripts read it: UTC, to the millisecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:.1f}"


def short(digest: str, length: int = 10) -> str:
    """The start of a long digest: enough to tell two apart. `Private/<digest>` keeps its kind."""
    kind, slash, rest = digest.rpartition("/")
    return f"{kind}{slash}{rest[:length]}"

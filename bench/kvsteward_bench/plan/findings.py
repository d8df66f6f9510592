"""What a look at a policy found, and the exit status that says how bad it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    ERROR = "error"
    RISK = "risk"


@dataclass(frozen=True, slots=True)
class Finding:
    """`code` names the rule; `field` is where in the resource; `message` says why, and what to do."""

    level: Level
    code: str
    field: str
    message: str


def status(findings: Iterable[Finding]) -> int:
    """Exit status: 0 clean, 1 risks only, 2 invalid."""
    levels = {finding.level for finding in findings}
    return 2 if Level.ERROR in levels else 1 if levels else 0


def error(code: str, field: str, message: str) -> Finding:
    return Finding(Level.ERROR, code, field, message)


def risk(code: str, field: str, message: str) -> Finding:
    return Finding(Level.RISK, code, field, message)

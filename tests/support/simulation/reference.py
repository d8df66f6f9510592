"""The undisturbed run that a scenario is compared with: nothing but its last edit."""

from __future__ import annotations

from functools import cache

from .end_state import EndState
from .scenario import Edit, Scenario
from .simulation import run

SECONDS = 30.0  # in which even a rolling update has come to its end


def expected_end(final: Edit) -> EndState:
    """Where everything must be after this edit, whatever happened before it."""
    return _expected(_Hashed(final))


class _Hashed:
    """Edits hold lists and objects, so they are told apart by how they are written."""

    def __init__(self, final: Edit) -> None:
        self.final = final

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed) and repr(self.final) == repr(other.final)

    def __hash__(self) -> int:
        return hash(repr(self.final))


@cache
def _expected(final: _Hashed) -> EndState:
    result = run(Scenario(0, (), final.final), calm=SECONDS)
    result.check()
    return result.end

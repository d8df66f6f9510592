"""What happened in one simulation, in order, for people who look for a fault and for tests of determinism."""

from __future__ import annotations

import hashlib
from collections.abc import Callable


class Trace:
    """Lines of `seconds who what`. The first broken invariant is kept; a simulation goes on to its end all the same."""

    def __init__(self, time: Callable[[], float]) -> None:
        self._time = time
        self.lines: list[str] = []
        self.broken: list[str] = []  # "invariant: what was seen"

    def note(self, who: str, what: str) -> None:
        self.lines.append(f"{self._time():9.3f}  {who:<14} {what}")

    def breaks(self, invariant: str, what: str) -> None:
        """An invariant doesn't hold. Said once for each invariant: what follows is most often its echo."""
        if not any(known.startswith(f"{invariant}:") for known in self.broken):
            self.broken.append(f"{invariant}: at {self._time():.3f} s {what}")
            self.note("INVARIANT", f"{invariant}: {what}")

    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()

    def text(self, last: int = 200) -> str:
        cut = len(self.lines) - last
        head = [f"... {cut} earlier lines"] if cut > 0 else []
        return "\n".join(head + self.lines[-last:])

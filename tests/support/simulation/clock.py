"""Simulated time for asyncio: nothing ever waits, time jumps to the next timer.

Product code runs on this loop unchanged. What is due at the same moment runs in the order it was asked for, so a run is
a function of its inputs alone.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

EPOCH = 1_800_000_000.0  # Unix time at which every simulation starts

Result = TypeVar("Result")


class Stuck(Exception):
    """Everything waits for something that can't happen any more."""


class _Jump(selectors.BaseSelector):
    """A selector that moves the clock instead of waiting; no file descriptor is ever ready."""

    def __init__(self) -> None:
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck("nothing is left to happen, and the simulation isn't over")
        # A turn of the loop takes a nanosecond, so that what was due is never still a rounding error away.
        self.now += max(0.0, timeout) + 1e-9
        return []

    # The loop registers its self-pipe, which nobody writes to.
    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, 0, None)

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        raise KeyError(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return {}

    def close(self) -> None:
        pass


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()` is simulated seconds since its start."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)
        self._clock_resolution = 0.0

    def time(self) -> float:
        return self._jump.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """No threads: the work is done at once, so that its end has a place in simulated time."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to whoever awaits it
            done.set_exception(error)
        return done

    def unix(self) -> float:
        """The wall clock of everybody in the simulation."""
        return EPOCH + self._jump.now


def run_simulated(main: Coroutine[Any, Any, Result], loop: SimulatedLoop) -> Result:
    """Runs `main` to its end in no time, and closes the loop. Raises Stuck when it can't end."""
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main)

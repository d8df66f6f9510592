"""Keys to work on: each at most once at a time, later again after a failure, never lost."""

import asyncio
import heapq
import random
from collections.abc import Callable

from .index import Key

FIRST_DELAY, LAST_DELAY = 0.5, 60.0


class WorkQueue:
    """Add keys from anywhere in the loop; workers `take`, work, and say `done`."""

    def __init__(self, clock: Callable[[], float], jitter: Callable[[], float] = random.random) -> None:
        self._clock, self._jitter = clock, jitter
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._busy: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._due)

    def add(self, key: Key, delay: float = 0.0) -> None:
        """Work on `key` after `delay` seconds, or sooner if that is already planned."""
        due = self._clock() + delay
        if due < self._due.get(key, float("inf")):
            self._due[key] = due
            heapq.heappush(self._heap, (due, key))
            self._changed.set()

    async def take(self) -> Key:
        """The next key that is due and that nobody works on."""
        while True:
            self._changed.clear()
            key, wait = self._next()
            if key is not None:
                return key
            try:
                await asyncio.wait_for(self._changed.wait(), wait)
            except TimeoutError:
                continue

    def _next(self) -> tuple[Key | None, float | None]:
        """A key to work on now, or the seconds until one is due (None: when something changes)."""
        held = []
        found, wait = None, None
        while self._heap:
            due, key = self._heap[0]
            if self._due.get(key) != due:  # replaced by a sooner one
                heapq.heappop(self._heap)
            elif (wait := due - self._clock()) > 0:
                break
            else:
                heapq.heappop(self._heap)
                wait = None
                if key in self._busy:
                    held.append((due, key))
                    continue
                found = key
                del self._due[key]
                self._busy.add(key)
                break
        for item in held:
            heapq.heappush(self._heap, item)
        return found, wait

    def done(self, key: Key, *, failed: bool, again: float | None = None) -> None:
        """The worker has finished. After a failure the key comes back with a growing, jittered delay; else after
        `again` seconds, if given."""
        self._busy.discard(key)
        if failed:
            count = self._failures[key] = self._failures.get(key, 0) + 1
            delay = min(LAST_DELAY, FIRST_DELAY * 2.0 ** (count - 1))
            self.add(key, delay * (0.5 + self._jitter()))
        else:
            self._failures.pop(key, None)
            if again is not None:
                self.add(key, again)
        self._changed.set()

"""Work beside the event loop, in few threads, that nobody can take for themselves: a queue for each owner, served in
turn, and one thread that no single owner ever adds to those it has. Lives on one event loop."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kvsteward_engine.errors import QueueFull

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    work: Callable[[], Any]
    result: asyncio.Future[Any]


class Turns:
    """`most` pieces of work may wait. Of their places the last eighth is kept for owners that hold less than that."""

    def __init__(self, threads: int, most: int, name: str) -> None:
        self._threads, self._most, self._reserve = threads, most, most // 8
        self._share = max(1, threads - 1)  # threads that one owner may hold
        self._pool = ThreadPoolExecutor(threads, name)
        self._waiting: OrderedDict[str, deque[_Piece]] = OrderedDict()  # by owner, whose turn is next first
        self._running: Counter[str] = Counter()

    async def run(self, owner: str, work: Callable[[], Result]) -> Result:
        """`work()` when it is its owner's turn. Raises `QueueFull` when too much waits, and what `work` raises."""
        waiting, own = sum(map(len, self._waiting.values())), len(self._waiting.get(owner, ()))
        if waiting >= self._most or (waiting >= self._most - self._reserve and own >= self._reserve):
            raise QueueFull(f"{waiting} long prompts wait to be tokenised, {own} of them yours; try again later")
        piece = _Piece(work, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(owner, deque()).append(piece)
        self._start()
        try:
            result: Result = await piece.result
        except asyncio.CancelledError:
            self._forget(owner, piece)
            raise
        return result

    def close(self) -> None:
        """Ends the threads; waiting work is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        """Give every free thread the work of whoever may have one and waits longest for a turn."""
        while self._running.total() < self._threads:
            owner = next((one for one in self._waiting if self._running[one] < self._share), None)
            if owner is None:
                return
            queue = self._waiting.pop(owner)
            piece = queue.popleft()
            if queue:
                self._waiting[owner] = queue  # behind all others
            self._running[owner] += 1
            running = asyncio.get_running_loop().run_in_executor(self._pool, piece.work)
            running.add_done_callback(partial(self._done, owner, piece.result))

    def _done(self, owner: str, result: asyncio.Future[Any], running: asyncio.Future[Any]) -> None:
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        error = None if running.cancelled() else running.exception()
        if running.cancelled():
            result.cancel()
        elif not result.done():  # else its request is gone
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(running.result())
        self._start()

    def _forget(self, owner: str, piece: _Piece) -> None:
        """Nobody waits for this piece any more: if it has not begun it never will, and its text is let go of."""
        queue = self._waiting.get(owner, deque())
        if piece in queue:
            queue.remove(piece)
            if not queue:
                del self._waiting[owner]

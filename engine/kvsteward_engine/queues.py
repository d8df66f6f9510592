"""Waiting requests, one queue a tenant, served by deficit round-robin over the prompt tokens still to compute."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterator

from kvsteward_engine.errors import QueueFull
from kvsteward_engine.request import Request


class Queue:
    """One tenant's requests. At most one of them is in prefill at a time, so that a burst of long prompts does not
    take the pool before anything of it can finish."""

    __slots__ = ("deficit", "in_ring", "name", "prefilling", "running", "visited", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.prefilling: Request | None = None  # admitted, its prompt not wholly computed
        self.running: dict[str, Request] = {}  # admitted, the prefilling one included
        self.deficit = 0  # prompt tokens this queue may still take in its turn
        self.visited = False  # its turn has begun
        self.in_ring = False

    def has_prompts(self) -> bool:
        """Whether prompt tokens wait to be computed."""
        return self.prefilling is not None or bool(self.waiting)

    def load(self) -> int:
        """Pages its running requests hold."""
        return sum(len(request.holding.pages) for request in self.running.values())


class Queues:
    """All queues, and the ring of those with prompt tokens to compute."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._reserve = max_waiting // 8
        self._by_name: dict[str, Queue] = {}
        self.ring: deque[Queue] = deque()
        self.waiting = 0

    def __iter__(self) -> Iterator[Queue]:
        return iter(self._by_name.values())

    def refuse_if_full(self, name: str, arriving: Collection[str]) -> None:
        """Raises `QueueFull` when there is no place for one more of queue `name`; `arriving` names the queues of those
        that are on their way here. The last eighth of the places is kept for queues that hold less than that, so that
        a burst can't shut the others out."""
        waiting = len(arriving) + self.waiting
        if waiting >= self._max_waiting:
            raise QueueFull(f"{waiting} requests are waiting, the most that may; try again later")
        if waiting < self._max_waiting - self._reserve:
            return
        queue = self._by_name.get(name)
        own = sum(1 for each in arriving if each == name) + (len(queue.waiting) if queue else 0)
        if own >= self._reserve:
            raise QueueFull(f"{own} of this client's requests are waiting already; try again later")

    def add(self, request: Request, front: bool = False) -> None:
        """Queue a request; at the front if it was preempted."""
        queue = self._by_name.get(request.queue)
        if queue is None:
            queue = self._by_name[request.queue] = Queue(request.queue)
        queue.waiting[request.id] = request
        if front:
            queue.waiting.move_to_end(request.id, last=False)
        self.waiting += 1
        if not queue.in_ring:
            queue.in_ring = True
            self.ring.append(queue)

    def of(self, request: Request) -> Queue:
        """The request's queue; it exists while any of its requests does."""
        return self._by_name[request.queue]

    def start(self, request: Request) -> None:
        """A waiting request was admitted."""
        queue = self._by_name[request.queue]
        del queue.waiting[request.id]
        self.waiting -= 1
        queue.running[request.id] = request
        queue.prefilling = request

    def leave(self, request: Request) -> None:
        """A request is gone, or about to be queued again: wherever it was."""
        queue = self._by_name[request.queue]
        if queue.waiting.pop(request.id, None) is not None:
            self.waiting -= 1
        queue.running.pop(request.id, None)
        if queue.prefilling is request:
            queue.prefilling = None
        if not queue.running and not queue.waiting and not queue.in_ring:
            del self._by_name[request.queue]

    def end_turn(self, keep_deficit: bool) -> None:
        """The queue at the head of the ring has had its turn: the next one's. A queue without prompts leaves the ring;
        it does not save up for later."""
        queue = self.ring.popleft()
        queue.visited = False
        if queue.has_prompts():
            if not keep_deficit:
                queue.deficit = 0
            self.ring.append(queue)
            return
        queue.deficit = 0
        queue.in_ring = False
        if not queue.running:
            del self._by_name[queue.name]

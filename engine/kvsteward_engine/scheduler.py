"""What the next step computes: every decode first, then prompt tokens, fairly over the queues, up to the step's budget.

Knows requests, queues and a `Residency` that gives and takes pages; nothing of torch, of keys or of time but `now`.
When pages run out, cached pages go first (the block manager sees to that), then running requests are preempted and
queued again, to be recomputed. A request whose last page could never fit is refused before it gets here.
"""

from __future__ import annotations

from kvsteward_engine.errors import BrokenInvariant
from kvsteward_engine.queues import Queue, Queues
from kvsteward_engine.request import Request
from kvsteward_engine.residency import Residency
from kvsteward_engine.sequence import State, Work
from kvsteward_engine.settings import EngineSettings

OVERTAKES = 16  # admissions that may pass a request that waits for room, before the door is kept for it
REGROW_STEPS = 64  # steps without trouble after which shrunk steps may be twice as large again
SPARED_AFTER = 3  # preemptions after which others are chosen first


class Scheduler:
    """All calls come from one thread, under the engine's lock."""

    def __init__(self, settings: EngineSettings, residency: Residency) -> None:
        self._settings = settings
        self._residency = residency
        self.queues = Queues(settings.max_waiting)
        self.running: dict[str, Request] = {}  # admitted, oldest admission first
        self._decoding: dict[str, Request] = {}  # running with the prompt computed
        self._starved: Queue | None = None  # the queue whose head found no room first
        self._overtaken = 0
        self.preemptions = 0
        # What a step may be; less for a while after the device ran out of memory.
        self._budget = settings.prefill_chunk
        self._places = settings.max_concurrent
        self._quiet_steps = 0

    def submit(self, request: Request) -> None:
        """Queue a new request."""
        self.queues.add(request)

    def plan(self, now: float) -> dict[Request, Work]:
        """The next step's work by request, pages included. Empty: nothing can run, because nothing is there."""
        works: dict[Request, Work] = {}
        self._plan_decodes(works, now)
        self._plan_prompts(works, now)
        return works

    def prompt_computed(self, request: Request) -> None:
        """The request's first token was sampled: it decodes from now on."""
        self._decoding[request.id] = request

    def decodes(self, request: Request) -> bool:
        """Whether the request's prompt is computed."""
        return request.id in self._decoding

    def remove(self, request: Request, now: float) -> None:
        """A request has ended, wherever it was; its pages go back."""
        self._decoding.pop(request.id, None)
        self.running.pop(request.id, None)
        self.queues.leave(request)
        self._residency.release(request, now)

    def preempt(self, request: Request, now: float) -> None:
        """Take a running request's pages and queue it first of its tenant; its tokens stay, and are computed again."""
        self.remove(request, now)
        request.sequence.state = State.WAITING
        request.preemptions += 1
        self.preemptions += 1
        self.queues.add(request, front=True)

    def shrink_steps(self) -> bool:
        """Halve the tokens of a step for the time being; False if it is a page already."""
        smallest = self._settings.block_tokens
        if self._budget <= smallest:
            return False
        self._budget = max(self._budget // 2, smallest)
        self._quiet_steps = 0
        return True

    def shrink_places(self, running: int) -> None:
        """Let no more than so many requests run for the time being."""
        self._places = max(1, min(running, self._places))
        self._quiet_steps = 0

    def step_succeeded(self) -> None:
        """Let steps grow again, slowly, once they were shrunk."""
        whole = self._settings
        if self._budget == whole.prefill_chunk and self._places == whole.max_concurrent:
            return
        self._quiet_steps += 1
        if self._quiet_steps >= REGROW_STEPS:
            self._quiet_steps = 0
            self._budget = min(self._budget * 2, whole.prefill_chunk)
            self._places = min(self._places * 2, whole.max_concurrent)

    def victim(self) -> Request:
        """The request to preempt: the youngest of the tenant that holds most pages; those preempted often come last."""
        candidates = [
            ((request.preemptions >= SPARED_AFTER, -load, -request.sequence.arrival), request)
            for queue in self.queues
            for load in (queue.load(),)
            for request in queue.running.values()
        ]
        if not candidates:
            raise BrokenInvariant("there is nothing to preempt")
        return min(candidates, key=lambda candidate: candidate[0])[1]

    # ---- decodes

    def _plan_decodes(self, works: dict[Request, Work], now: float) -> None:
        size = self._settings.block_tokens
        for request in list(self._decoding.values()):
            sequence = request.sequence
            if sequence.state is not State.RUNNING:
                continue  # preempted for another request of this loop
            if sequence.computed // size >= len(sequence.pages) and not self._find_room(request, works, now):
                continue
            works[request] = Work(sequence, sequence.computed, 1, True)
            request.planned = sequence.computed + 1

    def _find_room(self, request: Request, works: dict[Request, Work], now: float) -> bool:
        """Grow by a page, at the cost of other requests if need be; False if the request itself was preempted."""
        while not self._residency.grow(request, now):
            if len(self.running) == 1:
                raise BrokenInvariant(f"request {request.id} has the pool for itself and can't grow")
            victim = self.victim()
            works.pop(victim, None)
            self.preempt(victim, now)
            if victim is request:
                return False
        return True

    # ---- prompts

    def _plan_prompts(self, works: dict[Request, Work], now: float) -> None:
        """Deficit round-robin: each queue in turn may take a quantum of prompt tokens; a turn cut short by the end of
        the budget goes on in the next step."""
        ring = self.queues.ring
        budget = max(self._budget - len(works), self._settings.block_tokens)
        fruitless = 0  # turns in a row in which nothing could start
        while ring and fruitless < len(ring):
            queue = ring[0]
            if not queue.visited:
                queue.visited = True
                queue.deficit += self._settings.quantum
            served, blocked = self._serve(queue, budget, works, now)
            budget -= served
            fruitless = fruitless + 1 if blocked else 0
            spent = budget < self._settings.block_tokens
            if spent and not blocked and queue.has_prompts() and queue.deficit >= self._settings.block_tokens:
                return
            self.queues.end_turn(keep_deficit=not blocked)
            if spent:
                return

    def _serve(self, queue: Queue, budget: int, works: dict[Request, Work], now: float) -> tuple[int, bool]:
        """Prompt tokens planned for this queue's turn, and whether it ended because its next request can't start."""
        served = 0
        while queue.has_prompts():
            request = queue.prefilling
            if request is None:
                if min(budget - served, queue.deficit) < self._settings.block_tokens:
                    break
                request = self._start_next(queue, now)
                if request is None:
                    return served, True
            count = self._chunk(request, min(budget - served, queue.deficit))
            if count == 0:
                break
            sequence = request.sequence
            request.planned += count
            done = request.planned == len(sequence.tokens)
            works[request] = Work(sequence, sequence.computed, request.planned - sequence.computed, done)
            if done:
                queue.prefilling = None
            queue.deficit -= count
            served += count
        return served, False

    def _chunk(self, request: Request, allowed: int) -> int:
        """Tokens of the prompt to compute next: all that is left, or a part that ends with a page."""
        left = len(request.sequence.tokens) - request.planned
        if left <= allowed:
            return left
        size = self._settings.block_tokens
        return max(0, (request.planned + allowed) // size * size - request.planned)

    def _start_next(self, queue: Queue, now: float) -> Request | None:
        """Admit the first waiting request of a queue, unless places, its tenant's limit or pages forbid it."""
        request = next(iter(queue.waiting.values()))
        if len(self.running) >= self._places:
            return None
        limit = self._residency.max_in_flight(request.sequence.directive)
        if limit and len(queue.running) >= limit:
            if self._starved is queue:
                self._starved = None  # it waits for its own requests, not for room
            return None
        starved = self._starved
        if starved is not None and starved is not queue and starved.waiting and self._overtaken >= OVERTAKES:
            return None
        if not self._residency.admit(request, now, spare=len(self.running)):
            if starved is None or not starved.waiting:
                self._starved, self._overtaken = queue, 0
            return None
        if starved is queue:
            self._starved = None
        self._overtaken += 1
        request.sequence.state = State.RUNNING
        self.running[request.id] = request
        self.queues.start(request)
        return request

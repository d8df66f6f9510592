"""An engine without a model, for tests and simulations: everything is real but the runner.

The runner keeps "keys and values" in pages and works on nothing else: the entry of a position is a digest of the entry
before it, read back through the sequence's pages, and of the position's token; the next token is a digest of all
entries so read. A page that is wrong, stale, incomplete or overwritten therefore yields wrong tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Ordered

from kvsteward_contract.directive import Directive, EnginePolicy, Mode, Retention
from kvsteward_contract.identity import Identity
from kvsteward_engine.audit import faults
from kvsteward_engine.core import Delta, Engine, EngineSettings
from kvsteward_engine.sequence import Sampled, SamplingParams, Step

VOCAB = 997
BLOCK = 4
IDENTITY = Identity("model-1", "tokenizer-1", "", "FP32/4/test", b"")
START = b"\0" * 8


def _entry(before: bytes, token: int) -> bytes:
    return hashlib.blake2b(before + token.to_bytes(4, "little"), digest_size=8).digest()


def _token(entries: Ordered[bytes]) -> int:
    return int.from_bytes(hashlib.blake2b(b"".join(entries), digest_size=8).digest(), "little") % VOCAB


def cold_tokens(prompt: Ordered[int], count: int) -> list[int]:
    """What the runner must produce for a prompt, computed without pages."""
    entries: list[bytes] = []
    tokens: list[int] = []
    for token in prompt:
        entries.append(_entry(entries[-1] if entries else START, token))
    for _ in range(count):
        tokens.append(_token(entries))
        entries.append(_entry(entries[-1], tokens[-1]))
    return tokens


class FakeRunner:
    """`faults` are exceptions to raise, one a step (None: the step goes well); `crossings` names the sequences that
    read a page written under another scope."""

    vocab_size = VOCAB
    bytes_per_token = 8
    max_positions = 1 << 20

    def __init__(self, pages: int, block_tokens: int = BLOCK) -> None:
        self.block_tokens = block_tokens
        self.pages: list[list[bytes]] = [[b"never"] * block_tokens for _ in range(pages)]
        self.faults: list[BaseException | None] = []
        self.owners = [""] * pages
        self.crossings: list[str] = []
        self.steps: list[list[tuple[str, int, int]]] = []

    def run(self, step: Step) -> list[Sampled]:
        """See `kvsteward_engine.engine.Runner`."""
        self.steps.append([(work.sequence.id, work.start, work.count) for work in step.works])
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None:
            raise fault
        size = self.block_tokens
        sampled = []
        for work in step.works:
            pages = work.sequence.pages
            scope = work.sequence.directive.scope if work.sequence.directive else ""
            for page in pages[work.start // size : (work.start + work.count - 1) // size + 1]:
                self.owners[page] = scope
            if any(self.owners[page] != scope for page in pages[: work.start // size]):
                self.crossings.append(work.sequence.id)
            for position in range(work.start, work.start + work.count):
                before = self.pages[pages[(position - 1) // size]][(position - 1) % size] if position else START
                entry = _entry(before, work.sequence.tokens[position])
                self.pages[pages[position // size]][position % size] = entry
            if work.sample:
                end = work.start + work.count
                entries = [self.pages[pages[place // size]][place % size] for place in range(end)]
                sampled.append(Sampled(_token(entries), -0.5, [(0, -0.5)]))
        return sampled


class FakeClock:
    """Seconds that go on only when told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def wall(self) -> float:
        """Unix seconds of the same moment."""
        return self.now + 1.7e9


def settings(pages: int = 32, **changes: object) -> EngineSettings:
    """Small limits, so that every pressure is a few requests away."""
    given: dict[str, object] = {
        "pages": pages,
        "block_tokens": BLOCK,
        "max_tokens": 256,
        "identity": IDENTITY,
        "max_concurrent": 8,
        "max_waiting": 64,
        "prefill_chunk": 16,
    }
    return EngineSettings(**(given | changes))  # type: ignore[arg-type]


class FakeEngine(Engine):
    """An engine on a fake runner and clock, and what tests ask of it."""

    def __init__(self, pages: int = 32, **changes: object) -> None:
        self.clock = FakeClock()
        self.runner = FakeRunner(pages)
        counter = iter(range(1, 1 << 30))
        super().__init__(
            self.runner, settings(pages, **changes), self.clock, self.clock.wall, lambda _bits: next(counter)
        )
        self.results: dict[str, list[int]] = {}
        self.endings: dict[str, Delta] = {}

    def permit(self, epoch: int = 1, violations: int = 0, **retention: Retention) -> None:
        """Set a policy with a class `private`, or the classes given."""
        table = retention or {"private": Retention()}
        self.set_policy(EnginePolicy(epoch, f"v{epoch}", table, "ab" * 32, violations))

    def go(self, steps: int = 1) -> None:
        """Step so many times."""
        for _ in range(steps):
            for delta in self.step():
                self.results.setdefault(delta.request_id, []).extend(delta.token_ids)
                if delta.finish is not None:
                    self.endings[delta.request_id] = delta

    def finish_all(self, limit: int = 10_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            if not self.has_work():
                return
            self.go()
        raise AssertionError("the engine does not come to an end")

    def complete(self, name: str, prompt: list[int], count: int = 4, directive: Directive | None = None) -> list[int]:
        """Run one request to its end, beside whatever else is there; its tokens."""
        self.submit(name, prompt, SamplingParams(max_tokens=count), directive)
        for _ in range(10_000):
            self.go()
            if name in self.endings:
                return self.results[name]
        raise AssertionError(f"{name} does not come to an end")

    def faults(self) -> list[str]:
        """What `audit` has against the real pool and the shadow index."""
        requests = list(self._requests.values())
        real = faults(self.residency.pages, [request.holding for request in requests])
        shadow = faults(self.residency.shadow.pages, [request.shadow for request in requests])
        return real + [f"shadow: {fault}" for fault in shadow]


def salt_of(tenant: str) -> str:
    """A tenant's salt, hex."""
    return hashlib.sha256(tenant.encode()).hexdigest()


def directive(
    tenant: str = "a", mode: Mode = Mode.REUSE, epoch: int = 1, retention: str = "private", request: int = 0
) -> Directive:
    """A tenant's directive."""
    return Directive(
        request=f"{request:032x}",
        mode=mode,
        epoch=epoch,
        namespace=salt_of(tenant),
        scope=f"Private/{tenant}",
        retention=retention,
        version="v1",
        queue=tenant,
    )


def prompt_of(seed: int, length: int) -> list[int]:
    """A prompt of its own for each seed."""
    return [(seed * 7919 + place * 104729 + seed * place * 13) % VOCAB for place in range(length)]

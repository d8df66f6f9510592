"""A runner that computes nothing: it says a given text, token by token, so that a real engine can be driven without
torch; it can be held still, and made to fail."""

import threading
from collections.abc import Sequence as Tokens

from kvsteward_engine.sequence import Sampled, Step


class ScriptedRunner:
    """Every request is answered with `script`, then with its last token for ever. Tokens' log probabilities are
    minus a tenth of their place in the answer."""

    def __init__(self, script: Tokens[int], vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.script = list(script)
        self.steps: list[list[str]] = []  # ids of the requests of each step
        self.failure: Exception | None = None
        self._allowed = threading.Semaphore(0)
        self._free = threading.Event()
        self._free.set()
        self.waiting = threading.Event()  # a step has come to a hold

    def hold(self) -> None:
        """From now on each step waits for `allow`."""
        self._free.clear()

    def allow(self, steps: int = 1) -> None:
        """Let this many held steps pass."""
        for _ in range(steps):
            self._allowed.release()

    def release(self) -> None:
        """No more holding."""
        self._free.set()
        self._allowed.release()

    def run(self, step: Step) -> list[Sampled]:
        self.steps.append([work.sequence.id for work in step.works])
        if not self._free.is_set():
            self.waiting.set()
            self._allowed.acquire()
            self.waiting.clear()
        if self.failure is not None:
            raise self.failure
        sampled = []
        for work in step.works:
            if work.sample:
                at = len(work.sequence.tokens) - work.sequence.prompt_len
                token = self.script[min(at, len(self.script) - 1)]
                top = [(token, -at / 10), ((token + 1) % self.vocab_size, -9.0)]
                sampled.append(Sampled(token, -at / 10, top[: work.sequence.sampling.logprobs or 0]))
        return sampled

"""Many pods asked at once, each again until its answer will do, none waited for beyond a deadline."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

AT_ONCE = 32
PAUSE_SECONDS = 0.05  # before a pod is asked again


@dataclass(frozen=True, slots=True)
class Answer:
    """What a pod's admin port said: `body` is JSON, None with a `problem`."""

    pod: str
    body: Any = None
    problem: str = ""


def gather(
    pods: Sequence[str],
    ask: Callable[[str], Answer],
    seconds: float,
    enough: Callable[[Answer], bool] = lambda _: True,
) -> list[Answer]:
    """The last answer of each pod, in the order of `pods`, as soon as each is `enough` and after `seconds` anyway."""
    deadline = time.monotonic() + seconds
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    answers: dict[str, Answer] = {}
    missing = set(pods)
    changed = threading.Condition()

    def work() -> None:
        while time.monotonic() < deadline:
            try:
                pod = waiting.get(timeout=0.1)
            except queue.Empty:
                if not missing:
                    return
                continue
            answer = ask(pod)
            with changed:
                answers[pod] = answer
                if enough(answer):
                    missing.discard(pod)
                    changed.notify()
                    continue
            time.sleep(PAUSE_SECONDS)
            waiting.put(pod)

    for pod in pods:
        waiting.put(pod)
    # Daemons: one that hangs in a connection must not keep the command from ending.
    for number in range(min(AT_ONCE, len(pods))):
        threading.Thread(target=work, name=f"ask-{number}", daemon=True).start()
    with changed:
        changed.wait_for(lambda: not missing, timeout=seconds)
        return [answers.get(pod) or Answer(pod, problem="does not answer") for pod in pods]

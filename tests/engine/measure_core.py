"""What scheduling and pages cost beside a model: `python tests/engine/measure_core.py` prints one JSON line.

The runner computes nothing, so a step's time is the scheduler's, the block manager's, the shadow index's and the
postprocessing's. Times are of the process, so that a busy machine does not blur them.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvsteward_contract.directive import EnginePolicy, Mode, Retention
from kvsteward_engine.block_manager import BlockManager, Holding
from kvsteward_engine.core import Engine
from kvsteward_engine.eviction import LRU
from kvsteward_engine.keychain import KeyChain
from kvsteward_engine.sequence import Sampled, SamplingParams, Step
from support.fake_engine import directive, settings

SIZE = 16
TOKEN = Sampled(7)


class Idle:
    """A runner that computes nothing."""

    vocab_size = 50_000

    def run(self, step: Step) -> list[Sampled]:
        """The same token for everyone."""
        return [TOKEN for work in step.works if work.sample]


def step_cost(mode: Mode, running: int = 64) -> float:
    """Microseconds a step with `running` decodes, median of many."""
    limits = settings(
        100_000, block_tokens=SIZE, max_tokens=20_000, max_concurrent=running, max_waiting=512, prefill_chunk=4096
    )
    engine = Engine(Idle(), limits)
    engine.set_policy(EnginePolicy(1, "v1", {"private": Retention()}))
    for number in range(running):
        prompt = [number % 8, *range(511)]
        engine.submit(str(number), prompt, SamplingParams(max_tokens=5000), directive(str(number % 4), mode))
    while engine.scheduler.queues.waiting or not engine.scheduler.running or len(engine.step()) < running:
        engine.step()
    samples = []
    for _ in range(2000):
        started = time.process_time()
        engine.step()
        samples.append(time.process_time() - started)
    return sum(samples) / len(samples) * 1e6


def page_rates(pages: int, chains: int = 20_000) -> dict[str, float]:
    """Pages a second through look-up, taking, publishing, giving back and, the pool being full, evicting."""
    pool = BlockManager(pages, SIZE, LRU(), min(1 << 18, max(1024, pages)), 300.0)
    pool.set_retention({"private": Retention(max_age_seconds=3600)})
    length = 8
    fresh = iter(range(1 << 40))

    def keys() -> KeyChain:
        chain = KeyChain(b"", b"", SIZE)
        chain.keys = [next(fresh).to_bytes(32, "big") for _ in range(length)]
        chain.contents = [key[::-1] for key in chain.keys]
        return chain

    def use(chain: KeyChain, scope: str, now: float) -> None:
        holding = Holding([])
        match = pool.lookup(chain, scope, "private", length, now)
        pool.acquire(holding, match, length, now)
        for place in range(holding.published, length):
            pool.publish(holding, chain.keys[place], chain.contents[place], scope, "private", "v1", now)
        pool.release(holding, now)

    resident = [keys() for _ in range(pages // length + 1)]
    for number, chain in enumerate(resident):
        use(chain, f"Private/{number % 100}", number * 1e-6)
    evicting = [keys() for _ in range(chains)]
    gc.collect()
    gc.disable()
    started = time.process_time()
    for number, chain in enumerate(evicting):
        use(chain, f"Private/{number % 100}", 10.0)
    miss = time.process_time() - started
    hot = random.Random(1).choices(evicting[-60:], k=chains)  # as many in either pool: the pool's size alone differs
    scope_of = {id(chain): f"Private/{number % 100}" for number, chain in enumerate(evicting)}
    started = time.process_time()
    for chain in hot:
        use(chain, scope_of[id(chain)], 11.0)
    hit = time.process_time() - started
    gc.enable()
    return {
        "newPagesPerSecond": round(chains * length / miss),
        "reusedPagesPerSecond": round(chains * length / hit),
    }


def hashing_rate(tokens: int = 1_000_000) -> float:
    """Prompt tokens a second through both key chains, in prompts of 1,024."""
    prompt = list(range(1024))
    started = time.process_time()
    for _ in range(tokens // 1024):
        KeyChain(b"r" * 32, b"c" * 32, SIZE).extend(prompt, 1024 // SIZE)
    return tokens / (time.process_time() - started)


def admission_cost(prompt_tokens: int = 1024) -> float:
    """Microseconds to take in, match, schedule and finish one request whose prompt is resident, one token of answer."""
    limits = settings(100_000, block_tokens=SIZE, max_tokens=20_000, prefill_chunk=4096)
    engine = Engine(Idle(), limits)
    engine.set_policy(EnginePolicy(1, "v1", {"private": Retention()}))
    prompt = list(range(prompt_tokens))
    samples = []
    for number in range(300):
        started = time.process_time()
        engine.submit(str(number), prompt, SamplingParams(max_tokens=1), directive())
        engine.step()
        samples.append(time.process_time() - started)
    return sorted(samples)[150] * 1e6


if __name__ == "__main__":
    small, large = page_rates(1_000), page_rates(1_000_000)
    print(
        json.dumps(
            {
                "stepMicrosecondsAt64": {mode.value: round(step_cost(mode)) for mode in Mode},
                "admissionMicrosecondsAt1024Tokens": round(admission_cost()),
                "pool1000": small,
                "pool1000000": large,
                "hashedTokensPerSecond": round(hashing_rate()),
            }
        )
    )

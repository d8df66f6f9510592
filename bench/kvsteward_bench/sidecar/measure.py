"""The measurements. Each sends the same load to one target and returns plain numbers."""

import asyncio
import itertools
import time
from dataclasses import dataclass

from .fake_engine import LOCKSTEP, FakeEngine
from .generator import Client, connect, request
from .targets import KEY, Target

CHUNKS = 64
SMALL, LARGE = 4_096, 200_000  # bytes of a prompt
EVENTS = CHUNKS + 1  # with [DONE]


class Wrong(Exception):
    """An answer was not what was asked for: no figure of this run counts."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds."""

    p50: float
    p95: float
    p99: float

    @staticmethod
    def of(seconds: list[float]) -> "Spread":
        ordered = sorted(seconds)

        def at(share: float) -> float:
            return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3

        return Spread(at(0.50), at(0.95), at(0.99))


def _ask(target: Target, prompt_bytes: int, *, stream: bool = True, first_us: int = 0, gap_us: int = 0) -> bytes:
    return request(
        f"127.0.0.1:{target.port}",
        prompt_bytes=prompt_bytes,
        stream=stream,
        chunks=CHUNKS,
        first_us=first_us,
        gap_us=gap_us,
        key=KEY,
    )


async def _clients(target: Target, count: int) -> list[Client]:
    return [await connect(target.port) for _ in range(count)]


def _close(clients: list[Client]) -> None:
    for client in clients:
        client.leave(politely=False)


def _whole(client: Client) -> None:
    if client.events != EVENTS:
        raise Wrong(f"a stream had {client.events} events, not {EVENTS}: chunks were lost, or the outcome leaked")


async def first_token(target: Target, prompt_bytes: int, streams: int, rounds: int) -> list[float]:
    """Seconds to the first data event, `streams` at once, each asking `rounds` times; the first two are warm-up."""
    clients = await _clients(target, streams)
    seconds: list[float] = []

    async def one(client: Client, number: int) -> None:
        data = _ask(target, prompt_bytes, gap_us=2_000)
        await asyncio.sleep(number * 0.13 / streams)  # apart from each other, as real clients are
        for turn in range(rounds):
            taken = await client.ask(data, True)
            _whole(client)
            if turn >= 2:
                seconds.append(taken)

    try:
        await asyncio.gather(*(one(client, number) for number, client in enumerate(clients)))
    finally:
        _close(clients)
    return seconds


async def lockstep_cost(target: Target, engine: FakeEngine, seconds: float) -> float:
    """CPU microseconds of the proxy for each chunk when every chunk travels alone: the next is sent when the client
    has the one before. The requests they belong to are included, one for CHUNKS."""
    client = await connect(target.port, engine.advance)
    data = _ask(target, SMALL, gap_us=LOCKSTEP)
    await client.ask(data, True)
    spent, until, chunks = target.cpu_seconds(), time.perf_counter() + seconds, 0
    try:
        while time.perf_counter() < until:
            await client.ask(data, True)
            _whole(client)
            chunks += CHUNKS
    finally:
        _close([client])
    return (target.cpu_seconds() - spent) / chunks * 1e6


async def chunk_cost(target: Target, streams: int, seconds: float, gap_us: int = 1_000) -> float:
    """CPU microseconds of the proxy for each chunk of `streams` at once, their requests included."""
    clients = await _clients(target, streams)
    data = _ask(target, SMALL, gap_us=gap_us)
    for client in clients:
        await client.ask(data, True)
    spent, until, chunks = target.cpu_seconds(), time.perf_counter() + seconds, 0

    async def one(client: Client) -> int:
        count = 0
        while time.perf_counter() < until:
            await client.ask(data, True)
            _whole(client)
            count += CHUNKS
        return count

    try:
        chunks = sum(await asyncio.gather(*(one(client) for client in clients)))
    finally:
        _close(clients)
    return (target.cpu_seconds() - spent) / chunks * 1e6


async def requests_a_core(target: Target, connections: int, seconds: float) -> tuple[float, float]:
    """(requests for each CPU second of the proxy, requests a second), answers that aren't streamed."""
    clients = await _clients(target, connections)
    data = _ask(target, SMALL, stream=False)
    for client in clients:
        await client.ask(data, False)
    spent, begun = target.cpu_seconds(), time.perf_counter()
    until = begun + seconds

    async def one(client: Client) -> int:
        count = 0
        while time.perf_counter() < until:
            await client.ask(data, False)
            count += 1
        return count

    try:
        count = sum(await asyncio.gather(*(one(client) for client in clients)))
    finally:
        _close(clients)
    return count / (target.cpu_seconds() - spent), count / (time.perf_counter() - begun)


async def cancels(target: Target, engine: FakeEngine, tries: int, prefill: bool) -> list[float]:
    """Seconds from a client's leaving to the engine's noticing; before the first token, or in the stream's middle."""
    taken = []
    for turn in range(tries):
        (client,) = await _clients(target, 1)
        arrived, left = engine.arrived, len(engine.left)
        first = 10_000_000 if prefill else 0
        client.start(_ask(target, SMALL, first_us=first, gap_us=10_000), True)
        for _ in range(5_000):
            if engine.arrived > arrived and (prefill or client.first):
                break
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        if client.transport is None:
            raise Wrong("the stream ended before its client could leave")
        gone = client.leave(politely=turn % 2 == 0)
        for _ in range(5_000):
            if len(engine.left) > left:
                break
            await asyncio.sleep(0.001)
        else:
            raise Wrong(f"{target.name} did not tell the engine within 5 s that a client had left")
        taken.append(engine.left[-1] - gone)
    return taken


async def memory(target: Target, streams: int) -> int:
    """Peak resident bytes of the proxy once it has carried `streams` long prompts at the same time."""
    clients = await _clients(target, streams)
    data = _ask(target, LARGE, first_us=3_000_000, gap_us=20_000)
    try:
        for client in clients:
            client.start(data, True)
        for client in clients:
            await client.finished()
            _whole(client)
    finally:
        _close(clients)
    return target.peak_bytes()


def added(through: list[float], direct: list[float]) -> Spread:
    """Percentile by percentile: what the proxy's distribution has over the direct one's. Milliseconds."""
    one, other = Spread.of(through), Spread.of(direct)
    return Spread(one.p50 - other.p50, one.p95 - other.p95, one.p99 - other.p99)


def pick(runs: list[float]) -> float:
    """The median of repeated runs, so that one disturbed by the machine doesn't decide."""
    return sorted(runs)[len(runs) // 2]


def flatten(runs: list[list[float]]) -> list[float]:
    return list(itertools.chain.from_iterable(runs))

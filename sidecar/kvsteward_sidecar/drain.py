"""How a pod goes: first it still serves and asks clients to connect elsewhere, then it takes nothing new.

`Drain` is the state; `POST /drain?seconds=N` on the loopback port (the pod's preStop) and SIGTERM start it. Endpoints
take seconds to forget a pod, so arrivals are served for a while, with `Connection: close`; only then they get 503.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum

import msgspec
from aiohttp import web

CLOSING_SECONDS = 5.0
MAX_DRAIN_SECONDS = 3600


class Phase(str, Enum):
    """What a new request meets; only ever moves down this list."""

    SERVING = "Serving"
    CLOSING = "Closing"  # served, with `Connection: close`; ends after CLOSING_SECONDS
    REFUSING = "Refusing"  # 503 with Retry-After; ends when nothing is in flight, or with the drain's time
    DRAINED = "Drained"  # still 503; whoever waited was answered


class Drain:
    """One drain in a process's life. `in_flight` counts admitted requests; call `settled()` whenever it reaches 0."""

    def __init__(self, in_flight: Callable[[], int], closing_seconds: float = CLOSING_SECONDS) -> None:
        self.phase = Phase.SERVING
        self._in_flight, self._closing_seconds = in_flight, closing_seconds
        self._idle = asyncio.Event()
        self._task: asyncio.Task[int] | None = None

    def settled(self) -> None:
        """Nothing is in flight any more."""
        self._idle.set()

    async def run(self, seconds: float) -> int:
        """Drains within `seconds`; returns how many requests are still in flight. A second call joins the first."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(seconds))
        return await asyncio.shield(self._task)

    async def _run(self, seconds: float) -> int:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        self.phase = Phase.CLOSING
        await asyncio.sleep(min(self._closing_seconds, seconds))
        self.phase = Phase.REFUSING
        while self._in_flight() and (left := deadline - loop.time()) > 0:
            self._idle.clear()
            try:
                await asyncio.wait_for(self._idle.wait(), left)
            except TimeoutError:
                break
        self.phase = Phase.DRAINED
        return self._in_flight()


def drain_app(drain: Drain, in_flight: Callable[[], int], default_seconds: float) -> web.Application:
    """The loopback port. `POST /drain?seconds=N` answers when the drain is over; `GET /drain` says where it is."""

    def state(status: int = 200) -> web.Response:
        body = msgspec.json.encode({"phase": drain.phase.value, "inFlight": in_flight()})
        return web.Response(body=body, content_type="application/json", status=status)

    async def start(request: web.Request) -> web.Response:
        text = request.query.get("seconds", str(default_seconds))
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds <= MAX_DRAIN_SECONDS:
            return web.Response(status=400, text=f"seconds must be 0 to {MAX_DRAIN_SECONDS}, not {text!r}\n")
        await drain.run(seconds)
        return state()

    async def show(_: web.Request) -> web.Response:
        return state()

    app = web.Application()
    app.router.add_post("/drain", start)
    app.router.add_get("/drain", show)
    return app

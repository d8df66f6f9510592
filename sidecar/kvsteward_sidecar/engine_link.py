"""The engine next door, as the control side needs it: its state, its policy, its outcomes, its ledger.

The only control module that speaks to the engine. It keeps pushing the wanted `EnginePolicy` until the engine confirms
it, notices a restarted engine by its `instance`, and says how long ago the engine last answered. It never waits for the
engine before anything else may start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from kvsteward_contract import wire
from kvsteward_contract.directive import EnginePolicy, EngineState, Outcome, decode_outcome, encode

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
POLL_TIMEOUT = 5.0
BUSY_SECONDS = 20.0  # an engine that is slow for this long still counts as ready: it may be starved of CPU
PUSH_TIMEOUT = 30.0  # the engine confirms between two steps; a step can be a long prefill on a CPU
RETRY_SECONDS = 0.2
LIVE_TOLERANCE = 60.0
GONE, SLOW = 0, -1  # in place of a status
OUTCOME_SECONDS = 10.0  # how long a cancelled request's outcome is asked for

_state = msgspec.json.Decoder(EngineState)


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where the engine listens, and the token it wants ("" = none)."""

    url: str  # http://127.0.0.1:8000, without a trailing slash
    token: str

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What the engine last confirmed; compared with what is wanted, it says whether a change is acknowledged."""

    instance: str
    epoch: int
    version: str


class EngineLink:
    """One engine. `engine_epoch(epoch)` is called when it first answers, with `stats` read by then, and when it turns
    out to be ahead."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        address: EngineAddress,
        engine_epoch: Callable[[int], None],
        engine_state: Callable[[EngineState], None],
        *,
        clock: Callable[[], float],
        live_tolerance: float = LIVE_TOLERANCE,
    ) -> None:
        self.session, self.address, self.clock = session, address, clock
        self.state: EngineState | None = None  # None: it doesn't answer, or isn't ready
        self.confirmed: Confirmation | None = None
        self.stats: dict[str, Any] = {}
        self.restarts = 0
        self._engine_epoch, self._engine_state = engine_epoch, engine_state
        self._live_tolerance = live_tolerance
        self._wanted: EnginePolicy | None = None
        self._answered_at = clock()  # any HTTP answer; the start counts, so that a slow start isn't a death
        self._known_instance = ""
        self._pushing: EnginePolicy | None = None
        self._push_now = asyncio.Event()

    @property
    def ready(self) -> bool:
        """The engine has its model loaded and answers."""
        return self.state is not None

    @property
    def live(self) -> bool:
        """False only when the engine itself has not answered for the tolerance."""
        return self.clock() - self._answered_at <= self._live_tolerance

    @property
    def acknowledged(self) -> bool:
        """The engine that runs now has confirmed what is wanted now."""
        wanted, confirmed = self._wanted, self.confirmed
        return (
            wanted is not None
            and confirmed is not None
            and (confirmed.epoch, confirmed.version) == (wanted.epoch, wanted.version)
            and self.state is not None
            and self.state.instance == confirmed.instance
        )

    def want(self, policy: EnginePolicy) -> None:
        """Push this from now on. A push under way is given up: the newest is what matters."""
        self._wanted = policy
        self._push_now.set()

    async def run(self) -> None:
        """Polls and pushes for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._poll_forever())
            group.create_task(self._push_forever())

    async def outcome(self, request: str) -> Outcome | None:
        """What became of a request whose answer was cut; None when the engine can't or won't say in time."""
        deadline = self.clock() + OUTCOME_SECONDS
        wait = 0.02
        while True:
            status, body = await self._get(f"{wire.ENGINE_OUTCOMES_ROUTE}/{request}")
            if status == 200:
                try:
                    return decode_outcome(body)
                except msgspec.DecodeError as error:
                    log.error("the engine's outcome can't be read: %s", error)
                    return None
            if status != 202 or self.clock() > deadline:
                return None
            await asyncio.sleep(wait)
            wait = min(1.0, wait * 2)

    async def ledger(self, query: dict[str, str]) -> tuple[int, bytes]:
        """Status and body of the engine's ledger; status GONE or SLOW when it doesn't answer."""
        return await self._get(wire.ENGINE_LEDGER_ROUTE, query)

    async def refresh_stats(self) -> bool:
        """Fetches /kv/v1/stats; False, and what was fetched before stays, when the engine doesn't answer."""
        status, body = await self._get(wire.ENGINE_STATS_ROUTE, timeout=1.0)
        if status != 200:
            return False
        try:
            self.stats = msgspec.json.decode(body, type=dict[str, Any])
        except msgspec.DecodeError as error:
            log.error("the engine's statistics can't be read: %s", error)
            return False
        return True

    async def _poll_forever(self) -> None:
        while True:
            await self._poll()
            await asyncio.sleep(POLL_SECONDS if self.ready else RETRY_SECONDS)

    async def _poll(self) -> None:
        status, body = await self._get(wire.ENGINE_POLICY_ROUTE, timeout=POLL_TIMEOUT)
        if status == SLOW and self.clock() - self._answered_at < BUSY_SECONDS:
            return
        state = self._decode(body) if status == 200 else None
        if state is None and self.ready:
            log.warning("the engine stopped answering: requests get 503 until it is back")
        self._take(state)

    def _take(self, state: EngineState | None) -> None:
        """What follows from the engine's word about itself, whoever asked for it."""
        self.state = state
        if state is None:
            return
        self._engine_state(state)
        if state.instance != self._known_instance:
            if not self._known_instance:
                log.info("engine %s answers: %s, epoch %d", state.instance, state.build, state.epoch)
                self._known_instance = state.instance
                self._engine_epoch(state.epoch)
            else:
                log.warning("the engine restarted: its cache is empty, and it is cold until told otherwise")
                self._known_instance = state.instance
                self.restarts += 1
        wanted = self._wanted
        if wanted is not None and (state.epoch, state.version) != (wanted.epoch, wanted.version):
            self._push_now.set()

    async def _push_forever(self) -> None:
        push: asyncio.Task[None] | None = None
        while True:
            await self._push_now.wait()
            self._push_now.clear()
            if push is not None and not push.done():
                if self._pushing is self._wanted:
                    continue  # the poll saw that it has not arrived yet: it is on its way
                push.cancel()
            if self._wanted is not None:
                self._pushing = self._wanted
                push = asyncio.create_task(self._push(self._wanted))

    async def _push(self, policy: EnginePolicy) -> None:
        """Until the engine confirms; a newer wish or an engine that isn't there ends it (the poll starts it again)."""
        try:
            async with self.session.post(
                self.address.url + wire.ENGINE_POLICY_ROUTE,
                data=encode(policy),
                headers={"Content-Type": "application/json", **self.address.headers()},
                timeout=aiohttp.ClientTimeout(total=PUSH_TIMEOUT),
            ) as answer:
                body = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.warning("the policy has not reached the engine: %s", error or type(error).__name__)
            return
        self._answered_at = self.clock()
        state = self._decode(body) if answer.status in (200, 409) else None
        if state is None:
            text = body[:300].decode("utf-8", "replace")
            log.warning("the engine did not take the policy: %d %s", answer.status, text)
        elif answer.status == 409:
            log.warning("the engine is at epoch %d, ahead of %d: going past it", state.epoch, policy.epoch)
            self._engine_epoch(state.epoch)
        else:
            self.confirmed = Confirmation(state.instance, state.epoch, state.version)
            log.info("the engine confirmed epoch %d, policy %s", state.epoch, state.version or "none")
            self._take(state)

    def _decode(self, body: bytes) -> EngineState | None:
        try:
            return _state.decode(body)
        except msgspec.DecodeError as error:
            log.error("the engine's state can't be read: %s", error)
            return None

    async def _get(self, path: str, query: dict[str, str] | None = None, timeout: float = 10.0) -> tuple[int, bytes]:
        """Status and body; status GONE when nobody is there, SLOW when nobody answered in time."""
        try:
            async with self.session.get(
                self.address.url + path,
                params=query,
                headers=self.address.headers(),
                timeout=aiohttp.ClientTimeout(total=timeout),
            ) as answer:
                body = await answer.read()
        except TimeoutError:
            return SLOW, b""
        except (aiohttp.ClientError, OSError):
            return GONE, b""
        self._answered_at = self.clock()
        return answer.status, body

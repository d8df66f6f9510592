"""The pods' sidecars: the one module that asks them. Observations come over the admin port, with the policy's token."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Self

import aiohttp
import msgspec
from kvsteward_contract import wire
from kvsteward_contract.identity import admin_token
from kvsteward_contract.observation import decode_observation

from .decide import Scrape
from .index import Key
from .telemetry import Telemetry
from .world import Pod, Report

TIMEOUT = aiohttp.ClientTimeout(total=2.0)
FIRST_SECONDS = 0.2  # a changed document takes about this long to be confirmed
AT_ONCE = 32
LONGEST = 1 << 20  # bytes of an observation


class SidecarScraper:
    """Follows the pods of each policy and says `news(key)` when something of consequence has changed."""

    def __init__(
        self,
        operator_key: bytes,
        uid_of: Callable[[Key], str],
        news: Callable[[Key], None],
        telemetry: Telemetry,
        port: int = wire.ADMIN_PORT,
    ) -> None:
        self._operator_key, self._uid_of, self._news, self._telemetry = operator_key, uid_of, news, telemetry
        self._port = port
        self._scrapes: dict[Key, Scrape] = {}
        self._reports: dict[Key, dict[str, Report]] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._faster: dict[Key, asyncio.Event] = {}
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=TIMEOUT, trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def reports(self, key: Key) -> Mapping[str, Report]:
        return dict(self._reports.get(key, {}))

    def follow(self, key: Key, scrape: Scrape) -> None:
        before = self._scrapes.get(key)
        self._scrapes[key] = scrape
        if not scrape.pods:
            if (task := self._tasks.pop(key, None)) is not None:
                task.cancel()
            for known in (self._scrapes, self._reports, self._faster):
                known.pop(key, None)
            return
        if key not in self._tasks:
            self._faster[key] = asyncio.Event()
            self._tasks[key] = asyncio.create_task(self._run(key), name=f"scrape {key.namespace}/{key.name}")
        elif before is None or scrape.every < before.every or _uids(scrape) - _uids(before):
            self._faster[key].set()

    async def _run(self, key: Key) -> None:
        wait = FIRST_SECONDS
        faster = self._faster[key]
        while True:
            try:
                await asyncio.wait_for(faster.wait(), wait)
                faster.clear()
                await asyncio.sleep(FIRST_SECONDS)
            except TimeoutError:
                pass
            scrape = self._scrapes[key]
            before = self._reports.get(key, {})
            reports = await asyncio.gather(*(self._ask(key, pod, before.get(pod.uid, Report())) for pod in scrape.pods))
            now = {pod.uid: report for pod, report in zip(scrape.pods, reports, strict=True)}
            self._reports[key] = now
            if {uid: consequence(one) for uid, one in now.items()} != {
                uid: consequence(one) for uid, one in before.items()
            }:
                self._news(key)
            wait = self._scrapes[key].every

    async def _ask(self, key: Key, pod: Pod, before: Report) -> Report:
        report = await self._answer(key, pod, before)
        self._telemetry.scraped("refused" if report.refused else "failed" if report.failures else "good")
        return report

    async def _answer(self, key: Key, pod: Pod, before: Report) -> Report:
        if self._session is None:
            raise RuntimeError("SidecarScraper is used outside its context")
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        headers = {"Authorization": f"Bearer {admin_token(self._operator_key, self._uid_of(key))}"}
        failed = replace(before, failures=before.failures + 1, refused=False)
        try:
            async with (
                self._slots,
                self._session.get(f"http://{host}:{self._port}/v1/observation", headers=headers) as response,
            ):
                body = await response.content.read(LONGEST)
                if response.status in (401, 403):
                    return replace(failed, refused=True, problem=f"answers {response.status}")
                if response.status != 200:
                    return replace(failed, problem=f"answers {response.status}")
                while not response.content.at_eof() and len(body) < LONGEST:
                    body += await response.content.read(LONGEST - len(body))
                return Report(decode_observation(body))
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            return replace(failed, problem=f"{type(error).__name__} {error}".strip())
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            return replace(failed, problem=f"its observation cannot be read: {error}")


def _uids(scrape: Scrape) -> set[str]:
    return {pod.uid for pod in scrape.pods}


def consequence(report: Report) -> tuple[object, ...]:
    """What of a report a decision may depend on; the rest is figures."""
    observation = report.observation
    known: tuple[object, ...] = ()
    if observation is not None:
        known = (
            observation.generation,
            observation.acknowledged_version,
            observation.cold_requested,
            observation.cold_confirmed,
            observation.resource_generation,
            observation.latch,
            observation.problems,
            observation.pool_tokens,
            observation.bytes_per_token,
        )
    return (min(report.failures, 3), report.refused, known)

"""Asking sidecars, over real HTTP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web
from kvsteward_contract.identity import admin_token
from kvsteward_operator.decide import Scrape
from kvsteward_operator.index import Key
from kvsteward_operator.scrape import SidecarScraper
from kvsteward_operator.telemetry import Telemetry
from kvsteward_operator.world import Pod
from support.operating import KEY

OPERATOR_KEY = bytes(32)
GOLDEN = Path(__file__).parents[2] / "contract/golden/observation.json"
POD = Pod(
    "chat-1", "pod-uid", "127.0.0.1", "chat-g", ready=True, terminating=False, engine_running=True, unschedulable=""
)


class Sidecar:
    """Answers scrapes with `status` and `body`; counts them."""

    def __init__(self) -> None:
        self.status, self.body, self.asked = 200, GOLDEN.read_bytes(), 0

    async def observation(self, request: web.Request) -> web.Response:
        self.asked += 1
        if request.headers.get("Authorization") != f"Bearer {admin_token(OPERATOR_KEY, 'policy-uid')}":
            return web.Response(status=401)
        return web.Response(status=self.status, body=self.body)


@asynccontextmanager
async def scraping(uid: str = "policy-uid") -> AsyncIterator[tuple[Sidecar, SidecarScraper, list[Key]]]:
    """A sidecar, a scraper that follows it ten times a second, and the news it gave."""
    sidecar, news = Sidecar(), []
    app = web.Application()
    app.router.add_get("/v1/observation", sidecar.observation)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with SidecarScraper(OPERATOR_KEY, lambda key: uid, news.append, Telemetry(lambda: 0.0), port) as scraper:
            scraper.follow(KEY, Scrape((POD,), 0.1))
            yield sidecar, scraper, news
    finally:
        await runner.cleanup()


async def asked(sidecar: Sidecar, times: int) -> None:
    async with asyncio.timeout(5):
        goal = sidecar.asked + times
        while sidecar.asked < goal:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.02)


async def test_an_observation_is_news_once_and_then_only_when_something_of_consequence_changes() -> None:
    async with scraping() as (sidecar, scraper, news):
        await asked(sidecar, 3)
        report = scraper.reports(KEY)["pod-uid"]
        assert report.observation is not None
        assert report.observation.pool_tokens == 745648
        assert news == [KEY]
        sidecar.body = sidecar.body.replace(b'"inFlight": 3', b'"inFlight": 9')
        await asked(sidecar, 2)
        assert news == [KEY]
        sidecar.body = sidecar.body.replace(b'"coldConfirmed": false', b'"coldConfirmed": true')
        await asked(sidecar, 2)
        assert news == [KEY, KEY]


async def test_a_sidecar_of_another_operator_key_is_refused_and_keeps_its_last_observation() -> None:
    async with scraping(uid="another policy") as (sidecar, scraper, _):
        await asked(sidecar, 1)
        report = scraper.reports(KEY)["pod-uid"]
        assert (report.refused, report.failures, report.problem) == (True, 1, "answers 401")


async def test_failures_are_counted_until_an_answer_comes() -> None:
    async with scraping() as (sidecar, scraper, news):
        await asked(sidecar, 1)
        for status, text in ((503, b""), (200, b"nonsense"), (200, b'{"apiVersion": "x"}')):
            sidecar.status, sidecar.body = status, text
            await asked(sidecar, 1)
        report = scraper.reports(KEY)["pod-uid"]
        assert report.failures >= 3
        assert report.observation is not None
        assert "cannot be read" in report.problem
        sidecar.status, sidecar.body = 200, GOLDEN.read_bytes()
        await asked(sidecar, 2)
        assert scraper.reports(KEY)["pod-uid"].failures == 0
        assert len(news) >= 3


async def test_a_change_to_faster_scrapes_does_not_wait_for_the_slow_one() -> None:
    async with scraping() as (sidecar, scraper, _):
        scraper.follow(KEY, Scrape((POD,), 60.0))
        await asked(sidecar, 1)
        scraper.follow(KEY, Scrape((POD,), 0.1))
        await asked(sidecar, 2)


async def test_nothing_is_asked_any_more_of_a_policy_that_has_gone() -> None:
    async with scraping() as (sidecar, scraper, _):
        await asked(sidecar, 1)
        scraper.follow(KEY, Scrape())
        before = sidecar.asked
        await asyncio.sleep(0.5)
        assert sidecar.asked == before
        assert scraper.reports(KEY) == {}

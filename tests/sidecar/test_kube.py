"""List and watch of one object: what each way of failing means."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest
from kvsteward_sidecar import kube
from kvsteward_sidecar.kube import Absent, ApiServer, Change, Confirmed, Seen, Unreachable, backoff, follow
from support.control_plane import ApiFake, until

MAPS = "/api/v1/namespaces/serving/configmaps"


@pytest.fixture
async def api() -> AsyncIterator[ApiFake]:
    fake = ApiFake()
    await fake.start()
    yield fake
    await fake.stop()


class Follower:
    """Collects what `follow` says."""

    def __init__(self, api: ApiFake, token: Path | None = None, **options: Any) -> None:
        self.changes: list[Change] = []
        self._api, self._token, self._options = api, token, options

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession()
        server = ApiServer(self._api.url, self._token, False)
        self._task = asyncio.create_task(self._collect(follow(self._session, server, MAPS, "doc", **self._options)))
        return self

    async def _collect(self, changes: AsyncIterator[Change]) -> None:
        async with aclosing(changes):
            async for change in changes:
                self.changes.append(change)

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._session.close()

    def seen(self) -> list[str]:
        return [change.object["data"]["document"] for change in self.changes if isinstance(change, Seen)]


def value(text: str) -> dict[str, Any]:
    return {"data": {"document": text}}


async def test_the_object_is_listed_and_then_watched(api: ApiFake) -> None:
    api.put(MAPS, "doc", value("one"))
    async with Follower(api) as follower:
        await until(lambda: api.watching)
        api.put(MAPS, "doc", value("two"))
        api.put(MAPS, "other", value("never"))
        await until(lambda: follower.seen() == ["one", "two"])


async def test_an_object_that_is_not_there_is_absent_and_may_come_later(api: ApiFake) -> None:
    async with Follower(api) as follower:
        await until(lambda: follower.changes == [Absent()] and api.watching)
        api.put(MAPS, "doc", value("one"))
        await until(lambda: follower.seen() == ["one"])
        api.delete(MAPS, "doc")
        await until(lambda: follower.changes[-1] == Absent())


async def test_a_bookmark_confirms_and_is_where_the_next_watch_starts(api: ApiFake) -> None:
    api.put(MAPS, "doc", value("one"))
    async with Follower(api) as follower:
        await until(lambda: api.watching)
        api.bookmark()
        await until(lambda: follower.changes[-1] == Confirmed())
        api.end_watches()
        await until(lambda: not api.watching)
        await until(lambda: api.watching)
        assert api.lists == 1


@pytest.mark.parametrize("status", [401, 403, 500, 404])
async def test_a_refusal_is_unreachable_and_never_absent(api: ApiFake, status: int) -> None:
    api.status = status
    async with Follower(api) as follower:
        await until(lambda: follower.changes)
        assert isinstance(follower.changes[0], Unreachable)
        assert str(status) in follower.changes[0].why
        api.put(MAPS, "doc", value("one"))
        api.status = 0
        await until(lambda: follower.seen() == ["one"])
        assert Absent() not in follower.changes


async def test_an_expired_version_leads_to_a_new_list(api: ApiFake) -> None:
    api.put(MAPS, "doc", value("one"))
    async with Follower(api) as follower:
        await until(lambda: api.watching)
        api.send_all({"type": "ERROR", "object": {"code": 410, "message": "too old"}})
        await until(lambda: follower.seen() == ["one", "one"])
        assert not [change for change in follower.changes if isinstance(change, Unreachable)]


async def test_any_other_error_in_a_watch_is_unreachable_for_a_while(api: ApiFake) -> None:
    api.put(MAPS, "doc", value("one"))
    async with Follower(api) as follower:
        await until(lambda: api.watching)
        api.send_all({"type": "ERROR", "object": {"code": 500, "message": "etcd is gone"}})
        await until(lambda: follower.seen() == ["one", "one"])
        assert Unreachable("the watch failed: etcd is gone") in follower.changes


async def test_a_watch_that_fell_silent_is_noticed_and_what_was_missed_is_seen(api: ApiFake) -> None:
    api.put(MAPS, "doc", value("one"))
    async with Follower(api, inactivity_seconds=0.2) as follower:
        await until(lambda: api.watching)
        api.silent = True
        api.put(MAPS, "doc", value("two"))
        await until(lambda: follower.seen()[-1:] == ["two"])


async def test_a_server_that_is_down_is_unreachable_until_it_is_back() -> None:
    fake = ApiFake()
    fake.url = "http://127.0.0.1:9"
    async with Follower(fake) as follower:
        await until(lambda: follower.changes)
        assert isinstance(follower.changes[0], Unreachable)


async def test_garbage_in_a_watch_is_unreachable_and_followed_by_a_list(
    api: ApiFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.put(MAPS, "doc", value("one"))
    monkeypatch.setattr("support.control_plane.json.dumps", lambda _: "{no json")
    async with Follower(api) as follower:
        await until(lambda: api.watching)
        api.send_all({})
        await until(lambda: any(isinstance(change, Unreachable) for change in follower.changes))
        await until(lambda: api.lists == 2)


async def test_a_token_that_was_replaced_is_used_from_then_on(api: ApiFake, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    async with Follower(api, token):
        await until(lambda: api.watching)
        token.write_text("second\n")
        api.end_watches()
        await until(lambda: api.tokens[-1] == "Bearer second")
    assert api.tokens[0] == "Bearer first"


async def test_a_token_that_cannot_be_read_is_unreachable(api: ApiFake, tmp_path: Path) -> None:
    async with Follower(api, tmp_path / "none") as follower:
        await until(lambda: follower.changes)
        assert isinstance(follower.changes[0], Unreachable)


def test_waiting_grows_with_failures_up_to_a_bound() -> None:
    assert backoff(0) <= kube.FIRST_BACKOFF
    assert kube.LAST_BACKOFF / 2 <= backoff(50) <= kube.LAST_BACKOFF


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        pytest.param({}, "KUBERNETES_SERVICE_HOST", id="no-pod"),
        pytest.param({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "ca.crt", id="no-service-account"),
    ],
)
def test_outside_a_pod_it_says_what_is_missing(tmp_path: Path, environment: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ApiServer.in_cluster(environment, tmp_path)

"""The admin port: open probes, a token for all else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp.test_utils import TestServer
from kvsteward_contract.document import canonical
from kvsteward_contract.observation import decode_observation
from kvsteward_sidecar import engine_link
from kvsteward_sidecar.admin import AdminToken, admin_app
from kvsteward_sidecar.control import Control
from kvsteward_sidecar.ticket import Ending
from support.control_plane import PolicyEngine, admit, document, resource, running_control, until
from yarl import URL

TOKEN = "admin-" + "x" * 58


class Admin:
    """The port of a running control, and a client that bears `token`."""

    def __init__(self, control: Control, engine: PolicyEngine, folder: Path, client: aiohttp.ClientSession) -> None:
        self.control, self.engine, self.client = control, engine, client
        self.token_file = folder / "admin-token"
        self.token_file.write_text(TOKEN + "\n")
        self.serving = True
        self.server = TestServer(admin_app(control, AdminToken(self.token_file), lambda: self.serving))

    async def ask(self, path: str, method: str = "GET", token: str | None = TOKEN) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        url: URL = self.server.make_url(path)
        async with self.client.request(method, url, headers=headers) as answer:
            return answer.status, await answer.text()

    async def json(self, path: str, method: str = "GET") -> dict[str, object]:
        async with self.client.request(
            method, self.server.make_url(path), headers={"Authorization": f"Bearer {TOKEN}"}
        ) as answer:
            assert answer.status == 200
            return await answer.json()


@pytest.fixture
async def admin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Admin]:
    monkeypatch.setattr(engine_link, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(engine_link, "RETRY_SECONDS", 0.02)
    engine = PolicyEngine()
    await engine.start()
    async with running_control(tmp_path, engine) as control, aiohttp.ClientSession() as client:
        made = Admin(control, engine, tmp_path, client)
        async with made.server:
            yield made
    await engine.stop()


PROTECTED = [
    ("GET", "/v1/observation"),
    ("GET", "/v1/policy"),
    ("GET", "/v1/receipts"),
    ("GET", "/v1/ledger"),
    ("POST", "/v1/cold"),
    ("DELETE", "/v1/cold"),
]


@pytest.mark.parametrize(("method", "path"), PROTECTED)
@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN[:-1], TOKEN + "x", TOKEN + " x"])
async def test_without_the_token_nothing_is_told_or_done(
    admin: Admin, method: str, path: str, token: str | None
) -> None:
    status, text = await admin.ask(path, method, token)
    assert status == 401
    assert "kubectl rollout restart" in text
    assert admin.control.latch is None


@pytest.mark.parametrize(("method", "path"), PROTECTED)
async def test_with_the_token_everything_answers(admin: Admin, method: str, path: str) -> None:
    await until(admin.control.engine_ready)
    assert (await admin.ask(path, method))[0] == 200


@pytest.mark.parametrize(
    "target",
    [
        *["/%76%31/policy", "/v1%2Fpolicy", "/v1/%70olicy", "//v1/policy", "/./v1/policy", "/x/../v1/policy"],
        *["/V1/policy", "/v1/policy/", "/v1/policy?a=b", "/v1/policy%3Fa", "http://admin/v1/policy"],
        "/metrics/../v1/policy",
    ],
)
async def test_no_spelling_of_a_path_gets_round_the_token(admin: Admin, target: str) -> None:
    """As it stands in the request line: no client's library has tidied it up."""
    url = admin.server.make_url("/")
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(f"GET {target} HTTP/1.1\r\nHost: admin\r\nConnection: close\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert int(answer.split()[1]) in (401, 404)
    assert b"epoch" not in answer


async def test_two_authorization_headers_are_refused(admin: Admin) -> None:
    headers = [("Authorization", f"Bearer {TOKEN}"), ("Authorization", f"Bearer {TOKEN}")]
    async with admin.client.get(admin.server.make_url("/v1/policy"), headers=headers) as answer:
        assert answer.status == 401


async def test_a_rotated_token_counts_at_once(admin: Admin) -> None:
    admin.token_file.write_text("another-" + "y" * 56)
    assert (await admin.ask("/v1/policy"))[0] == 401
    assert (await admin.ask("/v1/policy", token="another-" + "y" * 56))[0] == 200


@pytest.mark.parametrize("content", [None, "", "\n"])
async def test_no_token_opens_nothing(admin: Admin, content: str | None) -> None:
    admin.token_file.unlink()
    if content is not None:
        admin.token_file.write_text(content)
    for token in ("", TOKEN):
        status, text = await admin.ask("/v1/policy", token=token)
        assert status == 401
        assert "--admin-token-file" in text


async def test_probes_and_metrics_are_open(admin: Admin) -> None:
    await until(admin.control.engine_ready)
    for path in ("/healthz", "/readyz", "/engine/startup", "/engine/live", "/metrics"):
        assert (await admin.ask(path, token=None))[0] == 200


async def test_not_ready_before_the_traffic_port_is_open(admin: Admin) -> None:
    await until(admin.control.engine_ready)
    admin.serving = False
    assert (await admin.ask("/readyz", token=None))[0] == 503


async def test_a_loading_engine_is_not_ready_and_not_started_but_alive(admin: Admin) -> None:
    admin.engine.loading = True
    await until(lambda: not admin.control.engine_ready())
    assert (await admin.ask("/healthz", token=None))[0] == 200
    assert (await admin.ask("/readyz", token=None))[0] == 503
    assert (await admin.ask("/engine/startup", token=None))[0] == 503
    assert (await admin.ask("/engine/live", token=None))[0] == 200


async def test_without_a_policy_the_pod_is_ready_and_serves_cold(admin: Admin) -> None:
    await until(admin.control.engine_ready)
    assert not admin.control.permission.known
    assert (await admin.ask("/readyz", token=None))[0] == 200


async def test_a_draining_pod_is_not_ready_once_it_refuses(admin: Admin) -> None:
    await until(admin.control.engine_ready)
    await admin.control.drain.run(0)
    assert (await admin.ask("/readyz", token=None))[0] == 503
    assert (await admin.ask("/healthz", token=None))[0] == 200


async def test_the_cold_switch_latches_and_releases(admin: Admin) -> None:
    await until(admin.control.engine_ready)
    held = await admin.json("/v1/cold", "POST")
    assert held["latch"]["reason"] == "ColdRequested"
    assert admin.control.permission.stopped
    await until(lambda: admin.control.link.acknowledged)
    assert (await admin.json("/v1/cold", "DELETE"))["latch"] is None
    assert not admin.control.permission.stopped


async def test_the_policy_in_force_is_shown(admin: Admin) -> None:
    admin.control.policy.take_document(canonical(document(stage="Full")))
    admin.control.policy.take_resource(resource(stage="Full"))
    await until(lambda: admin.control.link.acknowledged)
    shown = await admin.json("/v1/policy")
    assert (shown["stage"], shown["acknowledged"], shown["killSwitch"]) == ("Full", True, False)
    assert shown["document"]["rollout"]["stage"] == "Full"
    assert shown["engineEpoch"] == shown["epoch"] == 1


async def test_the_observation_is_the_contracts(admin: Admin) -> None:
    await until(admin.control.engine_ready)
    _, text = await admin.ask("/v1/observation")
    assert decode_observation(text.encode()).engine_instance == "one"


async def test_receipts_are_listed_newest_first_and_found_by_id(admin: Admin) -> None:
    for number in (1, 2, 3):
        admin.control.finish(admit(admin.control, request=f"{number:032x}"), None, None, Ending.COMPLETED)
    listed = (await admin.json("/v1/receipts?limit=2"))["receipts"]
    assert [receipt["id"] for receipt in listed] == [f"{3:032x}", f"{2:032x}"]
    assert (await admin.json(f"/v1/receipts?id={1:032x}"))["id"] == f"{1:032x}"
    assert (await admin.ask(f"/v1/receipts?id={9:032x}"))[0] == 404


@pytest.mark.parametrize("limit", ["0", "-1", "many", "4097", "²", pytest.param("9" * 5_000, id="endless")])
async def test_a_limit_that_makes_no_sense_is_refused(admin: Admin, limit: str) -> None:
    status, text = await admin.ask(f"/v1/receipts?limit={limit}")
    assert (status, "limit must be" in text) == (400, True)


async def test_the_ledger_is_the_engines(admin: Admin) -> None:
    assert await admin.json("/v1/ledger?limit=5&other=1") == {"pages": [], "limit": "5"}
    await admin.engine.stop()
    assert (await admin.ask("/v1/ledger"))[0] == 503


async def test_there_is_nothing_else(admin: Admin) -> None:
    assert (await admin.ask("/v1/secrets"))[0] == 404
    assert (await admin.ask("/kv/v1/policy"))[0] == 404

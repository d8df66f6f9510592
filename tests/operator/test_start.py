"""Starting: the command line, the login, the schema that is served, the operator key, the ports."""

import base64
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kvsteward_contract import wire
from kvsteward_contract.crd import crd
from kvsteward_operator import errors
from kvsteward_operator.errors import api_error
from kvsteward_operator.login import NoLogin, find_login
from kvsteward_operator.main import BadStart, main, make_key, own_namespace, own_peer, read_key, read_peers
from kvsteward_operator.ports import liveness, metrics, serving
from kvsteward_operator.served_schema import UnknownSchema, check_schema
from kvsteward_operator.telemetry import LIVE_SECONDS, Telemetry
from kvsteward_operator.watches import settings
from support.fake_api import FakeApi


class Serves(FakeApi):
    """A cluster that serves this OpenAPI document."""

    def __init__(self, schema: dict[str, Any] | None) -> None:
        super().__init__()
        self.document = schema

    async def schema(self, group_version: str) -> dict[str, Any]:
        assert group_version == wire.API_VERSION
        if self.document is None:
            raise errors.NotFound(404, "not found")
        return self.document


def served(change: str = "") -> dict[str, Any]:
    """What the API server publishes of our CRD, with a field more or less."""
    schema = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema["x-kubernetes-group-version-kind"] = [{"group": wire.GROUP, "version": wire.VERSION, "kind": wire.KIND}]
    rollout = schema["properties"]["spec"]["properties"]["rollout"]["properties"]
    if change == "newer":
        rollout["steps"] = {"type": "array", "items": {"type": "object"}}
    if change == "older":
        del schema["properties"]["status"]["properties"]["history"]
    return {"components": {"schemas": {"other": {}, "policy": schema}}}


async def test_the_operator_starts_on_its_own_crd() -> None:
    await check_schema(Serves(served()))


@pytest.mark.parametrize(
    ("document", "words"),
    [
        pytest.param(None, "kubectl apply -f crds/", id="no crd"),
        pytest.param(served("newer"), r"spec.rollout.steps\): upgrade the operator", id="a newer one"),
        pytest.param(served("older"), r"status.history\): kubectl apply -f crds/", id="an older one"),
        pytest.param({"components": {"schemas": {}}}, "try again", id="not published yet"),
    ],
)
async def test_the_operator_refuses_to_start_on_another_crd_and_says_what_to_do(document: Any, words: str) -> None:
    with pytest.raises(UnknownSchema, match=words):
        await check_schema(Serves(document))


async def test_an_operator_key_is_32_random_bytes_made_once() -> None:
    api = FakeApi()
    assert await make_key(api, "system", "operator-key")
    first = api.find("Secret", "operator-key", "system")
    assert first is not None
    assert len(base64.b64decode(first["data"]["key"])) == 32
    assert not await make_key(api, "system", "operator-key")
    assert api.find("Secret", "operator-key", "system") == first


def test_a_key_that_is_missing_or_short_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(BadStart, match="cannot be read"):
        read_key(tmp_path / "none")
    (tmp_path / "short").write_bytes(b"x" * 31)
    with pytest.raises(BadStart, match="holds 31 bytes"):
        read_key(tmp_path / "short")
    (tmp_path / "good").write_bytes(b"x" * 32)
    assert read_key(tmp_path / "good") == b"x" * 32


@pytest.mark.parametrize("text", ["nonsense", "{}", "[1]", "[{}]"])
def test_peers_that_would_open_the_admin_port_to_all_or_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(BadStart, match="--admin-from"):
        read_peers(text)


def test_in_a_pod_the_operators_own_pods_are_the_first_peer(tmp_path: Path) -> None:
    assert own_peer(tmp_path) == ()
    (tmp_path / "namespace").write_text("system\n")
    assert own_namespace(tmp_path) == "system"
    (peer,) = own_peer(tmp_path)
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "system"}
    assert peer["podSelector"]["matchLabels"]


def test_a_scope_must_be_named_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--engine-image=e", "--sidecar-image=s", "--operator-key-file=k"])
    assert "--namespace --cluster" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="kvsteward-operator: --operator-key-file k cannot be read"):
        main(["run", "--cluster", "--engine-image=e", "--sidecar-image=s", "--operator-key-file=k"])


def test_without_a_pod_and_a_kubeconfig_there_is_no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(NoLogin, match="set KUBECONFIG"):
        find_login({}, tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(NoLogin, match="cannot be used"):
        find_login({}, tmp_path)


def test_a_kubeconfig_gives_server_and_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config"
    config.write_text(
        "current-context: c\n"
        "contexts: [{name: c, context: {cluster: k, user: u}}]\n"
        "clusters: [{name: k, cluster: {server: 'https://k:6443/', insecure-skip-tls-verify: true}}]\n"
        "users: [{name: u, user: {token: t}}]\n"
    )
    monkeypatch.setenv("KUBECONFIG", str(config))
    login = find_login({}, tmp_path / "no-pod")
    assert login.server == "https://k:6443"
    assert login.headers() == {"Authorization": "Bearer t"}


@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        (404, "NotFound", errors.NotFound),
        (409, "AlreadyExists", errors.AlreadyExists),
        (409, "Conflict", errors.Conflict),
        (403, "Forbidden", errors.Refused),
        (422, "Invalid", errors.Refused),
        (429, "TooManyRequests", errors.Unavailable),
        (500, "InternalError", errors.Unavailable),
        (504, "Timeout", errors.Unavailable),
    ],
)
def test_an_answer_is_named_by_what_the_caller_should_do(status: int, reason: str, kind: type) -> None:
    assert type(api_error(status, reason, "m")) is kind


async def test_the_ports_tell_liveness_and_metrics() -> None:
    now = 0.0
    telemetry = Telemetry(lambda: now)
    telemetry.applied("Deployment")
    async with (
        serving(liveness(telemetry), "127.0.0.1", 0) as live,
        serving(metrics(telemetry), "127.0.0.1", 0) as measured,
        aiohttp.ClientSession() as session,
    ):
        async with session.get(f"http://127.0.0.1:{live}/healthz") as answer:
            assert answer.status == 200
        async with session.get(f"http://127.0.0.1:{measured}/metrics") as answer:
            assert 'kvsteward_operator_applies_total{kind="Deployment"} 1.0' in await answer.text()
        now = LIVE_SECONDS
        async with session.get(f"http://127.0.0.1:{live}/healthz") as answer:
            assert answer.status == 503
            assert "120 s ago" in await answer.text()


def test_kopf_is_kept_from_writing_and_from_watching_what_is_not_ours() -> None:
    chosen = settings()
    assert not chosen.posting.enabled
    assert not chosen.posting.loggers
    assert chosen.watching.inactivity_timeout < 120
    assert len(chosen.watching.label_selectors) == 11

"""How the cluster commands meet an API server: the official client over sockets, and a sentence for each failure."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from kvsteward_cli.cluster import api
from kvsteward_cli.cluster.api import Conflict, NotFound, PodSilent, connect, controlled, handshake_sentence, refusal
from kvsteward_cli.cluster.main import main
from kvsteward_cli.errors import CommandFailed

POLICIES = "/apis/kvsteward.dev/v1alpha1/namespaces/serving/kvcachepolicies"


class ApiServer(ThreadingHTTPServer):
    """Answers from `answers` {(method, path): (status, body)}, else 404 as for an unknown resource; keeps requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: dict[tuple[str, str], tuple[int, Any]] = {}
        self.requests: list[tuple[str, str, str, Any]] = []
        self.credentials: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: ApiServer

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        self.server.requests.append((self.command, self.path, self.headers.get("Content-Type", ""), body))
        self.server.credentials.add(self.headers.get("Authorization", ""))
        path = self.path.partition("?")[0]
        status, told = self.server.answers.get((self.command, path), (404, "404 page not found"))
        if callable(told):
            told = told(self.path)
        data = told.encode() if isinstance(told, str) else json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PATCH = _answer  # noqa: N815 - the names that http.server calls

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ApiServer]:
    made = ApiServer()
    thread = threading.Thread(target=made.serve_forever, args=(0.02,))
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: ApiServer) -> Path:
    """With contexts `here` (namespace serving), which is current, and `plain` (no namespace)."""
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server.url}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
        "contexts": [
            {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "serving"}},
            {"name": "plain", "context": {"cluster": "c", "user": "u"}},
        ],
        "current-context": "here",
    }))  # fmt: skip
    return file


@pytest.mark.parametrize(
    ("context", "namespace", "expected"),
    [(None, None, "serving"), ("plain", None, "default"), ("plain", "mine", "mine"), (None, "mine", "mine")],
)
def test_the_namespace_is_the_flags_then_the_contexts(
    kubeconfig: Path, context: str | None, namespace: str | None, expected: str
) -> None:
    assert connect(str(kubeconfig), context, namespace).namespace == expected


def test_patches_are_json_patches_that_refuse_fields_the_cluster_does_not_have(
    server: ApiServer, kubeconfig: Path
) -> None:
    server.answers["PATCH", f"{POLICIES}/chat"] = (200, {"metadata": {"name": "chat"}})
    cluster = connect(str(kubeconfig), None, None)
    operation = {"op": "add", "path": "/spec/rollout/killSwitch", "value": "Engaged"}
    assert cluster.patch("chat", [operation]) == {"metadata": {"name": "chat"}}
    assert cluster.patch("chat", [operation], dry_run=True) == {"metadata": {"name": "chat"}}
    kept, tried = server.requests
    assert kept[2:] == tried[2:] == ("application/json-patch+json", [operation])
    assert server.credentials == {"Bearer secret"}
    for path in (kept[1], tried[1]):
        assert "fieldValidation=Strict" in path
        assert "fieldManager=kubectl-kvcache" in path
    assert ("dryRun" in kept[1], "dryRun=All" in tried[1]) == (False, True)


def test_lists_are_read_to_their_end(server: ApiServer, kubeconfig: Path) -> None:
    def page(path: str) -> Any:
        first = "continue=" not in path
        return {"metadata": {"continue": "more" if first else ""}, "items": [{"n": 1 if first else 2}]}

    server.answers["GET", POLICIES] = (200, page)
    assert connect(str(kubeconfig), None, None).policies() == [{"n": 1}, {"n": 2}]


def owned(name: str, by: str, *, controller: bool = True) -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": name, "ownerReferences": [{"uid": by, "controller": controller}]}}


def test_pods_are_those_whose_owners_end_in_the_policy(server: ApiServer, kubeconfig: Path) -> None:
    apps = "/apis/apps/v1/namespaces/serving"
    server.answers |= {
        ("GET", f"{apps}/deployments"): (200, {"items": [owned("deployment", "policy"), owned("other", "somebody")]}),
        ("GET", f"{apps}/replicasets"): (200, {"items": [owned("set", "deployment"), owned("others", "other")]}),
        ("GET", "/api/v1/namespaces/serving/pods"): (200, {"items": [
            owned("ours", "set"), owned("theirs", "others"), owned("labelled", "set", controller=False),
            {"metadata": {"name": "bare", "uid": "bare"}},
        ]}),
    }  # fmt: skip
    found = connect(str(kubeconfig), None, None).pods({"metadata": {"name": "chat", "uid": "policy"}})
    assert [pod["metadata"]["name"] for pod in found] == ["ours"]
    asked = [parse_qs(urlsplit(path).query)["labelSelector"] for _, path, _, _ in server.requests]
    assert asked == [["kvsteward.dev/policy=chat"]] * 3


def test_a_port_forward_carries_the_same_credentials(server: ApiServer, kubeconfig: Path) -> None:
    with pytest.raises(PodSilent, match=r"no port-forward: .*404"):
        connect(str(kubeconfig), None, None).ask("chat-1", "/v1/observation", "admin", 5)
    assert server.requests[0][1] == "/api/v1/namespaces/serving/pods/chat-1/portforward?ports=9901"
    assert server.credentials == {"Bearer secret"}


def test_an_object_without_owners_is_nobodys() -> None:
    assert controlled([{"metadata": {"name": "x"}}], {"u"}) == []


def test_the_admin_token_is_read_from_the_policys_secret(server: ApiServer, kubeconfig: Path) -> None:
    path = "/api/v1/namespaces/serving/secrets/chat-kvsteward"
    server.answers["GET", path] = (200, {"data": {"admin-token": "YWRtaW4="}})
    cluster = connect(str(kubeconfig), None, None)
    assert cluster.admin_token("chat") == "admin"
    server.answers["GET", path] = (200, {"data": {"salt": "YWRtaW4="}})
    with pytest.raises(CommandFailed, match="has no admin-token"):
        cluster.admin_token("chat")


STATUS = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        pytest.param(404, {**STATUS, "message": 'kvcachepolicies.kvsteward.dev "chat" not found',
                           "details": {"name": "chat", "kind": "kvcachepolicies"}},
                     "kvcachepolicies 'chat' was not found in this namespace; see -n", id="not-found"),
        pytest.param(404, "404 page not found", "this cluster has no KVCachePolicies: install the CRD with kubectl "
                     "apply -f crds/", id="no-crd"),
        pytest.param(403, {**STATUS, "message": 'kvcachepolicies "chat" is forbidden: User "eve" cannot'},
                     'you may not do this: kvcachepolicies "chat" is forbidden: User "eve" cannot', id="forbidden"),
        pytest.param(401, {**STATUS, "message": "Unauthorized"}, "the API server does not know you: log in again, or "
                     "choose another --context", id="unauthorised"),
        pytest.param(503, "<html>\n<b>no backend</b>", "the API server answers 503: Service Unavailable", id="a-proxy"),
        pytest.param(200, "<html>hello</html>", "does not answer like an API server", id="no-api-server"),
    ],
)  # fmt: skip
def test_what_the_api_server_refuses_is_one_sentence(
    server: ApiServer, kubeconfig: Path, capsys: pytest.CaptureFixture[str], status: int, body: Any, said: str
) -> None:
    server.answers["GET", f"{POLICIES}/chat"] = (status, body)
    assert main(["status", "chat", "--kubeconfig", str(kubeconfig)]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("kubectl kvcache: ")
    assert told.err.count("\n") == 1
    assert said in told.err


def test_an_api_server_that_is_not_there_is_one_sentence(
    server: ApiServer, kubeconfig: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{probe.getsockname()[1]}"
    kubeconfig.write_text(kubeconfig.read_text().replace(server.url, nobody))
    assert main(["kill", "chat", "--wait", "--kubeconfig", str(kubeconfig)]) == 1
    told = capfd.readouterr().err
    assert f"the API server {nobody} does not answer" in told
    assert "refused" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "content", "said"),
    [
        pytest.param([], None, "no cluster", id="no-file"),
        pytest.param([], "[unclosed", "no cluster", id="no-yaml"),
        pytest.param(["--context", "elsewhere"], "", "no cluster", id="empty-file"),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_one_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: list[str], content: str | None, said: str
) -> None:
    file = tmp_path / "kubeconfig"
    if content is not None:
        file.write_text(content)
    assert main(["status", "--kubeconfig", str(file), *words]) == 1
    told = capfd.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_an_unknown_context_is_one_sentence(kubeconfig: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--kubeconfig", str(kubeconfig), "--context", "elsewhere"]) == 1
    told = capfd.readouterr().err
    assert "elsewhere" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("status", "kind"), [(409, Conflict), (404, NotFound), (422, CommandFailed), (0, api.Unreachable)]
)
def test_answers_become_what_the_caller_should_do(status: int, kind: type[Exception]) -> None:
    assert type(refusal(status, "why", '{"message": "told", "details": {"name": "x"}}')) is kind


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        pytest.param(
            'Handshake status 403 Forbidden -+-+- {\'date\': \'today\'} -+-+- b\'{"kind":"Status","message":"pods '
            '\\"a\\" is forbidden","reason":"Forbidden"}\'',
            'no port-forward: pods "a" is forbidden',
            id="a-status",
        ),
        pytest.param("[Errno 111] refused", "no port-forward: [Errno 111] refused", id="no-answer"),
        pytest.param("Handshake status 502 Bad Gateway -+-+- {} -+-+- b''", "no port-forward: Handshake status 502 Bad "
                     "Gateway", id="a-proxy"),
    ],
)  # fmt: skip
def test_a_refused_port_forward_is_told_without_headers(reason: str, said: str) -> None:
    assert handshake_sentence(reason) == said

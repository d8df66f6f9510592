"""`kvsteward-engine drain`, the pod's preStop hook."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from kvsteward_engine.main import main


@contextmanager
def sidecar(status: int, asked: list[str]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *ignored: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_it_waits_for_the_sidecars_answer() -> None:
    asked: list[str] = []
    with sidecar(200, asked) as url:
        assert main(["drain", "--url", url, "--seconds", "7"]) == 0
    assert asked == ["/drain?seconds=7"]


def test_a_sidecar_that_is_gone_has_no_traffic_left() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        assert main(["drain", "--url", f"http://127.0.0.1:{held.getsockname()[1]}", "--seconds", "1"]) == 0


def test_a_refusal_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with sidecar(404, []) as url:
        assert main(["drain", "--url", url, "--seconds", "1"]) == 1
    assert "status 404" in capsys.readouterr().err


def test_a_sidecar_that_hangs_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsteward_engine.drain.GRACE_SECONDS", 0.2)
    with socket.socket() as hanging:
        hanging.bind(("127.0.0.1", 0))
        hanging.listen()
        assert main(["drain", "--url", f"http://127.0.0.1:{hanging.getsockname()[1]}", "--seconds", "0"]) == 1


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "127.0.0.1:1", "http://127.0.0.1", "http://127.0.0.1:99999"])
def test_a_url_of_another_form_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "--url", url]) == 1
    assert "http://host:port" in capsys.readouterr().err


def test_it_loads_nothing_heavy() -> None:
    code = (
        "import sys; from kvsteward_engine.main import main; main(['drain', '--url', 'http://127.0.0.1:1'])\n"
        "print(sorted({'torch', 'aiohttp', 'tokenizers', 'numpy', 'jinja2'} & set(sys.modules)))"
    )
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert got.stdout.strip() == "[]"

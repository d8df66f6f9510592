"""The command line: what can't work is refused in one sentence."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest
from kvsteward_sidecar.settings import Settings, StartError, engine_token, make_token, parse, read_salt

BASE = ["serve", "--salt-file", "salt", "--state-dir", "state"]


def given(*more: str) -> Settings:
    return parse([*BASE, *more])


def test_a_policy_file_or_the_api_server_is_followed() -> None:
    assert given("--policy-file", "p.yaml").policy_file == Path("p.yaml")
    pod = given("--kubernetes", "--namespace", "n", "--policy", "p", "--document", "d")
    assert (pod.policy_file, pod.namespace, pod.policy, pod.document) == (None, "n", "p", "d")
    assert (pod.port, pod.admin_port, pod.drain_port, pod.engine) == (8080, 9901, 9902, "http://127.0.0.1:8000")


@pytest.mark.parametrize(
    ("more", "named"),
    [
        pytest.param([], "--policy-file", id="neither-source"),
        pytest.param(["--kubernetes", "--policy-file", "p"], "--policy-file", id="both-sources"),
        pytest.param(["--kubernetes", "--namespace", "n"], "--document", id="half-a-name"),
        pytest.param(["--policy-file", "p", "--engine", "https://x"], "--engine", id="tls-engine"),
        pytest.param(["--policy-file", "p", "--engine", "127.0.0.1:8000"], "--engine", id="no-scheme"),
        pytest.param(["--policy-file", "p", "--drain-seconds", "-1"], "--drain-seconds", id="negative-drain"),
        pytest.param(["--policy-file", "p", "--drain-seconds", "1"], "--closing-seconds", id="closing-above-drain"),
        pytest.param(["--policy-file", "p", "--make-engine-token"], "--engine-token-file", id="token-nowhere"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(more: list[str], named: str) -> None:
    with pytest.raises(StartError, match=named):
        given(*more)


def test_a_token_is_made_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    settings = replace(
        given("--policy-file", "p", "--engine-token-file", str(tmp_path / "token"), "--make-engine-token")
    )
    token = engine_token(settings)
    assert len(token) == 64
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o400
    assert engine_token(settings) == token
    assert [path.name for path in tmp_path.iterdir()] == ["token"]


def test_of_two_makers_the_first_wins(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("the first one's token")
    make_token(tmp_path / "token")
    assert (tmp_path / "token").read_text() == "the first one's token"


def test_without_a_token_file_the_engine_wants_none() -> None:
    assert engine_token(given("--policy-file", "p")) == ""


@pytest.mark.parametrize(
    "content",
    [
        *[None, b"", b"short", "ä".encode() * 20, b"x" * 16 + b"\0", b"two words" * 4],
        pytest.param(b"x" * 16 + b"\r\nX-KV-Directive: {}", id="a-header-behind-it"),
    ],
)
def test_a_token_that_cannot_be_used_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    with pytest.raises(StartError, match="--engine-token-file"):
        engine_token(given("--policy-file", "p", "--engine-token-file", str(tmp_path / "token")))


@pytest.mark.parametrize(("content", "named"), [(None, "No such file"), (b"x" * 31, "31 bytes")])
def test_a_salt_that_is_missing_or_short_is_refused(tmp_path: Path, content: bytes | None, named: str) -> None:
    if content is not None:
        (tmp_path / "salt").write_bytes(content)
    with pytest.raises(StartError, match=named):
        read_salt(tmp_path / "salt")

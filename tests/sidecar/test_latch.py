"""A latch holds over restarts and is released by a higher attempt alone, or by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvsteward_sidecar.latch import Latch, LatchFile, seen_attempt

SET_AT_2 = Latch("ScopeViolation", 100.0, 2)


@pytest.mark.parametrize(
    ("latch", "attempt", "left"),
    [
        pytest.param(None, 5, None, id="nothing-latched"),
        pytest.param(SET_AT_2, 2, SET_AT_2, id="same-attempt-holds"),
        pytest.param(SET_AT_2, 1, SET_AT_2, id="lower-attempt-holds"),
        pytest.param(SET_AT_2, 3, None, id="higher-attempt-releases"),
        pytest.param(
            Latch("ColdRequested", 1.0, None), 7, Latch("ColdRequested", 1.0, 7), id="first-policy-does-not-release"
        ),
    ],
)
def test_what_an_attempt_does_to_a_latch(latch: Latch | None, attempt: int, left: Latch | None) -> None:
    assert seen_attempt(latch, attempt) == left


def test_a_latch_is_there_after_a_restart(tmp_path: Path) -> None:
    LatchFile(tmp_path / "latch.json").store(SET_AT_2)
    assert LatchFile(tmp_path / "latch.json").load(0.0) == SET_AT_2


def test_a_release_is_there_after_a_restart(tmp_path: Path) -> None:
    file = LatchFile(tmp_path / "latch.json")
    file.store(SET_AT_2)
    file.store(None)
    file.store(None)
    assert file.load(0.0) is None


def test_storing_leaves_no_other_file(tmp_path: Path) -> None:
    LatchFile(tmp_path / "latch.json").store(SET_AT_2)
    assert [path.name for path in tmp_path.iterdir()] == ["latch.json"]


@pytest.mark.parametrize(
    "content",
    [
        *[b"", b"{", b"null", b"\0" * 64, b"\xff\xfe", b"[" * 100_000, b'{"reason": "ScopeViolation"}'],
        pytest.param(b'{"reason": "", "since": 1, "attempt": 1}', id="a-reason-that-reads-as-not-held"),
        pytest.param(b'{"reason": "a", "since": 1, "attempt": -1}', id="an-attempt-that-any-policy-exceeds"),
        pytest.param(b'{"reason": "a", "since": 1, "attempt": %b}' % (b"9" * 30), id="an-attempt-too-large-to-report"),
        pytest.param(b'{"reason": "a", "since": 1e999, "attempt": 1}', id="a-time-out-of-range"),
    ],
)
def test_a_file_that_cannot_be_read_holds_the_pod_cold(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "latch.json").write_bytes(content)
    latch = LatchFile(tmp_path / "latch.json").load(9.0)
    assert latch == Latch("LatchUnreadable", 9.0, None)

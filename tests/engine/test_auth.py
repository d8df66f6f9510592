"""The token file, which the sidecar may still be writing."""

import threading
from pathlib import Path

import pytest
from kvsteward_engine.auth import read_token
from kvsteward_engine.errors import StartError

TOKEN = "t" * 32


def test_the_token_is_read_without_its_line_end(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    assert read_token(tmp_path / "token", 0) == TOKEN.encode()


def test_a_token_that_comes_later_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "token"
    writer = threading.Timer(0.3, lambda: file.write_text(TOKEN))
    writer.start()
    assert read_token(file, 30) == TOKEN.encode()
    writer.join()


@pytest.mark.parametrize("content", ["", "\n", "short", " " * 40])
def test_a_file_without_a_token_never_opens_the_door(tmp_path: Path, content: str) -> None:
    (tmp_path / "token").write_text(content)
    with pytest.raises(StartError, match="holds no token"):
        read_token(tmp_path / "token", 0)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=f"{tmp_path} can't be read"):
        read_token(tmp_path, 0)

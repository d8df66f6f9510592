"""Streams of tokens give whole characters, and nothing of or past a stop string."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvsteward_engine.detokenizer import TextStream

BYTES = [bytes([i]) for i in range(256)]


def all_of(stream: TextStream, ids: list[int]) -> str:
    return "".join(stream.push([i]) for i in ids) + stream.finish()


def test_a_character_of_four_bytes_comes_out_with_its_last_byte() -> None:
    stream = TextStream(BYTES)
    assert [stream.push([byte]) for byte in "\N{GRINNING FACE}".encode()] == ["", "", "", "\N{GRINNING FACE}"]


def test_a_character_cut_off_by_the_end_becomes_one_replacement_character() -> None:
    stream = TextStream(BYTES)
    assert stream.push("a\u20ac".encode()[:-1]) == "a"
    assert stream.finish() == "\ufffd"


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    assert all_of(TextStream([b"a", b"b"]), [0, 7, 1]) == "ab"


def test_only_the_answers_first_space_is_stripped() -> None:
    assert all_of(TextStream([b" a", b" "], strip_first_space=True), [1, 0, 0]) == " a a"
    assert all_of(TextStream([b" a"], strip_first_space=True), [0, 0]) == "a a"
    assert all_of(TextStream([b" a"]), [0, 0]) == " a a"


@given(st.text(), st.data())
def test_any_cut_into_tokens_gives_the_same_text(text: str, data: st.DataObject) -> None:
    ids = list(text.encode())
    stream, got = TextStream(BYTES), ""
    while ids:
        n = data.draw(st.integers(1, len(ids)))
        got += stream.push(ids[:n])
        assert "\ufffd" not in got or "\ufffd" in text
        del ids[:n]
    assert got + stream.finish() == text


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        pytest.param("one two three", ["two"], "one ", id="inside"),
        pytest.param("aab", ["aab"], "", id="the whole text"),
        pytest.param("aaab", ["aab"], "a", id="a start that turns out to begin one later"),
        pytest.param("ab", ["abc"], "ab", id="a start that never completes"),
        pytest.param("xyz", ["z", "yz"], "x", id="the earliest start wins, whatever the order"),
        pytest.param("\u00e9END", ["\u00e9E"], "", id="over a character of two bytes"),
        pytest.param("abc", [], "abc", id="none"),
    ],
)
def test_text_ends_before_the_stop_string(text: str, stops: list[str], expected: str) -> None:
    stream = TextStream(BYTES, stops)
    assert all_of(stream, list(text.encode())) == expected
    assert stream.stopped == (expected != text)


def test_nothing_that_may_become_a_stop_string_is_let_out() -> None:
    stream = TextStream(BYTES, ["STOP"])
    assert [stream.push(part) for part in (b"go S", b"TO", b"X ST", b"OP more")] == ["go ", "", "STOX ", ""]
    assert stream.stopped
    assert stream.push(b"later") == "" and stream.finish() == ""


@pytest.mark.parametrize(
    "others",
    [
        pytest.param("b" + "a" * 1023, id="from-its-second-character-on"),
        pytest.param("a" * 1000 + "b" * 24, id="to-its-last-ones"),
    ],
)
def test_long_stop_strings_that_almost_match_cost_little(others: str) -> None:
    """Each token is looked at by the thread that steps the engine, for everybody: 8 ms apiece it once took."""
    stream = TextStream([b"a"], ["a" * 1024, *[others] * 15])
    began = time.process_time()
    assert "".join(stream.push([0]) for _ in range(1000)) == ""
    assert time.process_time() - began < 1


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_a_stream_equals_cutting_the_whole_text(text: str, stops: list[str], data: st.DataObject) -> None:
    ids, got = list(text.encode()), ""
    stream = TextStream(BYTES, stops)
    while ids and not stream.stopped:
        n = data.draw(st.integers(1, len(ids)))
        got += stream.push(ids[:n])
        del ids[:n]
    got += stream.finish()
    # The first stop string to be complete ends the stream, so the cut is somewhere at which one begins.
    ends = [text.find(stop) for stop in stops if stop in text]
    if not ends:
        assert got == text
    else:
        assert any(got == text[:at] for at in range(len(text)) if any(text.startswith(stop, at) for stop in stops))
        assert not any(stop in got for stop in stops)

"""The engine's outcome never reaches a client, however the network cuts the stream; everything else does, in order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvsteward_sidecar.events import MAX_EVENT, EventFilter
from kvsteward_sidecar.upstream import EngineBroke

OUTCOME = b'{"request":"1","mode":"Cold"}'
COMMENT = b": kv-outcome " + OUTCOME + b"\n\n"
TAIL = b"data: [DONE]\n\n"
EVENTS = [
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
    b'data: {"text":": kv-outcome {}\\n\\n: kv-outcome {}"}\n\n',
    b": a comment of another kind\n\n",
    b"event: x\ndata: 1\n\n",
]


def passed(pieces: list[bytes]) -> tuple[bytes, bytes | None]:
    events = EventFilter()
    data = b"".join(events.feed(piece) for piece in pieces) + events.rest()
    return data, events.outcome


@given(st.lists(st.sampled_from(EVENTS), max_size=4), st.data())
def test_any_cut_of_the_stream_gives_all_but_the_outcome(sent: list[bytes], data: st.DataObject) -> None:
    whole = b"".join([*sent, COMMENT, TAIL])
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=12)))
    pieces = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert passed(pieces) == (b"".join([*sent, TAIL]), OUTCOME)


def test_one_byte_at_a_time() -> None:
    whole = EVENTS[0] + COMMENT + TAIL
    assert passed([whole[i : i + 1] for i in range(len(whole))]) == (EVENTS[0] + TAIL, OUTCOME)


def test_a_whole_event_is_not_held_back() -> None:
    events = EventFilter()
    assert events.feed(EVENTS[0]) == EVENTS[0]
    assert events.feed(EVENTS[1] + b"data: hal") == EVENTS[1]
    assert events.feed(b"f\n\n") == b"data: half\n\n"


def test_a_stream_that_ends_within_the_comment_shows_nothing_of_it() -> None:
    assert passed([EVENTS[0], COMMENT[:-2]]) == (EVENTS[0], None)
    assert passed([EVENTS[0], COMMENT[:5]]) == (EVENTS[0], None)


def test_a_stream_that_ends_without_a_blank_line_keeps_its_tail() -> None:
    assert passed([EVENTS[0], b"data: [DONE]\n"]) == (EVENTS[0] + b"data: [DONE]\n", None)


def test_the_first_data_event_is_noticed_and_comments_are_not_taken_for_it() -> None:
    events = EventFilter()
    events.feed(b": ping\n\n")
    assert not events.begun
    events.feed(b"data: ")
    assert not events.begun
    events.feed(b"1\n\n")
    assert events.begun


@pytest.mark.parametrize(
    ("chunk", "passes"),
    [
        pytest.param(b"9\r\ndata: 1\n\n\r\n", True, id="one-event"),
        pytest.param(b"7\r\ndata: 1\r\n", False, id="half-an-event"),
        pytest.param(b"e\r\n: kv-outcome {\n\n\r\n", False, id="the-outcome"),
    ],
)
def test_a_chunk_passes_unseen_only_if_it_is_whole_events_without_the_outcome(chunk: bytes, passes: bool) -> None:
    events = EventFilter()
    assert not events.passes(chunk)  # not the first
    events.feed(EVENTS[0])
    assert events.passes(chunk) is passes
    events.feed(b"data: hal")
    assert not events.passes(chunk)  # not while something is held back


def test_an_event_without_an_end_breaks_the_answer() -> None:
    events = EventFilter()
    for _ in range(MAX_EVENT // 65_536):
        assert events.feed(b"x" * 65_536) == b""
    with pytest.raises(EngineBroke):
        events.feed(b"x")

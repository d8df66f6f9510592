"""An answer's server-sent events on their way through: whole ones pass, the engine's outcome comment is taken out.

Works on whole reads, never line by line. Inside an event's JSON a line feed is always escaped, so the comment can only
be found where an event begins.
"""

from kvsteward_contract.wire import OUTCOME_COMMENT

from .upstream import EngineBroke

_END = b"\n\n"
_CHUNK_END = _END + b"\r\n"
_DATA = b"data:"
MAX_EVENT = 4 * 1024 * 1024  # bytes of one unfinished event; past it the answer is broken


class EventFilter:
    """State of one stream: what is held back because its event isn't complete, and the outcome once it came."""

    __slots__ = ("_held", "begun", "outcome")

    def __init__(self) -> None:
        self._held = b""
        self.begun = False  # a data event has passed
        self.outcome: bytes | None = None  # JSON, as the engine wrote it

    def feed(self, data: bytes) -> bytes:
        """What of the stream may go on to the client now: whole events. Raises EngineBroke when an event has no end."""
        if self._held:
            data = self._held + data
            self._held = b""
        if not data.endswith(_END):
            end = data.rfind(_END)
            cut = 0 if end < 0 else end + 2
            self._held = data[cut:]
            if len(self._held) > MAX_EVENT:
                raise EngineBroke(f"an event of the engine is longer than {MAX_EVENT} bytes")
            data = data[:cut]
        if OUTCOME_COMMENT in data:
            data = self._without_outcome(data)
        if not self.begun:
            self.begun = data.startswith(_DATA) or b"\n\ndata:" in data
        return data

    def passes(self, chunk: bytes) -> bool:
        """Whether one chunk, framing included, may go on as it is: whole events, no outcome in them, not the first."""
        return self.begun and not self._held and chunk.endswith(_CHUNK_END) and OUTCOME_COMMENT not in chunk

    def rest(self) -> bytes:
        """The tail of a stream that ended without a blank line, unless it is (the start of) the outcome comment."""
        held, self._held = self._held, b""
        return b"" if held.startswith(b":") else held

    def _without_outcome(self, data: bytes) -> bytes:
        kept = []
        for event in data.split(_END):
            if event.startswith(OUTCOME_COMMENT):
                self.outcome = event[len(OUTCOME_COMMENT) :]
            else:
                kept.append(event)
        return _END.join(kept)

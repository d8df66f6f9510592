"""Token ids to text, a few at a time: whole characters only, and nothing past a stop string.

Pure; the tokenizer hands in each token's bytes.
"""

import codecs
from collections.abc import Iterable, Sequence


class TextStream:
    """The text of one answer as its tokens arrive.

    Text that could still become something else is held back: the first bytes of a character that spans tokens, and
    a tail that is the start of a stop string. Once a stop string is met, `stopped` is True and no text follows it.
    Every token costs time proportional to its own text (and, with stop strings, to the longest of them).
    """

    def __init__(self, pieces: Sequence[bytes], stops: Iterable[str] = (), strip_first_space: bool = False) -> None:
        self._pieces = pieces  # token id -> bytes; ids past its end (padding of the embedding) have no text
        self._stops = list(stops)  # the one that what is held back may become comes first
        self._strip = strip_first_space  # SentencePiece marks a word's start with a space, an answer's first too
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that is certain after these tokens; empty once stopped."""
        if self.stopped:
            return ""
        pieces, known = self._pieces, len(self._pieces)
        return self._release(self._utf8.decode(b"".join([pieces[i] for i in token_ids if i < known])))

    def finish(self) -> str:
        """The text still held back, as no token follows; an incomplete character ends as U+FFFD."""
        if self.stopped:
            return ""
        text = self._release(self._utf8.decode(b"", final=True))
        if self.stopped:
            return text
        held, self._held = self._held, ""
        return text + held

    def _release(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        if not self._stops:
            return text
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = 0
        for place, stop in enumerate(self._stops):
            overlap = _overlap(text, stop, keep)
            if overlap > keep:
                keep = overlap
                self._stops[0], self._stops[place] = stop, self._stops[0]
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str, least: int) -> int:
    """Length of the longest end of `text` that is a proper start of `stop`; 0 if it isn't longer than `least`."""
    first, at = stop[0], max(0, len(text) - len(stop) + 1)
    while len(text) - (at := text.find(first, at)) > least and at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at += 1
    return 0

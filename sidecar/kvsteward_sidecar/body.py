"""A request's JSON body: bounded, checked, reduced to the keys that a route allows, and written anew.

Values stay as the bytes they came in (`msgspec.Raw`), so that a prompt is never turned into objects here. The body is
always encoded again and never spliced: a key written twice or with escapes is one key by then, and so no second
reading of the same bytes can find a salt that this one did not.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from .routes import Route

MAX_BYTES = 4 * 1024 * 1024
MAX_RECEIVING = 128 * 1024 * 1024  # bytes of bodies that are on their way in, all clients together

# Keys that steer the cache or name what is ours are counted apart, so that an attempt is seen; the rest is "other".
WATCHED_KEYS = frozenset({"cache_salt", "kv_transfer_params", "prompt_cache_key", "vllm_xargs", "request_id"})
OTHER_KEY = "other"
_SESSION_KEY = "user"  # read for the cohort, of no use to the engine


class BodyError(ValueError):
    """The client must change the body: `status`, and one sentence that says what is wrong."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class NoRoom(Exception):
    """Too many bodies are on their way in; the client may try again."""


class Room:
    """What bodies that aren't complete may take together: whoever sends slowly can't fill the sidecar's memory."""

    def __init__(self, limit: int) -> None:
        self._left = limit

    def take(self, size: int) -> None:
        """Raises NoRoom; nothing was taken then."""
        if size > self._left:
            raise NoRoom
        self._left -= size

    def give(self, size: int) -> None:
        self._left += size


@dataclass(slots=True)
class Body:
    """What the sidecar knows of a body. `data` is what the engine gets; `take` it to pass it on and forget it, since
    hundreds of long prompts wait for their first token at a time."""

    data: bytes
    user: str = ""  # OpenAI's `user`; "" = none
    supported: bool = True  # False: reuse would change the answer (prompt logprobs), so it must run cold
    dropped: tuple[str, ...] = ()  # label of each key that was not passed on

    def take(self) -> bytes:
        data, self.data = self.data, b""
        return data


# Up to this long every key is looked at. Past it foreign keys are skipped unseen and count as one: 400,000 of them
# would hold up the event loop, and with it every stream and the kill switch, for half a second.
LOOKED_AT = 65_536

_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encoder = msgspec.json.Encoder()
_ABSENT = (b"null", b"false")
_ABSENT_RAW = msgspec.Raw()


async def read(chunks: AsyncIterator[bytes], limit: int, room: Room) -> bytes:
    """The whole body. Raises BodyError 413 as soon as it is longer than `limit` bytes, NoRoom as soon as there is none
    for what has come of it."""
    parts: list[bytes] = []
    size = 0
    try:
        async for chunk in chunks:
            if size + len(chunk) > limit:
                raise too_large(limit)
            room.take(len(chunk))
            size += len(chunk)
            parts.append(chunk)
        return parts[0] if len(parts) == 1 else b"".join(parts)
    finally:
        room.give(size)


def too_large(limit: int) -> BodyError:
    return BodyError(413, f"The request body is larger than {limit} bytes. Send a shorter prompt.")


def reduce(data: bytes, route: Route) -> Body:
    """Checks a body and keeps what `route` allows. Raises BodyError 400."""
    try:
        if not data.isascii():
            data.decode()  # raw values are not checked by the decoder
        fields = _decoder.decode(data) if len(data) <= LOOKED_AT else _known(data, route)
    except msgspec.ValidationError:
        raise BodyError(400, "The request body must be a JSON object.") from None
    except UnicodeDecodeError:
        raise BodyError(400, "The request body is not valid UTF-8.") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise BodyError(400, f"The request body is not valid JSON: {error}.") from None
    if fields.keys() <= route.keys:
        return Body(_encoder.encode(fields), supported=_supported(fields))
    user = _text(fields.pop(_SESSION_KEY, None))
    foreign = fields.keys() - route.keys
    dropped = tuple(key if key in WATCHED_KEYS else OTHER_KEY for key in foreign)
    for key in foreign:
        del fields[key]
    return Body(_encoder.encode(fields), user, _supported(fields), dropped)


def _known(data: bytes, route: Route) -> dict[str, msgspec.Raw]:
    """The fields that anything is known of and, for all others, one that nobody knows."""
    decoder, strict = _decoders(route)
    found = decoder.decode(data)
    pairs = ((name, getattr(found, name)) for name in decoder.type.__struct_fields__)
    fields = {name: value for name, value in pairs if value is not _ABSENT_RAW}
    try:
        strict.decode(data)
    except msgspec.ValidationError:
        fields[""] = _ABSENT_RAW
    return fields


@cache
def _decoders(route: Route) -> tuple[msgspec.json.Decoder[Any], msgspec.json.Decoder[Any]]:
    names = sorted(route.keys | WATCHED_KEYS | {_SESSION_KEY})
    fields: list[tuple[str, type, msgspec.Raw]] = [(name, msgspec.Raw, _ABSENT_RAW) for name in names]
    known, only = (msgspec.defstruct("Fields", fields, forbid_unknown_fields=strict) for strict in (False, True))
    return msgspec.json.Decoder(known), msgspec.json.Decoder(only)


def _supported(fields: dict[str, msgspec.Raw]) -> bool:
    """False when the answer has log probabilities of the prompt: a reused page has no logits to make them from.

    A count of 0 asks for them too (for those of the tokens that stand there), so only null and false mean none.
    """
    return not (_given(fields, "prompt_logprobs") or (_given(fields, "echo") and _given(fields, "logprobs")))


def _given(fields: dict[str, msgspec.Raw], key: str) -> bool:
    value = fields.get(key)
    return value is not None and bytes(value) not in _ABSENT


def _text(value: msgspec.Raw | None) -> str:
    try:
        return "" if value is None else msgspec.json.decode(value, type=str)
    except msgspec.DecodeError:  # anything else, numbers that nothing can hold among it
        return ""

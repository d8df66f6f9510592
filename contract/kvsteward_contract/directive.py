"""What the sidecar tells the engine (`Directive`, `EnginePolicy`) and hears back (`EngineState`, `Outcome`)."""

from enum import Enum
from typing import Annotated

import msgspec
from msgspec import Meta

Hex32 = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Hex64 = Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")]
Count = Annotated[int, Meta(ge=0)]
Short = Annotated[str, Meta(max_length=256)]


class Mode(str, Enum):
    """What the engine may do with the cache for one request."""

    COLD = "Cold"  # match nothing, publish nothing, predict nothing
    SHADOW = "Shadow"  # predict in the content-free index; match and publish no pages
    REUSE = "Reuse"  # match, publish and predict


class Directive(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", omit_defaults=True):
    """The sidecar's word on one request, in the `X-KV-Directive` header as ASCII JSON.

    The engine runs a request Cold, and never fails it, when the directive is missing or malformed, when its epoch is
    not the engine's at match time, or when its retention class is unknown.
    """

    request: Hex32
    mode: Mode
    epoch: Count
    namespace: Hex64 = ""  # the scope's salt; empty when Cold
    scope: Short = ""  # "Private/<opaque tenant digest>": stored in each page apart from its key
    retention: Short = ""  # names a class of EnginePolicy.retention
    version: Short = ""  # of the policy, for the ledger
    queue: Short = ""  # whose turn it takes in fair admission: an opaque tenant digest, empty for the unidentified


class Retention(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """How long, and how much of, a scope's pages stay once no request holds them."""

    quota_percent: Annotated[int, Meta(ge=0, le=100)] = 100  # of the pool; a ceiling on unreferenced pages a scope
    max_age_seconds: Count = 0  # since last use; 0 = no limit
    max_in_flight: Count = 0  # running requests of a scope; 0 = no limit


class EnginePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """`POST /kv/v1/policy`: answered with `EngineState` once nothing of an older epoch can match any more.

    An epoch below the engine's is refused with 409. An empty `retention` keeps the last table: nobody is evicted
    because a table could not be read.
    """

    epoch: Count
    version: Short
    retention: dict[str, Retention]
    output_key: Hex64 = ""  # HMAC key of output digests; empty = no digests
    violations: Count = 0  # of this engine's scope violations, those that the sidecar has answered with a latch


class EngineState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What the engine is and which epoch it has confirmed."""

    instance: str  # random for each process: changes when the engine restarts
    epoch: int
    version: str
    last_match_seconds: float  # Unix time of the last new match, 0 = none yet
    build: str
    dtype: str
    block_tokens: int
    pool_tokens: int
    bytes_per_token: int
    max_tokens: int
    model: str
    violations: int = 0  # scope violations since the process started
    latched: bool = False  # some of them are not in `EnginePolicy.violations` yet: the engine runs everything Cold


class MissReason(str, Enum):
    """Why a page of a prompt was not reused."""

    UNSEEN_BLOCK = "UnseenBlock"  # never seen, or so long ago that the ghost list forgot it
    VERSION_MISMATCH = "VersionMismatch"  # seen under another model, tokenizer or adapter revision
    EXPIRED_PAGE = "ExpiredPage"  # seen, but longer ago than the scope's max age
    SCOPE_MISMATCH = "ScopeMismatch"  # resident under another scope; shown to admins only
    EVICTED = "Evicted"  # seen within max age, and evicted since
    SHORT_PROMPT = "ShortPrompt"  # the prompt has no full page that may be reused


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What became of one request. In a stream an SSE comment before `data: [DONE]`, elsewhere a response header;
    for a request whose client left, `GET /kv/v1/outcomes/{request}`."""

    request: str
    mode: Mode  # in force after the epoch check
    epoch: int  # the engine's, when it matched
    prompt_tokens: int = 0
    eligible_tokens: int = 0  # leading full pages this request may use that were seen within max age
    resident_tokens: int = 0  # those still in the pool (or, in Shadow, in the index)
    reused_tokens: int = 0  # those used
    misses: dict[str, int] = {}  # MissReason -> pages
    output_tokens: int = 0
    tokenize_seconds: float = 0.0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    peak_pages: int = 0
    stored_pages: int = 0
    output_digest: str = ""
    finish: str = ""  # stop, length, cancelled or error
    preemptions: int = 0
    scope_violation: bool = False


_encoder = msgspec.json.Encoder()
_directive = msgspec.json.Decoder(Directive)
_outcome = msgspec.json.Decoder(Outcome)


def encode(message: Directive | EnginePolicy | EngineState | Outcome) -> bytes:
    """Compact JSON; ASCII, and so fit for a header, because every string in these types is."""
    return _encoder.encode(message)


def decode_directive(data: bytes | str) -> Directive:
    """Raises msgspec.ValidationError or msgspec.DecodeError, whose text names the field."""
    return _directive.decode(data)


def decode_outcome(data: bytes | str) -> Outcome:
    """Raises msgspec.ValidationError or msgspec.DecodeError, whose text names the field."""
    return _outcome.decode(data)

"""The bearer token that every route but `GET /health` wants. A port-forward lands on loopback too, so loopback alone
keeps nobody out."""

import hmac
import time
from pathlib import Path

from multidict import CIMultiDictProxy

from kvsteward_engine.errors import StartError

MIN_TOKEN = 16  # characters
_POLL_SECONDS = 0.1


def read_token(file: Path, patience: float) -> bytes:
    """The token in `file`, waiting up to `patience` seconds for it: the sidecar may be writing it just now.
    Raises `StartError`."""
    deadline = time.monotonic() + patience
    while True:
        try:
            token = file.read_bytes().strip()
        except FileNotFoundError:
            token = b""
        except OSError as error:
            raise StartError(f"--token-file {file} can't be read: {error.strerror}") from error
        if len(token) >= MIN_TOKEN:
            return token
        if time.monotonic() >= deadline:
            raise StartError(f"--token-file {file} holds no token of at least {MIN_TOKEN} characters")
        time.sleep(_POLL_SECONDS)


def authorised(headers: CIMultiDictProxy[str], token: bytes) -> bool:
    """True if the request has exactly one Authorization header, and it is `Bearer <token>`."""
    given = headers.getall("Authorization", ())
    if len(given) != 1:
        return False
    # Header values come with undecodable bytes as surrogates.
    scheme, _, secret = given[0].encode("utf-8", "surrogateescape").partition(b" ")
    return hmac.compare_digest(secret.strip(), token) and scheme.lower() == b"bearer"

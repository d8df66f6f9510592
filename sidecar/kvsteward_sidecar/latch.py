"""The latch: this pod is held on the cold path until someone releases it, over restarts of the sidecar too.

`Latch` says why and since which `attempt`; the pure functions decide; `LatchFile` keeps it in the pod's state folder.
Set by `POST /v1/cold` and by a ScopeViolation, released by `DELETE /v1/cold` or by a higher `attempt`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

OPERATOR_REASON = "ColdRequested"  # POST /v1/cold
VIOLATION_REASON = "ScopeViolation"
UNREADABLE_REASON = "LatchUnreadable"


class Latch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Held cold: `reason` is a CamelCase word, `since` Unix seconds, `attempt` the policy's when it was set.

    `attempt` None: set before any policy was known; the first one's attempt is taken over, so that a policy that merely
    arrives doesn't release it.
    """

    reason: Annotated[str, Meta(min_length=1)]
    since: float
    attempt: Annotated[int, Meta(ge=0, le=2**53)] | None


def seen_attempt(latch: Latch | None, attempt: int) -> Latch | None:
    """The latch once a policy with this `attempt` is in force: released by a higher one, else still held."""
    if latch is None:
        return None
    if latch.attempt is None:
        return msgspec.structs.replace(latch, attempt=attempt)
    return None if attempt > latch.attempt else latch


class LatchFile:
    """The latch on disk. A file that can't be read holds the pod cold: a lost latch would be a silent release."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self, now: float) -> Latch | None:
        """None when there is no file."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=Latch)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError):
            return Latch(UNREADABLE_REASON, now, None)

    def store(self, latch: Latch | None) -> None:
        """Raises OSError; the file is either the old one or the new one, never half of it."""
        if latch is None:
            self.path.unlink(missing_ok=True)
            return
        fresh = self.path.with_suffix(".new")
        with fresh.open("wb") as file:
            file.write(msgspec.json.encode(latch))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.path)

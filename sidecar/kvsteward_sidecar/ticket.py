"""One request between the traffic side and the control side: how it came, what it was allowed, how it left."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvsteward_contract.decision import Decision

from .permission import Permission

PRIVATE_KIND = "Private"
NO_SCOPE = "None"


class Ending(str, Enum):
    """How a request left, as the traffic side saw it."""

    COMPLETED = "completed"  # the engine's answer reached the client in full
    CANCELLED = "cancelled"  # the client went away; the outcome is fetched from the engine afterwards
    FAILED = "failed"  # the engine died or broke the answer
    REFUSED = "refused"  # the engine answered 4xx or 429, nothing was computed


@dataclass(frozen=True, slots=True)
class Grant:
    """What one tenant's requests carry to the engine: derived once, opaque, never the tenant's name."""

    digest: str  # opaque tenant digest, hex
    namespace: str  # scope salt, hex
    scope: str  # "Private/<digest>"
    retention: str  # name of a Retention class of the EnginePolicy


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why no request is taken right now: answer `status` with `Retry-After` and this OpenAI error."""

    status: int
    code: str
    message: str
    retry_after: int  # seconds


@dataclass(frozen=True, slots=True)
class Arrival:
    """What is known of a request when it is admitted."""

    permission: Permission  # the snapshot the decision was made from
    grant: Grant | None  # None: no tenant
    workload: str  # `permission.workload(header)`
    bucket: int  # cohort bucket, [0, 10000)

    @property
    def scope_kind(self) -> str:
        return PRIVATE_KIND if self.grant is not None else NO_SCOPE


@dataclass(slots=True)
class Ticket:
    """One admitted request, from `admit` to `finish`."""

    request: str  # 32 hex digits: request id, receipt id, header X-KV-Receipt
    decision: Decision
    arrival: Arrival
    directive: bytes  # value of the X-KV-Directive header, ASCII JSON
    time: float  # Unix time of admission
    finished: bool = False

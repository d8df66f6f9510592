"""What the traffic side asks and tells: may this request reuse, what happened to it.

`Control` is the one seam between the request path (routes, body, tenants, upstream, proxy) and everything that
governs it (permission, engine link, latch, receipts, telemetry, drain). Nothing here awaits on a request's way in or
out: `admit` and `finish` are plain calls on precomputed state.

The order a request must keep, with no await between 1 and 3:

1. `permission = control.permission`     one snapshot; it carries the epoch its decisions are made under
2. `decision = decide(facts)`            facts made from that snapshot, `control.grant(...)` and `control.bucket(...)`
3. `ticket = control.admit(...)`         the Directive in the ticket has the snapshot's epoch, so a permission that was
                                         lost meanwhile can't be used: the engine runs another epoch's Directive cold
4. `control.finish(ticket, ...)`         exactly once, whatever happened
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvsteward_contract.decision import Decision
    from kvsteward_contract.directive import Outcome

    from .permission import Permission
    from .tenants import Tenants


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
    workload: str  # a name of the policy's workloads, else "other"
    bucket: int  # cohort bucket, [0, 10000)


@dataclass(slots=True)
class Ticket:
    """One admitted request, from `admit` to `finish`."""

    request: str  # 32 hex digits: request id, receipt id, header X-KV-Receipt
    decision: Decision
    arrival: Arrival
    directive: bytes  # value of the X-KV-Directive header, ASCII JSON
    finished: bool = False


class Control:
    """The seam. Attributes are read by the traffic side and replaced (never changed in place) by the control side."""

    permission: Permission
    tenants: Tenants

    def grant(self, tenant: str) -> Grant:
        """The tenant's opaque scope, salt and retention class under the policy in force."""
        raise NotImplementedError

    def bucket(self, session: str) -> int:
        """Cohort bucket in [0, 10000) of a session id (X-KV-Session, else OpenAI `user`, else the request id)."""
        raise NotImplementedError

    def engine_ready(self) -> bool:
        """True while the engine answers and has its model loaded."""
        raise NotImplementedError

    def refusal(self) -> Refusal | None:
        """Not None: answer so at once (the engine isn't ready, or the drain's second phase has begun)."""
        raise NotImplementedError

    def closing(self) -> bool:
        """True from the start of a drain: answers carry `Connection: close`."""
        raise NotImplementedError

    def dropped(self, field: str, count: int = 1) -> None:
        """Counts what a client sent that was dropped. `field` is one of a fixed, small set of names."""
        raise NotImplementedError

    def admit(self, request: str, decision: Decision, arrival: Arrival) -> Ticket:
        """Takes the request into account as in flight and makes its Directive."""
        raise NotImplementedError

    def finish(self, ticket: Ticket, outcome: Outcome | None, ttft: float | None, ending: Ending) -> str:
        """Ends the request: in-flight count, metrics, receipt. Returns the receipt id. A second call raises.

        `ttft`: seconds from arrival to the first byte of content, None when none came. `outcome` None with CANCELLED
        or FAILED: the control side asks the engine for it and writes the receipt when it has an answer.
        """
        raise NotImplementedError

"""Events: told exactly once, because each has a name that follows from what is stored in the status.

A history entry gives hash(uid, sequence, index), a condition hash(uid, reason, lastTransitionTime). The status is
stored first; creating an event whose name is taken means that it was told already. So they can be told again after a
restart, as long as what they follow from is younger than RETELL_SECONDS.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvsteward_contract import wire
from kvsteward_contract.identity import length_delimited
from kvsteward_contract.status import Condition, HistoryEntry, PolicyStatus

from .api import FIELD_MANAGER
from .history import Cause
from .objects.naming import Owner
from .times import to_seconds

RETELL_SECONDS = 600.0
MESSAGE_LENGTH = 1024  # what the API server takes

# (condition, status, reason of the condition or "" for any): (reason of the event, its type)
CONDITION_EVENTS = {
    ("Accepted", "True", ""): ("PolicyAccepted", "Normal"),
    ("Accepted", "False", ""): ("PolicyRejected", "Warning"),
    ("Available", "False", "PodsCreated"): ("PodsCreated", "Normal"),
    ("Progressing", "False", "RolloverDeadlineExceeded"): ("RolloverDeadlineExceeded", "Warning"),
    ("ColdPath", "True", ""): ("ColdPathEngaged", "Warning"),
    ("ColdPath", "False", "Released"): ("ColdPathReleased", "Normal"),
    ("Degraded", "True", "ScopeViolation"): ("ScopeViolation", "Warning"),
    ("Degraded", "True", "SidecarUnreachable"): ("SidecarUnreachable", "Warning"),
    ("Degraded", "True", "AdminTokenRefused"): ("SidecarUnreachable", "Warning"),
    ("Degraded", "True", "CapacityWarning"): ("CapacityWarning", "Warning"),
}
RAISED_TO = {"Shadow": "ShadowStarted", "Canary": "CanaryStarted", "Full": "Promoted"}


@dataclass(frozen=True, slots=True)
class Telling:
    """One event to be told: `name` is what makes it happen once."""

    name: str
    reason: str
    kind: str  # Normal or Warning
    message: str
    time: str


def tellings(owner: Owner, status: PolicyStatus, now: float) -> list[Telling]:
    """The events of a stored status that may not have been told yet, oldest first."""
    found = [*_of_history(owner, status), *_of_conditions(owner, status)]
    return sorted((one for one in found if to_seconds(one.time) >= now - RETELL_SECONDS), key=lambda one: one.time)


def _of_history(owner: Owner, status: PolicyStatus) -> Iterator[Telling]:
    for entry in status.history:
        if (told := _history_event(entry, status)) is not None:
            reason, kind, message = told
            yield Telling(_name(owner, str(entry.sequence), "0"), reason, kind, message, entry.time)


def _history_event(entry: HistoryEntry, status: PolicyStatus) -> tuple[str, str, str] | None:
    """Reason, type and message; None for what is not worth an event."""
    percent = f" at {status.canary_percent} %" if entry.to == "Canary" and status.stage == "Canary" else ""
    newest = status.generations[-1].name if status.generations else "a new generation"
    match entry.reason:
        case Cause.STAGE_RAISED:
            if (reason := RAISED_TO.get(entry.to)) is None:
                return None
            return reason, "Normal", f"stage {entry.from_ or 'Cold'} to {entry.to}{percent}"
        case Cause.STAGE_LOWERED:
            return "RolledBack", "Warning", f"stage {entry.from_} to {entry.to}{percent}, lowered by an edit"
        case Cause.CANARY_WIDENED:
            return "CanaryWidened", "Normal", f"the canary is now{percent}"
        case Cause.CANARY_NARROWED:
            return "RolledBack", "Warning", f"the canary is now{percent}, narrowed by an edit"
        case Cause.PAUSED:
            return "RolloutPaused", "Normal", f"stage {entry.to} is held; a raise waits, a lowering acts"
        case Cause.ROLLOVER_STARTED:
            return (
                "RolloverStarted",
                "Warning",
                f"{newest} replaces the pods that serve: under advance: Manual at rollout.stage at once, cache empty",
            )
        case Cause.ROLLOVER_DRAINED:
            return "RolloverDrained", "Normal", f"the pods that {newest} replaced have gone"
    return None


def _of_conditions(owner: Owner, status: PolicyStatus) -> Iterator[Telling]:
    for condition in status.conditions:
        if (told := _condition_event(condition)) is not None:
            reason, kind = told
            name = _name(owner, reason, condition.last_transition_time)
            yield Telling(name, reason, kind, condition.message, condition.last_transition_time)


def _condition_event(condition: Condition) -> tuple[str, str] | None:
    key = (condition.type, condition.status)
    return CONDITION_EVENTS.get((*key, condition.reason)) or CONDITION_EVENTS.get((*key, ""))


def _name(owner: Owner, *parts: str) -> str:
    return f"{owner.name}.{hashlib.sha256(length_delimited(owner.uid, *parts)).hexdigest()[:20]}"


def event(owner: Owner, telling: Telling) -> dict[str, Any]:
    """The core/v1 Event."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": telling.name, "namespace": owner.namespace},
        "involvedObject": {
            "apiVersion": wire.API_VERSION,
            "kind": wire.KIND,
            "namespace": owner.namespace,
            "name": owner.name,
            "uid": owner.uid,
        },
        "reason": telling.reason,
        "message": telling.message[:MESSAGE_LENGTH],
        "type": telling.kind,
        "firstTimestamp": telling.time,
        "lastTimestamp": telling.time,
        "count": 1,
        "source": {"component": FIELD_MANAGER},
        "reportingComponent": FIELD_MANAGER,
    }

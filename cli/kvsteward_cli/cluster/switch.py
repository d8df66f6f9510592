"""Whether pods have confirmed the kill switch, and when each last matched cached state. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .answers import Answer
from .tables import ago, moment, table

ENGINE, SIDECAR = "engine", "sidecar"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`last_match` is Unix seconds by the pod's clock, None = no match since its engine started, or not known."""

    pod: str
    confirmed: bool
    why: str
    last_match: float | None = None
    seconds_ago: float | None = None  # by the pod's own clock


def runs(pod: dict[str, Any], container: str) -> bool:
    """Whether a container of a pod is running now."""
    status = pod.get("status") or {}
    containers = [*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ())]
    return any(one["name"] == container and "running" in (one.get("state") or {}) for one in containers)


def confirms(answer: Answer, generation: int) -> Verdict:
    """From an observation. `generation`: metadata.generation of the edit; a confirmation of an earlier one is none."""
    if answer.body is None:
        return Verdict(answer.pod, False, answer.problem)
    seen = answer.body
    match, now = float(seen.get("lastMatchSeconds") or 0), float(seen.get("time") or 0)
    last, seconds = (match, max(0.0, now - match)) if match else (None, None)
    resource = int(seen.get("resourceGeneration") or 0)
    if not seen.get("coldRequested") or (resource and resource < generation):
        return Verdict(answer.pod, False, "has not seen the switch yet", last, seconds)
    if not seen.get("coldConfirmed"):
        return Verdict(answer.pod, False, "its engine has not confirmed yet", last, seconds)
    return Verdict(answer.pod, True, "its engine makes no new match", last, seconds)


def idle(pod: str) -> Verdict:
    """A pod that can't match anything; when its engine starts, it starts cold."""
    return Verdict(pod, True, "its engine does not run")


def shown(verdicts: Sequence[Verdict]) -> str:
    return table(
        ("POD", "CONFIRMED", "LAST NEW MATCH", "AGO", "WHY"),
        ((one.pod, one.confirmed, _moment(one.last_match), _ago(one.seconds_ago), one.why) for one in verdicts),
    )


def as_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "name": verdict.pod,
        "confirmed": verdict.confirmed,
        "why": verdict.why,
        "lastMatch": _moment(verdict.last_match) or None,
        "lastMatchSecondsAgo": None if verdict.seconds_ago is None else round(verdict.seconds_ago, 3),
    }


def unconfirmed(verdicts: Sequence[Verdict], seconds: float) -> str:
    """The sentence that names the pods still missing, "" when there are none."""
    missing = [f"{one.pod} ({one.why})" for one in verdicts if not one.confirmed]
    if not missing:
        return ""
    count = f"{len(missing)} of {len(verdicts)} pods have"
    return f"the kill switch is engaged, but {count} not confirmed within {seconds:g} s: {', '.join(missing)}"


def _moment(seconds: float | None) -> str:
    return "" if seconds is None else moment(seconds)


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.2f} s" if seconds < 120 else ago(seconds)

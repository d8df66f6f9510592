"""The next stage of a rollout that advances by hand. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvsteward_contract.policy import Advance, KillSwitch, Progress, Stage

from kvsteward_cli.errors import CommandFailed


@dataclass(frozen=True, slots=True)
class Promotion:
    """One step up, and what people should know before they wait for it."""

    before: Stage
    to: Stage
    notes: tuple[str, ...] = ()


def promotion(policy: dict[str, Any]) -> Promotion:
    """One step above the stage that is asked for, once that one is in force.

    Raises CommandFailed: 2 when there is no such step, 1 when it is too early for it.
    """
    name, rollout = policy["metadata"]["name"], policy["spec"].get("rollout") or {}
    advance = rollout.get("advance", Advance.MANUAL.value)
    if advance != Advance.MANUAL.value:
        raise CommandFailed(
            f"{name} advances by itself (advance: {advance}); spec.rollout.stage is the furthest it may go", 2
        )
    try:
        asked = Stage(rollout.get("stage", Stage.SHADOW.value))
    except ValueError as error:
        raise CommandFailed(f"{name}: {error}; a newer kvsteward may know it", 2) from None
    if asked is Stage.FULL:
        raise CommandFailed(f"{name} is at Full: there is no stage beyond it", 2)
    if why := too_early(policy, asked):
        raise CommandFailed(f"{name} was not promoted: {why}")
    to = list(Stage)[asked.rank + 1]
    return Promotion(asked, to, tuple(_notes(name, rollout, to)))


def too_early(policy: dict[str, Any], asked: Stage) -> str:
    """Why the stage that is asked for isn't in force yet, "" when it is."""
    status = policy.get("status") or {}
    conditions = {one["type"]: one for one in status.get("conditions") or ()}
    accepted = conditions.get("Accepted", {})
    if status.get("observedGeneration") != policy["metadata"].get("generation"):
        return "the operator has not seen the last edit yet; is it running?"
    if accepted.get("status") == "False":
        return f"its spec is not accepted ({accepted.get('reason')}): {accepted.get('message')}"
    force = status.get("stage") or Stage.COLD.value
    if force not in Stage._value2member_map_ or Stage(force).rank < asked.rank:
        return f"{asked.value} is asked for already and {force} is in force: {reason(conditions)}"
    return ""


def reason(conditions: dict[str, Any]) -> str:
    """What stands in the way, in the operator's words."""
    for kind in ("Promoted", "Progressing", "Available"):
        if message := (conditions.get(kind) or {}).get("message"):
            return str(message)
    return "the operator has not said why"


def _notes(name: str, rollout: dict[str, Any], to: Stage) -> list[str]:
    notes = []
    if to is Stage.CANARY and not (rollout.get("canary") or {}).get("percent"):
        notes.append(f"canary.percent is 0, so nobody is in the canary: set spec.rollout.canary.percent of {name}")
    if rollout.get("progress") == Progress.PAUSED.value:
        notes.append("the rollout is paused, so this waits for `resume`")
    if rollout.get("killSwitch") == KillSwitch.ENGAGED.value:
        notes.append("the kill switch is engaged, so nothing is reused before `release`")
    return notes

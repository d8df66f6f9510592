"""What happened to a policy, in order: transitions of stage and generation. The newest entries stay in the status."""

from enum import Enum

from kvsteward_contract.policy import Progress, Stage
from kvsteward_contract.status import HISTORY_ENTRIES, HistoryEntry, PolicyStatus

from .generations import Generation, State
from .situation import Running
from .times import to_text


class Cause(str, Enum):
    """Why an entry was made; each stands for one event at most (events.py)."""

    STAGE_RAISED = "StageRaised"
    STAGE_LOWERED = "StageLowered"
    CANARY_WIDENED = "CanaryWidened"
    CANARY_NARROWED = "CanaryNarrowed"
    PAUSED = "Paused"
    RESUMED = "Resumed"
    ROLLOVER_STARTED = "RolloverStarted"
    ROLLOVER_DRAINED = "RolloverDrained"


def extended(prior: PolicyStatus, running: Running, stage: Stage, percent: int, now: float) -> tuple[HistoryEntry, ...]:
    """The history with what this pass brings; `stage` and `percent` are what the serving generation has now."""
    before = prior.stage or Stage.COLD
    sequence = max((entry.sequence for entry in prior.history), default=0)
    entries = list(prior.history)
    for cause in causes(prior, running, before, stage, percent):
        sequence += 1
        entries.append(HistoryEntry(sequence, to_text(now), stage.value, cause.value, before.value))
    return trimmed(entries)


def causes(prior: PolicyStatus, running: Running, before: Stage, stage: Stage, percent: int) -> list[Cause]:
    """What has happened since `prior` was stored."""
    found = []
    known = {one.name for one in prior.generations}
    if known and running.target.name not in known:
        found.append(Cause.ROLLOVER_STARTED)
    if stage.rank > before.rank:
        found.append(Cause.STAGE_RAISED)
    elif stage.rank < before.rank:
        found.append(Cause.STAGE_LOWERED)
    elif stage is Stage.CANARY and percent != prior.canary_percent:
        found.append(Cause.CANARY_WIDENED if percent > prior.canary_percent else Cause.CANARY_NARROWED)
    if any(_drained(one.name, one.state, running.generations) for one in prior.generations):
        found.append(Cause.ROLLOVER_DRAINED)
    paused = running.spec.rollout.progress is Progress.PAUSED
    if paused != is_paused(prior.history):
        found.append(Cause.PAUSED if paused else Cause.RESUMED)
    return found


def _drained(name: str, state: str, now: tuple[Generation, ...]) -> bool:
    return state in (State.DRAINING, State.SERVING) and all(one.name != name for one in now)


def is_paused(history: tuple[HistoryEntry, ...]) -> bool:
    last = next((e.reason for e in reversed(history) if e.reason in (Cause.PAUSED, Cause.RESUMED)), None)
    return last == Cause.PAUSED


def trimmed(entries: list[HistoryEntry]) -> tuple[HistoryEntry, ...]:
    """The newest entries, with the one that says that the rollout is paused, however old that is."""
    kept = entries[-HISTORY_ENTRIES:]
    if is_paused(tuple(entries)) and not is_paused(tuple(kept)):
        kept[0] = next(entry for entry in reversed(entries) if entry.reason == Cause.PAUSED)
    return tuple(kept)

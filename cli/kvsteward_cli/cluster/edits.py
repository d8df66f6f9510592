"""The commands that write the resource: pause, resume, kill, release, promote, rollback. Only fields that exist."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from kvsteward_contract.policy import KillSwitch, Progress

from kvsteward_cli.errors import CommandFailed

from . import switch
from .answers import Answer, gather
from .api import NotFound, Object
from .revisions import Change, Revision, differences, notes, proposed, revisions_of, worded
from .session import Session, setting
from .stages import Promotion, promotion
from .switch import ENGINE, Verdict
from .tables import since, table


def pause(session: Session, given: Namespace) -> int:
    said = "paused: a raise of the stage or the canary waits, a lowering acts"
    return _write(session, given.name, lambda _: {"progress": Progress.PAUSED.value}, said)


def resume(session: Session, given: Namespace) -> int:
    said = "resumed: what is asked for takes effect"
    return _write(session, given.name, lambda _: {"progress": Progress.RUNNING.value}, said)


def release(session: Session, given: Namespace) -> int:
    """The kill switch; with --latches also pods that hold themselves cold."""

    def fields(rollout: Object) -> Object:
        raised = {"attempt": int(rollout.get("attempt", 1)) + 1} if given.latches else {}
        return {"killSwitch": KillSwitch.RELEASED.value, **raised}

    said = "kill switch released: reuse is allowed again as soon as the operator has accepted it"
    return _write(session, given.name, fields, said)


def _write(session: Session, name: str, fields: Callable[[Object], Object], said: str) -> int:
    """Writes fields of spec.rollout, made from what it holds."""
    changes: list[Change] = []

    def decide(policy: Object) -> list[dict[str, Any]]:
        rollout = policy["spec"].get("rollout") or {}
        wanted = fields(rollout).items()
        changes[:] = [Change(f"rollout.{field}", rollout.get(field), value) for field, value in wanted]
        changes[:] = [change for change in changes if change.before != change.after]
        return [setting(field, value) for field, value in wanted if rollout.get(field) != value]

    after = session.edit(name, decide)
    session.show(f"{name} {said}" if changes else f"{name} is so already: nothing was written", _done(after, changes))
    return 0


def promote(session: Session, given: Namespace) -> int:
    made: list[Promotion] = []

    def decide(policy: Object) -> list[dict[str, Any]]:
        made[:] = [promotion(policy)]
        return [setting("stage", made[0].to.value)]

    after = session.edit(given.name, decide)
    step = made[0]
    changes = [Change("rollout.stage", step.before.value, step.to.value)]
    session.show(f"{given.name} promoted from {step.before.value} to {step.to.value}", _done(after, changes))
    for note in step.notes:
        session.note(note)
    return 0


def kill(session: Session, given: Namespace) -> int:
    """Engages the switch before anything else is asked or looked up."""
    policy = session.now(given.name, killSwitch=KillSwitch.ENGAGED.value)
    begun = time.monotonic()
    change = Change("rollout.killSwitch", None, KillSwitch.ENGAGED.value)
    if not given.wait:
        said = "kill switch engaged: no new match from now on, what runs finishes; with --wait the pods confirm it"
        session.show(f"{given.name} {said}", _done(policy, [change]))
        return 0
    if not session.json:
        print(f"{given.name} kill switch engaged", flush=True)
    try:
        verdicts = _confirmations(session, policy, given.timeout - (time.monotonic() - begun))
    except CommandFailed as failure:
        raise CommandFailed(f"the kill switch is engaged, but could not be seen to be confirmed: {failure}") from None
    missing = switch.unconfirmed(verdicts, given.timeout)
    pods = {"confirmed": not missing, "pods": [switch.as_json(one) for one in verdicts]}
    session.show(switch.shown(verdicts) if verdicts else "no pod runs", _done(policy, [change]) | pods)
    if missing:
        raise CommandFailed(missing)
    return 0


def _confirmations(session: Session, policy: Object, seconds: float) -> list[Verdict]:
    begun = time.monotonic()
    generation = int(policy["metadata"].get("generation") or 0)
    name = policy["metadata"]["name"]
    pods = {pod["metadata"]["name"]: pod for pod in session.cluster.pods(policy)}
    token = session.cluster.admin_token(name)
    running = [pod for pod, body in pods.items() if switch.runs(body, ENGINE)]

    def ask(pod: str) -> Answer:
        return session.answer(pod, "/v1/observation", token)

    left = max(0.1, seconds - (time.monotonic() - begun))
    answers = gather(running, ask, left, lambda answer: switch.confirms(answer, generation).confirmed)
    asked = {answer.pod: switch.confirms(answer, generation) for answer in answers}
    return [asked.get(pod) or switch.idle(pod) for pod in pods]


def rollback(session: Session, given: Namespace) -> int:
    """Back to an earlier accepted spec, and what that changes."""
    policy = session.cluster.policy(given.name)
    revisions = revisions_of(policy, session.cluster.revisions(given.name))
    if not revisions:
        raise NotFound(f"{given.name} has no accepted spec to go back to: the operator keeps one for each it accepts")
    if given.list:
        return _list(session, policy, revisions)
    target = _target(session, policy, revisions, given.to_revision)
    changes: list[Change] = []

    def decide(live: Object) -> list[dict[str, Any]]:
        changes[:] = _changes(session, live, target)
        whole = {"op": "replace", "path": "/spec", "value": proposed(live["spec"], target)}
        return [whole] if changes and not given.dry_run else []

    after = session.edit(given.name, decide)
    head = f"{given.name} {'would go' if given.dry_run else 'goes'} back to revision {target.number}"
    if not changes:
        session.show(f"{given.name} is as revision {target.number} was: nothing was written", _done(after, []))
        return 0
    rows = ((one.field, worded(one.before), worded(one.after)) for one in changes)
    text = table(("FIELD OF SPEC", "NOW", f"REVISION {target.number}"), rows)
    data = _done(after, changes) | {"revision": target.number, "dryRun": given.dry_run}
    session.show(f"{head}\n{text}", data)
    session.note("replicas, kill switch, pause and attempt stay as they are")
    for note in notes(changes):
        session.note(note)
    return 0


def _target(session: Session, policy: Object, revisions: Sequence[Revision], number: int | None) -> Revision:
    """The revision asked for; without a number the newest one that is different from what the resource says now."""
    if number is not None:
        for one in revisions:
            if one.number == number:
                return one
        kept = ", ".join(str(one.number) for one in revisions)
        raise NotFound(f"{policy['metadata']['name']} has no revision {number}; kept are {kept}")
    for one in revisions:
        if _changes(session, policy, one):
            return one
    raise NotFound(f"{policy['metadata']['name']} has no earlier spec that is different: nothing to go back to")


def _changes(session: Session, live: Object, revision: Revision) -> list[Change]:
    """What the API server would make of a return to `revision`, its defaults and rules included."""
    whole = {"op": "replace", "path": "/spec", "value": proposed(live["spec"], revision)}
    tried = session.tried(live["metadata"]["name"], [whole])
    return list(differences(live["spec"], tried["spec"]))


def _list(session: Session, policy: Object, revisions: Sequence[Revision]) -> int:
    items, rows = [], []
    for one in revisions:
        item: dict[str, Any] = {"revision": one.number, "created": one.created, "image": one.image}
        try:
            changes = _changes(session, policy, one)
            item["changes"] = [_change(change) for change in changes]
            told = "; ".join(change.text for change in changes) or "nothing: the spec is so now"
        except CommandFailed as failure:
            item["refused"] = told = str(failure)
        items.append(item)
        rows.append((one.number, since(one.created, session.clock()), one.image, told))
    session.show(table(("REVISION", "FIRST ACCEPTED", "IMAGE", "GOING BACK CHANGES"), rows), {"items": items})
    return 0


def _change(change: Change) -> dict[str, Any]:
    return {"field": change.field, "from": change.before, "to": change.after}


def _done(policy: Object, changes: Sequence[Change]) -> dict[str, Any]:
    metadata = policy["metadata"]
    return {
        "namespace": metadata.get("namespace", ""),
        "name": metadata["name"],
        "generation": metadata.get("generation", 0),
        "changes": [_change(change) for change in changes],
    }

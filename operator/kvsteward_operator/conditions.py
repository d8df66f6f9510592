"""The conditions of a policy. `lastTransitionTime` moves only when a status flips."""

from collections.abc import Mapping
from typing import NamedTuple

from kvsteward_contract.document import DocumentRollout
from kvsteward_contract.policy import KillSwitch, Progress, Rollout, Stage
from kvsteward_contract.status import CONDITIONS, Condition

from .situation import Running, Situation
from .times import to_text
from .world import Pod

UNREACHABLE_AFTER = 3  # scrapes in a row that failed


class Verdict(NamedTuple):
    """A condition without its times."""

    status: str  # True, False or Unknown
    reason: str
    message: str


def conditions(
    situation: Situation, prior: Mapping[str, Condition], now: float, generation: int
) -> tuple[Condition, ...]:
    """Every condition, in the order of the contract; `prior` is what is stored, by type."""
    return tuple(
        _timed(kind, verdict, prior.get(kind), now, generation)
        for kind, verdict in zip(CONDITIONS, verdicts(situation, prior), strict=True)
    )


def verdicts(situation: Situation, prior: Mapping[str, Condition]) -> tuple[Verdict, ...]:
    """In the order of the contract's CONDITIONS."""
    accepted = _accepted(situation)
    running = situation.running
    if running is None:
        nothing = (
            Verdict("Unknown", "WaitingForCleanup", f"waits for {situation.leftovers[0]} of an earlier policy to go")
            if situation.leftovers
            else Verdict("Unknown", "NothingAccepted", "no spec of this policy was accepted yet: nothing runs")
        )
        ready = Verdict("False", *((accepted if accepted.status == "False" else nothing)[1:]))
        return (accepted, nothing, nothing, nothing, nothing, nothing, ready)
    available, progressing = _available(running, prior.get("Available")), _progressing(running)
    return (
        accepted,
        available,
        progressing,
        _promoted(running),
        _cold_path(running, prior.get("ColdPath")),
        _degraded(running),
        _ready(accepted, progressing, running),
    )


def _timed(kind: str, verdict: Verdict, prior: Condition | None, now: float, generation: int) -> Condition:
    flipped = prior is None or prior.status != verdict.status
    since = to_text(now) if flipped or prior is None else prior.last_transition_time
    return Condition(kind, verdict.status, verdict.reason, verdict.message, since, generation)


def _accepted(situation: Situation) -> Verdict:
    if situation.refusal is None:
        return Verdict("True", "Accepted", "the spec is in force")
    runs = "what was accepted last goes on running" if situation.running is not None else "nothing runs"
    return Verdict("False", situation.refusal.reason, f"{situation.refusal.message}; {runs}")


def _available(running: Running, prior: Condition | None) -> Verdict:
    ready = sum(pod.available for pod in running.pods)
    if running.wanted == 0:
        return Verdict("True", "ScaledToZero", "no replicas are asked for")
    if ready:
        return Verdict("True", "PodsReady", f"{ready} pods are ready, {running.wanted} are asked for")
    if prior is None or prior.status == "Unknown" or (prior.status, prior.reason) == ("False", "PodsCreated"):
        return Verdict("False", "PodsCreated", f"waits for the first of {running.wanted} pods to be ready")
    return Verdict("False", "NoPodReady", f"none of {running.wanted} pods is ready")


def _progressing(running: Running) -> Verdict:
    if running.trouble:
        return Verdict("False", "ApplyFailed", running.trouble)
    target = running.target
    stuck = next((pod.unschedulable for pod in target.pods if pod.unschedulable), "")
    if stuck and "Insufficient" in stuck and "/" in stuck:
        return Verdict("False", "InsufficientAccelerator", f"no node has room for another pod: {stuck}")
    if stuck:
        return Verdict("False", "Unschedulable", f"a pod has no node: {stuck}")
    others = [one for one in running.generations if one is not target]
    if running.deadline_exceeded:
        reason = "RolloverDeadlineExceeded" if others else "ProgressDeadlineExceeded"
        return Verdict(
            "False", reason, f"pods of {target.name} did not become ready in time; see kubectl describe and logs"
        )
    if target.available < running.wanted:
        return Verdict(
            "True", "PodsStarting", f"{target.available} of {running.wanted} pods of {target.name} are ready"
        )
    if others:
        return Verdict("True", "Draining", f"{', '.join(one.name for one in others)} still drains")
    if len(target.pods) > running.wanted:
        return Verdict("True", "PodsLeaving", f"{len(target.pods) - running.wanted} pods are going")
    if (confirmed := running.acknowledged(target)) < running.wanted:
        return Verdict(
            "True", "AwaitingConfirmation", f"{confirmed} of {running.wanted} pods have confirmed the policy"
        )
    return Verdict("False", "Complete", "every pod runs what is asked for")


def _promoted(running: Running) -> Verdict:
    generation = running.serving
    if generation is None:
        return Verdict("False", "NotServing", "no generation has had all its pods ready yet")
    rollout = running.rollout(generation)
    wanted = running.spec.rollout
    if waits(running, rollout):
        return Verdict(
            "False",
            "RolloutPaused",
            f"{label(rollout)} is in force; {label(wanted)} waits for progress: Running",
        )
    if rollout.stage is Stage.FULL:
        return Verdict("True", "Full", f"{generation.name} reuses for all but the protected group")
    return Verdict("False", f"Stage{rollout.stage.value}", f"{generation.name} is at {label(rollout)}")


def waits(running: Running, rollout: DocumentRollout) -> bool:
    """Whether a pause holds back something of what is asked for."""
    wanted = running.spec.rollout
    return wanted.progress is Progress.PAUSED and (
        rollout.stage is not wanted.stage
        or rollout.canary != wanted.canary
        or rollout.protected_percent != wanted.protected_percent
    )


def label(rollout: DocumentRollout | Rollout) -> str:
    """A stage for people: Full, or Canary at 5 %."""
    return f"Canary at {rollout.canary.percent} %" if rollout.stage is Stage.CANARY else rollout.stage.value


def _cold_path(running: Running, prior: Condition | None) -> Verdict:
    if running.spec.rollout.kill_switch is KillSwitch.RELEASED:
        if prior is not None and (prior.status == "True" or (prior.status, prior.reason) == ("False", "Released")):
            return Verdict("False", "Released", "the kill switch was released; reuse is allowed again")
        return Verdict("False", "NotEngaged", "the kill switch is not engaged")
    # Once reached it holds until the release: pods that start meanwhile start on the cold path.
    if prior is not None and prior.status == "True":
        return Verdict("True", "Engaged", prior.message)
    pods = running.pods
    confirmed = sum(running.confirmed_cold(pod) for pod in pods)
    if confirmed < len(pods):
        return Verdict("Unknown", "Confirming", f"{confirmed} of {len(pods)} confirmed")
    return Verdict("True", "Engaged", f"{confirmed} of {len(pods)} confirmed: no request matches cached state")


def _degraded(running: Running) -> Verdict:
    pods = running.pods
    for pod in pods:
        latch = pod.observation.latch if pod.observation else None
        if latch is not None:
            reason = "ScopeViolation" if latch.reason == "ScopeViolation" else "PodLatched"
            return Verdict(
                "True",
                reason,
                f"{pod.name} is held on the cold path since a {latch.reason}; raise rollout.attempt to release it",
            )
    if refused := [pod for pod in pods if pod.report.refused]:
        return Verdict(
            "True",
            "AdminTokenRefused",
            f"{refused[0].name} refuses the operator's admin token: its Secret is of another operator key; delete the "
            "policy's Secret, wait for its return, then kubectl rollout restart the Deployment",
        )
    silent = [
        pod
        for pod in pods
        if pod.ip and pod.report.failures >= UNREACHABLE_AFTER and (pod.ready or pod.observation is not None)
    ]
    if silent := [pod for pod in silent if not pod.terminating]:
        pod = silent[0]
        return Verdict(
            "True", "SidecarUnreachable", f"{pod.name} does not answer on its admin port: {pod.report.problem}"
        )
    for pod in pods:
        if pod.observation is not None and pod.observation.problems:
            return Verdict("True", problem_reason(pod), f"{pod.name}: {pod.observation.problems[0]}")
    pools = [pod.observation.pool_tokens for pod in pods if pod.observation is not None]
    tokens = min((pool for pool in pools if pool > 0), default=None)
    wanted = running.spec.engine.model.max_tokens
    if tokens is not None and tokens < wanted:
        return Verdict(
            "True",
            "CapacityWarning",
            f"the page pool holds {tokens} tokens, one request may need {wanted}: raise cache.capacity or lower "
            "maxTokens",
        )
    return Verdict("False", "AsExpected", "nothing is amiss")


def problem_reason(pod: Pod) -> str:
    """Sidecars report in sentences; the ones about tenants' keys have a reason of their own."""
    observation = pod.observation
    about_tenants = observation is not None and any("tenant" in problem for problem in observation.problems)
    return "IdentityUnavailable" if about_tenants else "SidecarProblem"


def _ready(accepted: Verdict, progressing: Verdict, running: Running) -> Verdict:
    if accepted.status == "False":
        return Verdict("False", accepted.reason, accepted.message)
    target = running.target
    if running.trouble or target.available < running.wanted:
        return Verdict("False", progressing.reason, progressing.message)
    if (confirmed := running.acknowledged(target)) < running.wanted:
        return Verdict(
            "False", "AwaitingConfirmation", f"{confirmed} of {running.wanted} pods have confirmed the policy"
        )
    return Verdict("True", "Ready", "all that was asked for is in force")

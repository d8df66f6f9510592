"""The one decision a request meets: may the cache be used, and why not.

`DECISIONS` is the single source of the reasons and what each allows: `decide()` walks it, the engine's tests and the
docs are made from it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from .directive import Mode
from .policy import Stage


class Reason(str, Enum):
    """Why a request runs as it does; the first that applies, in this order."""

    VERIFY_REPLAY = "VerifyReplay"
    KILL_SWITCH = "KillSwitch"  # the resource's switch, or this pod's latch
    POLICY_UNAVAILABLE = "PolicyUnavailable"
    AMBIGUOUS_METADATA = "AmbiguousMetadata"
    NO_TENANT = "NoTenant"
    UNSUPPORTED_REQUEST = "UnsupportedRequest"
    COLD_STAGE = "ColdStage"
    PROTECTED = "Protected"
    SHADOW_STAGE = "ShadowStage"
    NOT_IN_COHORT = "NotInCohort"
    REUSE = "Reuse"


@dataclass(frozen=True, slots=True)
class Facts:
    """All that a decision may look at."""

    verify_replay: bool = False
    kill_switch: bool = False  # engaged, or the pod is latched
    policy_known: bool = True
    ambiguous: bool = False  # credentials or metadata that could be read two ways
    tenant_known: bool = True
    supported: bool = True  # False for requests whose answer reuse would change, as prompt logprobs
    stage: Stage = Stage.COLD
    protected: bool = False
    in_cohort: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """One row: when it applies, and what the engine may do then."""

    reason: Reason
    applies: Callable[[Facts], bool]
    mode: Mode


@dataclass(frozen=True, slots=True)
class Decision:
    reason: Reason
    mode: Mode

    @property
    def eligible(self) -> bool:
        """False: the request is cache-ineligible, settled before any lookup."""
        return self.reason is Reason.REUSE


DECISIONS: tuple[Rule, ...] = (
    Rule(Reason.VERIFY_REPLAY, lambda f: f.verify_replay, Mode.COLD),
    Rule(Reason.KILL_SWITCH, lambda f: f.kill_switch, Mode.COLD),
    Rule(Reason.POLICY_UNAVAILABLE, lambda f: not f.policy_known, Mode.COLD),
    Rule(Reason.AMBIGUOUS_METADATA, lambda f: f.ambiguous, Mode.COLD),
    Rule(Reason.NO_TENANT, lambda f: not f.tenant_known, Mode.COLD),
    Rule(Reason.UNSUPPORTED_REQUEST, lambda f: not f.supported, Mode.COLD),
    Rule(Reason.COLD_STAGE, lambda f: f.stage is Stage.COLD, Mode.COLD),
    Rule(Reason.PROTECTED, lambda f: f.protected, Mode.COLD),
    Rule(Reason.SHADOW_STAGE, lambda f: f.stage is Stage.SHADOW, Mode.SHADOW),
    Rule(Reason.NOT_IN_COHORT, lambda f: f.stage is Stage.CANARY and not f.in_cohort, Mode.SHADOW),
    Rule(Reason.REUSE, lambda f: True, Mode.REUSE),
)
# What a reason decides never varies, so each is made once.
_DECIDED = tuple((rule.applies, Decision(rule.reason, rule.mode)) for rule in DECISIONS)


def decide(facts: Facts) -> Decision:
    """The first row of DECISIONS that applies; the last applies always."""
    for applies, decision in _DECIDED:
        if applies(facts):
            return decision
    raise AssertionError("DECISIONS must end with a row that always applies")

"""What hypothesis may draw: scenarios out of edits and of everything that can go wrong."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from .scenario import (
    MEDDLINGS,
    OPERATOR,
    REVISIONS,
    TENANTS,
    WORKLOADS,
    Action,
    Burst,
    CrashOperator,
    CutApi,
    CutScrapes,
    DeletePod,
    Edit,
    EndWatches,
    HoldCold,
    LoseWatch,
    Meddle,
    PlantPage,
    ReleaseCold,
    RestartEngine,
    RestartSidecar,
    Scenario,
    SlowApi,
    Tenants,
)

_AFTER = st.sampled_from((0.0, 0.02, 0.1, 0.3, 1.0, 3.0, 8.0))
_SECONDS = st.sampled_from((0.5, 2.0, 6.0, 20.0))
_POD = st.integers(0, 2)
_PARTY = st.sampled_from((OPERATOR, 0, 1))
_STAGE = st.sampled_from(("Cold", "Shadow", "Canary", "Full", "Full"))
_SWITCH = st.sampled_from(("Engaged", "Released"))
_PERCENT = st.sampled_from((0, 20, 50, 90))

# Paths that may be set to any of these. None takes a field away, so that its default holds.
_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "rollout.stage": _STAGE,
    "rollout.killSwitch": _SWITCH,
    "rollout.canary.percent": _PERCENT,
    "rollout.canary.workloads": st.sampled_from(([], [WORKLOADS[0]], list(WORKLOADS))),
    "rollout.protectedPercent": st.sampled_from((0, 10)),
    "rollout.progress": st.sampled_from(("Running", "Paused")),
    "rollout.attempt": st.integers(1, 4),
    "scopes.private.quotaPercent": st.sampled_from((0, 5, 50, 100)),
    "scopes.private.maxAgeSeconds": st.sampled_from((1, 5, 60)),
    "scopes.private.maxInFlight": st.sampled_from((0, 1)),
    "scopes.overrides": st.sampled_from(([], [{"tenant": "acme", "quotaPercent": 1}])),
    "workloads": st.sampled_from(([], [{"name": WORKLOADS[0]}], [{"name": name} for name in WORKLOADS])),
    "engine.model.revision": st.sampled_from(REVISIONS),
    "engine.replicas": st.integers(1, 3),
    # Refused by the operator: too small, and a label that is the operator's.
    "cache.capacity": st.sampled_from(("512Ki", "1Mi")),
    "engine.template.labels": st.sampled_from((None, {"kvsteward.dev/mine": "yes"})),
}
_URGENT = ("rollout.stage", "rollout.killSwitch", "rollout.canary.percent")


@st.composite
def edits(draw: st.DrawFn) -> Edit:
    """One edit of one to three fields, most often of those that matter at once."""
    paths = draw(st.lists(st.sampled_from((*_URGENT, *_URGENT, *_FIELDS)), min_size=1, max_size=3, unique=True))
    return Edit(tuple((path, draw(_FIELDS[path])) for path in paths), after=draw(_AFTER))


# Every kind of action, by its name in a scenario.
ACTIONS: dict[str, st.SearchStrategy[Action]] = {
    "Edit": edits(),
    "Switch": st.builds(lambda to, after: Edit((("rollout.killSwitch", to),), after=after), _SWITCH, _AFTER),
    "Stage": st.builds(lambda to, after: Edit((("rollout.stage", to),), after=after), _STAGE, _AFTER),
    # The operator rejects the smaller one; its switch, and a stage that is lower, act all the same.
    "Capacity": st.builds(
        lambda capacity, stage, switch, after: Edit(
            (("cache.capacity", capacity), ("rollout.stage", stage), ("rollout.killSwitch", switch)), after=after
        ),
        st.sampled_from(("512Ki", "1Mi")),
        _STAGE,
        _SWITCH,
        _AFTER,
    ),
    "Burst": st.builds(Burst, st.sampled_from((10, 30)), after=_AFTER),
    "HoldCold": st.builds(HoldCold, _POD, after=_AFTER),
    "ReleaseCold": st.builds(ReleaseCold, _POD, after=_AFTER),
    "Tenants": st.builds(Tenants, st.sampled_from((TENANTS, TENANTS[1:], ())), after=_AFTER),
    "CrashOperator": st.builds(CrashOperator, _SECONDS, st.integers(0, 12), after=_AFTER),
    "RestartSidecar": st.builds(RestartSidecar, _POD, _SECONDS, after=_AFTER),
    "RestartEngine": st.builds(RestartEngine, _POD, _SECONDS, after=_AFTER),
    "DeletePod": st.builds(DeletePod, _POD, after=_AFTER),
    "CutApi": st.builds(CutApi, _PARTY, _SECONDS, after=_AFTER),
    "SlowApi": st.builds(SlowApi, _PARTY, st.sampled_from((0.2, 1.0, 5.0)), _SECONDS, after=_AFTER),
    "LoseWatch": st.builds(
        LoseWatch, _PARTY, st.sampled_from(("configmaps", "kvcachepolicies", "pods", "")), after=_AFTER
    ),
    "EndWatches": st.builds(EndWatches, st.booleans(), after=_AFTER),
    "PlantPage": st.builds(PlantPage, _POD, after=_AFTER),
    "CutScrapes": st.builds(CutScrapes, _POD, _SECONDS, after=_AFTER),
    "Meddle": st.builds(Meddle, st.sampled_from(MEDDLINGS), after=_AFTER),
}


def finals() -> st.SearchStrategy[Edit]:
    """The last edit sets every field that an edit may have set: all paths lead to one of these."""
    rollouts = st.sampled_from(
        (*((stage, "Released") for stage in ("Full", "Canary", "Shadow", "Cold")), ("Full", "Engaged"))
    )
    return st.builds(
        lambda rollout, revision: Edit((*_rollout(*rollout), *_REST, ("engine.model.revision", revision))),
        rollouts,
        st.sampled_from((REVISIONS[0], REVISIONS[0], REVISIONS[1])),
    )


def _rollout(stage: str, switch: str) -> tuple[tuple[str, Any], ...]:
    return (("rollout.stage", stage), ("rollout.killSwitch", switch))


_REST: tuple[tuple[str, Any], ...] = (
    ("rollout.canary", {"percent": 50}),
    ("rollout.protectedPercent", 10),
    ("rollout.progress", "Running"),
    ("rollout.attempt", 9),  # above every other, so that no latch is left
    ("scopes.private", {"quotaPercent": 50, "maxAgeSeconds": 60}),
    ("scopes.overrides", []),
    ("workloads", [{"name": name} for name in WORKLOADS]),
    ("engine.replicas", 2),
    ("cache.capacity", "1Mi"),
    ("engine.template.labels", None),
)


@st.composite
def scenarios(draw: st.DrawFn, most: int = 10, kinds: tuple[str, ...] = ()) -> Scenario:
    """Up to `most` actions of a few kinds, which are drawn first unless they are given: few kinds meet more often, and
    many scenarios cover all of them."""
    if not kinds:
        kinds = tuple(draw(st.lists(st.sampled_from(sorted(ACTIONS)), min_size=2, max_size=5, unique=True)))
    action = st.one_of([ACTIONS[kind] for kind in kinds])
    actions = draw(st.lists(action, min_size=2, max_size=most))
    return Scenario(draw(st.integers(0, 2**32 - 1)), tuple(actions), draw(finals()))

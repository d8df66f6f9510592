"""What is wrong and what is risky in a policy, rule by rule."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvsteward_bench.plan import catalogue
from kvsteward_bench.plan.architectures import shape_of
from kvsteward_bench.plan.findings import Level, status
from kvsteward_bench.plan.lint import lint
from kvsteward_contract.crd import RULES

EXAMPLE = Path(__file__).parents[2] / "examples" / "policy.yaml"
SMALL = shape_of(catalogue.load("smollm2-135m"))


def policy(**changes: Any) -> dict[str, Any]:
    """The example with two replicas, which is clean, and fields changed: `rollout__stage="Full"`."""
    resource: dict[str, Any] = copy.deepcopy(yaml.safe_load(EXAMPLE.read_text()))
    for path, value in {"engine__replicas": 2, **changes}.items():
        *parents, last = path.split("__")
        part = resource["spec"]
        for name in parents:
            part = part.setdefault(name, {})
        part[last] = value
    return resource


def codes(resource: Any, **options: Any) -> list[tuple[str, str]]:
    return [(one.level.value, one.code) for one in lint(resource, **options)]


def test_a_sound_policy_is_clean() -> None:
    assert lint(policy()) == ()
    assert lint(policy(), SMALL) == ()


def test_the_example_has_one_risk_for_a_first_try() -> None:
    assert codes(yaml.safe_load(EXAMPLE.read_text()), shape=SMALL) == [("risk", "OneReplica")]


TWO = [{"tenant": "acme"}, {"tenant": "globex", "quotaPercent": 20}]
RISKS = [
    pytest.param({"rollout__stage": "Full", "rollout__protectedPercent": 0}, "NoProtectedGroup", id="no-control"),
    pytest.param({"rollout__stage": "Canary", "rollout__protectedPercent": 0}, "NoProtectedGroup", id="nor-in-canary"),
    pytest.param({"rollout__protectedPercent": 60}, "MostlyProtected", id="mostly-cold"),
    pytest.param({"rollout__stage": "Canary", "rollout__canary": {"percent": 0}}, "EmptyCanary", id="canary-of-nobody"),
    pytest.param({"rollout__stage": "Full", "rollout__killSwitch": "Engaged"}, "KillSwitchEngaged", id="switch-left"),
    pytest.param({"rollout__progress": "Paused"}, "Paused", id="paused"),
    pytest.param({"rollover": {"drainSeconds": 30}}, "DrainTooShort", id="drain-cuts-answers"),
    pytest.param(
        {"scopes__private": {"quotaPercent": 100}, "scopes__overrides": TWO}, "QuotaWithoutLimit", id="quota-of-all"
    ),
    pytest.param({"scopes__private__quotaPercent": 0}, "NothingRetained", id="quota-of-nothing"),
    pytest.param({"scopes__overrides": [{"tenant": "a", "quotaPercent": 0}]}, "NothingRetained", id="for-one-tenant"),
    pytest.param({"scopes__private__maxAgeSeconds": 200_000}, "LongRetention", id="kept-for-days"),
    pytest.param({"scopes__private__maxInFlight": 17}, "NoEffect", id="limit-above-another"),
    pytest.param({"engine__replicas": 1}, "OneReplica", id="one-pod"),
    pytest.param({"engine__replicas": 0}, "NoReplicas", id="no-pod"),
    pytest.param({"engine__model__revision": "main"}, "MovingRevision", id="weights-move"),
    pytest.param({"engine__model__tokenizerRevision": "Latest"}, "MovingRevision", id="tokenizer-moves"),
    pytest.param({"engine__image": "r.example:5000/engine"}, "MovingImage", id="image-without-tag"),
    pytest.param({"engine__image": "r.example/engine:latest"}, "MovingImage", id="image-latest"),
    pytest.param({"cache__blockTokens": 128}, "LargePages", id="large-pages"),
    pytest.param({"cache__blockTokens": 4}, "SmallPages", id="small-pages"),
    pytest.param({"engine__resources__limits": {"memory": "600Mi"}}, "TightMemory", id="pool-fills-the-limit"),
]


@pytest.mark.parametrize(("changes", "code"), RISKS)
def test_a_risky_setting_is_found_and_nothing_else(changes: dict[str, Any], code: str) -> None:
    findings = lint(policy(**changes))
    assert [(one.level, one.code) for one in findings] == [(Level.RISK, code)]
    assert status(findings) == 1
    part: Any = policy(**changes)["spec"]
    for name in findings[0].field.partition("[")[0].split(".")[1:]:
        assert name in part
        part = part[name]
    assert len(findings[0].message) > 30


SAFE = [
    pytest.param({"rollout__stage": "Shadow", "rollout__protectedPercent": 0}, id="no-control-needed-in-shadow"),
    pytest.param({"rollout__stage": "Shadow", "rollout__canary": {"percent": 0}}, id="canary-later"),
    pytest.param({"rollout__killSwitch": "Engaged"}, id="switch-in-shadow"),
    pytest.param({"rollover": {"drainSeconds": 52}}, id="drain-of-a-short-context"),
    pytest.param({"scopes__private": {"quotaPercent": 100}}, id="quota-of-all-without-named-tenants"),
    pytest.param({"engine__image": "r.example:5000/engine:1.2"}, id="image-with-tag"),
    pytest.param({"engine__image": "r.example/engine@sha256:" + "0" * 64}, id="image-with-digest"),
    pytest.param({"engine__resources__limits": {"memory": "4Gi"}}, id="room-in-the-limit"),
    pytest.param({"engine__resources__limits": {"memory": "600Mi", "nvidia.com/gpu": 1}}, id="pool-on-the-accelerator"),
    pytest.param({"engine__resources__limits": {"nvidia.com/gpu": 1}, "rollout__stage": "Full"}, id="at-full"),
]


@pytest.mark.parametrize("changes", SAFE)
def test_a_sensible_setting_is_not_complained_of(changes: dict[str, Any]) -> None:
    assert lint(policy(**changes)) == ()


INVALID = [
    pytest.param({"rollout__stage": "Half"}, "Invalid", "spec.rollout.stage", id="unknown-stage"),
    pytest.param({"cache__surprise": 1}, "Invalid", "spec.cache", id="unknown-field"),
    pytest.param({"rollout__protectedPercent": 101}, "Invalid", "spec.rollout.protectedPercent", id="out-of-bounds"),
    pytest.param(
        {"rollout__canary": {"percent": 60}, "rollout__protectedPercent": 50}, "Invalid", "spec.rollout", id="too-much"
    ),
    pytest.param(
        {"rollout__canary": {"percent": 5, "workloads": ["nobody"]}},
        "Invalid", "spec.rollout.canary.workloads", id="unknown-workload",
    ),
    pytest.param({"cache__capacity": "1Ki"}, "CapacityTooSmall", "spec.cache.capacity", id="no-room"),
    pytest.param(
        {"engine__resources__limits": {"memory": "256Mi"}},
        "CapacityExceedsMemory", "spec.cache.capacity", id="more-than-the-limit",
    ),
    pytest.param(
        {"engine__template": {"labels": {"kvsteward.dev/policy": "x"}}},
        "ReservedLabel", "spec.engine.template.labels", id="reserved-label",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "code", "field"), INVALID)
def test_what_would_be_refused_is_found(changes: dict[str, Any], code: str, field: str) -> None:
    findings = lint(policy(**changes))
    assert [(one.level, one.code, one.field) for one in findings] == [(Level.ERROR, code, field)]
    assert status(findings) == 2


@pytest.mark.parametrize("resource", [None, [], "text", {}, {"kind": "KVCachePolicy"}, {"apiVersion": 1, "kind": 2}])
def test_what_is_no_policy_at_all_is_invalid(resource: Any) -> None:
    assert codes(resource) == [("error", "Invalid")]


@pytest.mark.parametrize("name", ["support-chat", "a", "x" * 50, "x" * 51, "Support", "1st", "a-", "a.b", "a\n"])
def test_a_name_is_judged_as_the_api_server_judges_it(name: str) -> None:
    rule = next(rule for rule, _ in RULES[""] if "metadata.name" in rule)
    pattern = re.search(r"matches\('([^']+)'\)", rule)
    most = re.search(r"size\(self\.metadata\.name\) <= (\d+)", rule)
    assert pattern and most
    accepted = re.fullmatch(pattern[1].strip("^$"), name) is not None and len(name) <= int(most[1])
    resource = policy()
    resource["metadata"]["name"] = name
    assert codes(resource) == ([] if accepted else [("error", "InvalidName")])


# ---- with the model's sizes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({"engine__model__maxTokens": 16_384}, ("error", "ContextBeyondModel"), id="context"),
        pytest.param({"cache__capacity": "80Mi"}, ("error", "CapacityBelowOneSequence"), id="not-one-sequence"),
        pytest.param({"cache__capacity": "300Mi"}, ("risk", "CapacityTight"), id="few-of-many"),
        pytest.param({"cache__dtype": "FP32", "cache__capacity": "2Gi"}, ("risk", "WiderThanModel"), id="wide"),
    ],
)
def test_the_models_sizes_are_held_against_the_policy(changes: dict[str, Any], expected: tuple[str, str]) -> None:
    assert codes(policy(**changes), shape=SMALL) == [expected]
    assert expected not in codes(policy(**changes))


def test_the_capacity_is_enough_exactly_when_the_engine_would_start() -> None:
    """4,096 tokens of 22.5 KiB in pages of 16 are 90 MiB."""
    assert ("error", "CapacityBelowOneSequence") in codes(policy(cache__capacity="92159Ki"), shape=SMALL)
    assert ("error", "CapacityBelowOneSequence") not in codes(policy(cache__capacity="92160Ki"), shape=SMALL)


def test_a_checkpoint_that_the_engine_refuses_is_an_error_with_its_words() -> None:
    (finding,) = lint(policy(), SMALL, "no such model is run")
    assert (finding.level, finding.code, finding.message) == (Level.ERROR, "NotServed", "no such model is run")


def test_errors_come_before_risks() -> None:
    found = codes(policy(engine__replicas=1, engine__model__maxTokens=16_384), shape=SMALL)
    assert found == [("error", "ContextBeyondModel"), ("risk", "OneReplica")]

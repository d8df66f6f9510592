"""What is wrong with a policy and what is risky about it, before anybody applies it: a resource in, findings out.

Errors are what the API server, the operator or the engine would refuse. Risks are accepted, and likely to be regretted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from kvsteward_contract.policy import InvalidPolicy, Policy, PolicySpec, decode_policy, semantic_refusals
from kvsteward_contract.quantity import parse_quantity

from kvsteward_bench.plan.arithmetic import Wish, plan
from kvsteward_bench.plan.errors import CannotPlan
from kvsteward_bench.plan.findings import Finding, Level, error, risk
from kvsteward_bench.plan.risks import risks
from kvsteward_bench.plan.shape import Shape
from kvsteward_bench.plan.sizes import VALUE_BYTES, readable

POLICY_NAME = re.compile(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?")


def lint(resource: Any, shape: Shape | None = None, refused: str = "") -> tuple[Finding, ...]:
    """Errors before risks; with errors in the resource itself nothing else is looked for.

    `refused`: why the engine can't serve the checkpoint, if it can't.
    """
    try:
        policy = decode_policy(resource)
    except InvalidPolicy as invalid:
        return (Finding(Level.ERROR, "Invalid", _field(str(invalid)), str(invalid)),)
    if errors := tuple(_refusals(policy)):
        return errors
    found = [error("NotServed", "spec.engine.model", refused)] if refused else []
    if shape is not None:
        found += _capacity(policy.spec, shape)
    found += risks(policy.spec)
    return tuple(sorted(found, key=lambda finding: finding.level is Level.RISK))


def _refusals(policy: Policy) -> Iterable[Finding]:
    if not POLICY_NAME.fullmatch(policy.name):
        yield error(
            "InvalidName",
            "metadata.name",
            f"{policy.name!r} names a Service: at most 50 lower-case letters, digits and -, the first of them a letter",
        )
    for refusal in semantic_refusals(policy.spec):
        yield error(refusal.reason, _field(refusal.message), refusal.message)


def _capacity(spec: PolicySpec, shape: Shape) -> Iterable[Finding]:
    """What the model's sizes say about the policy: what the engine would refuse at its start, then what is tight."""
    model, cache, running = spec.engine.model, spec.cache, spec.engine.max_concurrent
    if shape.max_positions and model.max_tokens > shape.max_positions:
        yield error(
            "ContextBeyondModel",
            "spec.engine.model.maxTokens",
            f"{model.max_tokens:,} is more than the model's context of {shape.max_positions:,}: the engine won't start",
        )
        return
    wish = Wish(model.max_tokens, cache.dtype.value, parse_quantity(cache.capacity), cache.block_tokens)
    try:
        planned = plan(shape, wish)
    except CannotPlan as cannot:
        yield error("CannotPlan", "spec.cache", str(cannot))
        return
    fit = planned.sequences or 0
    if not fit:
        one = readable(planned.cost.total)
        yield error(
            "CapacityBelowOneSequence",
            "spec.cache.capacity",
            f"{cache.capacity} holds no sequence of maxTokens {model.max_tokens:,}, which takes {one}: "
            "raise the capacity or lower maxTokens",
        )
    elif fit * 4 < running:
        yield risk(
            "CapacityTight",
            "spec.cache.capacity",
            f"{cache.capacity} holds {fit:,} sequences of maxTokens, and maxConcurrent lets {running:,} run: under "
            "load nothing stays cached and running work is preempted",
        )
    times = VALUE_BYTES[planned.dtype] / VALUE_BYTES[shape.dtype]
    if times > 1:
        yield risk(
            "WiderThanModel",
            "spec.cache.dtype",
            f"{planned.dtype} pages of a {shape.dtype} model take {float(times):g} times the memory that it needs",
        )


def _field(message: str) -> str:
    """The path that a message of the contract begins or ends with."""
    if found := re.search(r"`\$\.?([^`]*)`", message):
        return f"spec.{found[1]}" if found[1] else "spec"
    found = re.match(r"(spec|metadata)[\w.\[\]]*", message)
    return found[0].rstrip(".") if found else ""

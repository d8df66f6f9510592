"""docs/reference.md, generated: the resource's fields, the decision table, the metrics.

`python -m kvsteward_contract.reference` prints it.
"""

import json
from collections.abc import Iterator
from typing import Any

from . import wire
from .crd import RULES, crd
from .decision import DECISIONS, Reason
from .directive import Mode
from .metrics import METRICS
from .status import CONDITIONS

# What an on-call engineer wants to read beside each reason of the decision table.
REASONS: dict[Reason, str] = {
    Reason.VERIFY_REPLAY: "a cold re-run that checks a reused answer",
    Reason.KILL_SWITCH: "`killSwitch: Engaged`, or this pod is latched on the cold path",
    Reason.POLICY_UNAVAILABLE: "the sidecar has not seen both the policy and its document yet",
    Reason.AMBIGUOUS_METADATA: "credentials that are repeated, oversized or name two tenants",
    Reason.NO_TENANT: "no credential, or one that no tenant has",
    Reason.UNSUPPORTED_REQUEST: "reuse would change the answer (prompt log-probabilities)",
    Reason.COLD_STAGE: "`stage: Cold`",
    Reason.PROTECTED: "the session is in the protected group, the control",
    Reason.SHADOW_STAGE: "`stage: Shadow`",
    Reason.NOT_IN_COHORT: "`stage: Canary`, and the session or its workload is not in the canary",
    Reason.REUSE: "none of the above",
}


def table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def fields(schema: dict[str, Any], path: str) -> Iterator[tuple[str, ...]]:
    """(path, type and bounds, default, description) of every leaf below one schema."""
    for name, child in schema.get("properties", {}).items():
        where, required = f"{path}.{name}", name in schema.get("required", ())
        inner = child.get("items", child)
        if inner.get("properties"):
            yield from fields(inner, where + ("[]" if inner is not child else ""))
            continue
        default = "required" if required else (f"`{json.dumps(child['default'])}`" if "default" in child else "")
        yield f"`{where}`", _kind(child), default, child.get("description", "")


def _kind(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return " / ".join(schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        return "quantity"
    if schema["type"] == "array":
        return f"list of {_kind(schema['items'])}"
    if schema["type"] == "object":
        return f"map of {_kind(schema['additionalProperties'])}"
    if "minimum" in schema:
        return f"{schema['minimum']} to {schema['maximum']}" if "maximum" in schema else f">= {schema['minimum']}"
    return str(schema["type"])


def decisions() -> Iterator[tuple[str, ...]]:
    for rule in DECISIONS:
        uses, predicts = rule.mode is Mode.REUSE, rule.mode is not Mode.COLD
        yes = {True: "yes", False: "no"}
        yield f"`{rule.reason.value}`", REASONS[rule.reason], rule.mode.value, yes[uses], yes[uses], yes[predicts]


def reference() -> str:
    schema = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    rules = ((f"`{path or 'the resource'}`", message) for path, entries in RULES.items() for _, message in entries)
    metrics = (
        (f"`{metric.name}`", metric.kind, ", ".join(metric.labels), metric.help) for metric in METRICS
    )
    return f"""# Reference

Generated from contract/ by `make reference`; edit the types and tables there.

## KVCachePolicy ({wire.API_VERSION})

{table(("field", "values", "default", "meaning"), fields(schema["spec"], "spec"))}

Between fields:

{table(("where", "rule"), rules)}

## Status

Conditions: {", ".join(CONDITIONS)}.

{table(("field", "values", "", "meaning"), fields(schema["status"], "status"))}

## Decisions

One reason a request, the first that applies. It is in the receipt and in `kvsteward_requests_total{{decision}}`.

{table(("reason", "when", "mode", "match", "publish", "predict"), decisions())}

## Metrics of the sidecar

Counters end in `_total`, as Prometheus writes them.

{table(("metric", "kind", "labels", "meaning"), metrics)}
"""


if __name__ == "__main__":
    print(reference(), end="")

"""What is known of a policy: one view for scripts, and the same for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .tables import ago, cell, since, table, unix

Object = dict[str, Any]
# Evidence in the order in which it is read; a field that isn't here is shown by its own name.
EVIDENCE = {
    "samples": "protected requests",
    "coldTtftP95Milliseconds": "their TTFT p95, ms",
    "baselineP95Milliseconds": "baseline p95, ms",
    "slowSharePermille": "slower than the baseline allows, per mille",
    "eligibleTokens": "eligible tokens",
    "reusedTokens": "reused tokens",
    "reusedPercent": "reused %",
}


def view(policy: Object) -> Object:
    """The policy as `-o json` prints it."""
    metadata, status = policy["metadata"], policy.get("status") or {}
    rollout = (policy.get("spec") or {}).get("rollout") or {}
    generation = metadata.get("generation", 0)
    return {
        "namespace": metadata.get("namespace", ""),
        "name": metadata["name"],
        "created": metadata.get("creationTimestamp", ""),
        "generation": generation,
        "observedGeneration": status.get("observedGeneration", 0),
        "current": status.get("observedGeneration") == generation,  # whether the rest is about the spec as it is now
        "stage": status.get("stage"),
        "canaryPercent": status.get("canaryPercent", 0),
        "wanted": rollout,
        "replicas": status.get("replicas", 0),
        "wantedReplicas": ((policy.get("spec") or {}).get("engine") or {}).get("replicas"),
        "endpoint": status.get("endpoint", ""),
        "image": status.get("image", ""),
        "capacity": status.get("capacity") or {},
        "generations": status.get("generations") or [],
        "conditions": status.get("conditions") or [],
        "evidence": status.get("evidence") or {},
        "history": status.get("history") or [],
    }


def rows(views: Sequence[Object], now: float, *, namespaces: bool) -> str:
    """Many policies, a line each."""
    head = ["NAME", "STAGE", "CANARY", "SWITCH", "PODS", "ACKNOWLEDGED", "COLD TTFT P95", "REUSED", "READY", "COLDPATH",
            "AGE"]  # fmt: skip
    lines = []
    for one in views:
        evidence, conditions = one["evidence"], {each["type"]: each for each in one["conditions"]}
        serving = [each for each in one["generations"] if each.get("state") == "Serving"] or one["generations"][-1:]
        line = [
            one["name"],
            one["stage"],
            f"{one['canaryPercent']} %" if one["stage"] == "Canary" else "",
            one["wanted"].get("killSwitch"),
            f"{one['replicas']}/{'?' if one['wantedReplicas'] is None else one['wantedReplicas']}",
            sum(each.get("acknowledgedReplicas", 0) for each in serving) if serving else "",
            _with_unit(evidence.get("coldTtftP95Milliseconds"), "ms"),
            _with_unit(evidence.get("reusedPercent"), "%"),
            *((conditions.get(kind) or {}).get("status") for kind in ("Ready", "ColdPath")),
            since(one["created"], now),
        ]
        lines.append([one["namespace"], *line] if namespaces else line)
    return table(["NAMESPACE", *head] if namespaces else head, lines)


def page(one: Object, now: float) -> str:
    """One policy in full."""
    parts = [
        "\n".join(_facts(one)),
        table(("CONDITION", "STATUS", "REASON", "SINCE", "MESSAGE"), _conditions(one, now)),
    ]
    if one["generations"]:
        parts.insert(1, table(_GENERATION_HEAD, _generations(one)))
    if figures := list(_evidence(one)):
        end = unix(one["evidence"].get("windowEnd"))
        of = f" of the window that ended {ago(now - end)} ago" if end is not None else ""
        parts.append(f"Evidence{of}: " + ", ".join(figures))
    if one["history"]:
        head = ("#", "AGE", "FROM", "TO", "WHY")
        lines = [
            (each.get("sequence"), since(each.get("time"), now), each.get("from"), each.get("to"), each.get("reason"))
            for each in reversed(one["history"])
        ]
        parts.append(table(head, lines))
    return "\n\n".join(parts)


_GENERATION_HEAD = ("GENERATION", "STATE", "STAGE", "CANARY", "PODS", "ACKNOWLEDGED", "IN FLIGHT", "PAGES", "MODEL",
                    "IMAGE")  # fmt: skip


def _facts(one: Object) -> Iterator[str]:
    wanted = one["wanted"]
    force = stage_label(one["stage"] or "nothing", one["canaryPercent"])
    held = (
        wanted.get("advance", "Manual"),
        wanted.get("progress", "Running"),
        f"attempt {wanted.get('attempt', 1)}",
        f"{wanted.get('protectedPercent', 0)} % protected",
    )
    asked = stage_label(wanted.get("stage", "Shadow"), (wanted.get("canary") or {}).get("percent", 0))
    seen = "the operator has seen it" if one["current"] else f"the operator has seen {one['observedGeneration']} only"
    facts = [
        ("Policy", f"{one['namespace']}/{one['name']}   {one['endpoint']}"),
        ("Spec", f"generation {one['generation']}, {seen}"),
        ("In force", force),
        ("Asked for", f"{asked}; {', '.join(held)}"),
        ("Kill switch", wanted.get("killSwitch", "Released")),
        ("Pods", f"{one['replicas']} of {one['wantedReplicas']} asked for"),
    ]
    if capacity := one["capacity"]:
        sizes = f"{capacity.get('poolTokens', 0)} tokens a pod, {capacity.get('bytesPerToken', 0)} bytes each"
        facts.append(("Capacity", sizes))
    yield from (f"{name + ':':<13}{cell(text)}" for name, text in facts)


def stage_label(stage: str, percent: int) -> str:
    return f"{stage} at {percent} %" if stage == "Canary" else stage


def _generations(one: Object) -> Iterator[tuple[Any, ...]]:
    for each in one["generations"]:
        canary = f"{each.get('canaryPercent', 0)} %" if each.get("stage") == "Canary" else ""
        counts = (each.get(name, 0) for name in ("replicas", "acknowledgedReplicas", "inFlight", "residentPages"))
        yield (each["name"], each.get("state"), each.get("stage"), canary, *counts, each.get("modelRevision"),
               each.get("image"))  # fmt: skip


def _conditions(one: Object, now: float) -> Iterator[tuple[Any, ...]]:
    for each in one["conditions"]:
        age = since(each.get("lastTransitionTime"), now)
        stale = "" if each.get("observedGeneration") == one["generation"] else " (of an earlier generation)"
        yield each["type"], each["status"], each.get("reason"), age, f"{each.get('message', '')}{stale}"


def _evidence(one: Object) -> Iterator[str]:
    evidence = {name: value for name, value in one["evidence"].items() if name != "windowEnd"}
    for name in [*(known for known in EVIDENCE if known in evidence), *sorted(evidence.keys() - EVIDENCE.keys())]:
        yield f"{EVIDENCE.get(name, name)} {cell(evidence[name])}"


def _with_unit(value: Any, unit: str) -> str:
    return "" if value is None else f"{value} {unit}"

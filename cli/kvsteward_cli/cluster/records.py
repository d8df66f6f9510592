"""Receipts and ledger pages of all pods, merged and laid out. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .tables import ago, milliseconds, moment, short, table

Object = dict[str, Any]


def merged(by_pod: Iterable[tuple[str, Sequence[Object]]], limit: int, order: str) -> list[Object]:
    """The newest `limit` by the Unix time in field `order`, each with its pod."""
    every = [{"pod": pod, **record} for pod, records in by_pod for record in records]
    return sorted(every, key=lambda record: record.get(order) or 0, reverse=True)[:limit]


def receipts(records: Sequence[Object]) -> str:
    head = ("TIME", "POD", "DECISION", "STAGE", "COHORT", "TENANT", "WORKLOAD", "PROMPT", "ELIGIBLE", "RESIDENT",
            "REUSED", "TTFT MS", "ENDING", "RECEIPT")  # fmt: skip
    return table(
        head,
        (
            (
                moment(one.get("time") or 0),
                one["pod"],
                one.get("decision"),
                one.get("stage"),
                one.get("cohort"),
                short(one.get("tenant") or ""),
                one.get("workload"),
                *(one.get(name, 0) for name in ("promptTokens", "eligibleTokens", "residentTokens", "reusedTokens")),
                milliseconds(one.get("timeToFirstTokenSeconds")),
                one.get("ending"),
                one.get("id"),
            )
            for one in records
        ),
    )


def receipt(record: Object) -> str:
    """One receipt, a field a line."""
    width = max(len(name) for name in record) + 2
    return "\n".join(f"{name + ':':<{width}}{_value(name, value)}" for name, value in record.items())


def _value(name: str, value: Any) -> str:
    if name == "time":
        return moment(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {count}" for key, count in value.items()) or "-"
    return "-" if value in ("", None) else str(value)


def ledger(records: Sequence[Object], now: float) -> str:
    head = ("PAGE", "POD", "SCOPE", "STATE", "REFS", "USES", "SAVES TOKENS", "AGE", "LAST USE", "RETENTION",
            "EVICTED BY")  # fmt: skip
    return table(
        head,
        (
            (
                short(one.get("key") or "", 12),
                one["pod"],
                short(one.get("scope") or ""),
                one.get("state"),
                *(one.get(name, 0) for name in ("refcount", "uses", "savedTokens")),
                *(ago(now - (one.get(name) or now)) for name in ("created", "lastUse")),
                short(one.get("retention") or ""),
                one.get("evictionReason"),
            )
            for one in records
        ),
    )

"""A Plan as JSON and as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsteward_bench.plan.arithmetic import Plan
from kvsteward_bench.plan.held import Cost
from kvsteward_bench.plan.sizes import readable


def as_json(plan: Plan, not_served: Sequence[str] = ()) -> dict[str, Any]:
    """Sizes in bytes. What depends on a pool is null without one."""
    return {
        "architecture": plan.shape.architecture,
        "dtype": plan.dtype,
        "tokens": plan.wish.tokens,
        **_cost(plan.cost),
        "poolBytes": plan.wish.pool,
        "poolTokens": plan.pool_tokens,
        "sequences": plan.sequences,
        "offloadTokens": plan.offload_tokens,
        "blockTokens": plan.wish.block_tokens,
        "capped": plan.capped,
        "steps": [{"technique": one.technique, "detail": one.detail, **_cost(one.cost)} for one in plan.steps],
        "notes": list(plan.notes),
        "notServed": list(not_served),
    }


def _cost(cost: Cost) -> dict[str, int]:
    return {
        "bytesPerToken": cost.bytes_per_token,
        "fixedBytes": cost.fixed,
        "totalBytes": cost.total,
        "readBytes": cost.read,
    }


def as_text(plan: Plan, not_served: Sequence[str] = ()) -> str:
    tokens = f"{plan.wish.tokens:,} tokens"
    rows: list[tuple[str, ...]] = [("technique", "a token", "fixed", tokens, "a step reads")]
    for step in plan.steps:
        cost = step.cost
        sizes = (cost.bytes_per_token, cost.fixed, cost.total, cost.read)
        rows.append((step.technique, *(readable(size) for size in sizes)))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [f"{plan.shape.architecture}: {len(plan.shape.layers)} layers, checkpoint {plan.shape.dtype}", ""]
    for index, row in enumerate(rows):
        cells = "  ".join(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        lines.append(f"{row[0].ljust(widths[0])}  {cells}")
        if index:
            lines.append(f"    {plan.steps[index - 1].detail}")
    lines += ["", *_answers(plan, tokens), *(f"note: {note}" for note in plan.notes)]
    lines += [f"planned, not served by this engine yet: {reason}" for reason in not_served]
    return "\n".join(lines)


def _answers(plan: Plan, tokens: str) -> list[str]:
    cost = plan.cost
    lines = [
        f"bytes per token  {cost.bytes_per_token:,} ({readable(cost.bytes_per_token)}), {plan.dtype}",
        f"fixed state      {cost.fixed:,} ({readable(cost.fixed)}) a sequence",
        f"one sequence     {cost.total:,} ({readable(cost.total)}) at {tokens}",
    ]
    if plan.wish.pool is not None:
        pages = f", in pages of {plan.wish.block_tokens}" if plan.wish.block_tokens > 1 else ""
        lines.append(f"pool             {plan.pool_tokens:,} tokens in {readable(plan.wish.pool)}{pages}")
        fit = "sequence fits" if plan.sequences == 1 else "sequences fit"
        beside = f", {plan.wish.shared_prefix:,} of them shared" if plan.wish.shared_prefix else ""
        lines.append(f"                 {plan.sequences:,} {fit} of {tokens}{beside}")
    if plan.offload_tokens is not None:
        lines.append(f"host memory      {plan.offload_tokens:,} tokens in {readable(plan.wish.offload)}")
    return lines

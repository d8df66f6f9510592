"""`kvsteward plan`: what a sequence's cache takes, and what fits into a pool."""

from __future__ import annotations

import argparse
import json

from kvsteward_bench.plan.architectures import shape_of
from kvsteward_bench.plan.arithmetic import Wish, plan
from kvsteward_bench.plan.report import as_json, as_text
from kvsteward_bench.plan.shape import Shape
from kvsteward_bench.plan.sizes import VALUE_BYTES, tokens_of
from kvsteward_contract.policy import PolicySpec
from kvsteward_contract.quantity import parse_quantity

from kvsteward_cli.errors import CommandFailed
from kvsteward_cli.planning.models import beyond_contract, read_raw, read_spec, refusals


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("-f", "--file", help="a KVCachePolicy, - for stdin: its capacity, dtype, pages and context")
    command.add_argument(
        "--tokens", help="of one sequence, such as 8192 or 128K; default: the policy's or model's most"
    )
    command.add_argument("--pool", metavar="SIZE", help="memory for pages, such as 8Gi; default: the policy's")
    dtypes = ("Auto", *VALUE_BYTES)
    command.add_argument("--dtype", choices=dtypes, help="of the pages; default: the policy's, else Auto, the model's")
    command.add_argument("--block-tokens", type=int, metavar="N", help="count in whole pages of so many tokens")
    command.add_argument("--shared-prefix", metavar="TOKENS", help="leading tokens that all sequences have in common")
    command.add_argument("--token-budget", type=int, default=100, metavar="PERCENT", help="tokens kept of a sequence")
    command.add_argument("--sparse-pages", type=int, default=0, metavar="N", help="pages that a step reads of a layer")
    command.add_argument("--offload", metavar="SIZE", help="host memory for evicted pages")
    command.add_argument("--json", action="store_true", help="one JSON object")


def run(given: argparse.Namespace) -> int:
    """Raises CommandFailed and CannotPlan."""
    spec = read_spec(given.file) if given.file else None
    raw, where, assumed = read_raw(given, spec)
    shape = shape_of(raw, where)
    wish = wish_of(given, spec, shape)
    planned = plan(shape, wish)
    missing = [*refusals(raw, where), *beyond_contract(wish, planned.dtype)]
    if given.json:
        whole = as_json(planned, missing)
        whole["notes"] = [*assumed, *whole["notes"]]
        print(json.dumps(whole, indent=2))
    else:
        print(as_text(planned, missing))
        for note in assumed:
            print(f"note: {note}")
    return 0


def wish_of(given: argparse.Namespace, spec: PolicySpec | None, shape: Shape) -> Wish:
    """The flags over the policy. Raises CommandFailed and CannotPlan."""
    cache = spec.cache if spec else None
    if given.tokens:
        tokens = tokens_of(given.tokens)
    elif not (tokens := spec.engine.model.max_tokens if spec else shape.max_positions):
        raise CommandFailed("the model doesn't say its context: give --tokens", 2)
    return Wish(
        tokens,
        dtype=given.dtype or (cache.dtype.value if cache else "Auto"),
        pool=_size("--pool", given.pool) if given.pool else parse_quantity(cache.capacity) if cache else None,
        block_tokens=given.block_tokens if given.block_tokens is not None else cache.block_tokens if cache else 1,
        budget_percent=given.token_budget,
        sparse_pages=given.sparse_pages,
        shared_prefix=tokens_of(given.shared_prefix) if given.shared_prefix else 0,
        offload=_size("--offload", given.offload) if given.offload else 0,
    )


def _size(flag: str, text: str) -> int:
    """Raises CommandFailed."""
    try:
        return parse_quantity(text)
    except ValueError as error:
        raise CommandFailed(f"{flag}: {error}", 2) from None

"""The three subcommands: their flags, and which is run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from kvsteward_bench.plan import catalogue
from kvsteward_bench.plan.errors import CannotPlan

from kvsteward_cli.errors import CommandFailed
from kvsteward_cli.planning import advise, lint, plan

PLAN_EXAMPLES = """examples:
  kvsteward plan --config config.json --tokens 128K --pool 40Gi
  kvsteward plan --model llama-3.1-70b --tokens 8192 --pool 8Gi --dtype FP8 --json
  kvsteward plan -f policy.yaml --config config.json
  kvsteward plan --model qwen3-8b --tokens 4096 --pool 8Gi --shared-prefix 896
"""
ADVISE_EXAMPLES = """examples:
  kvsteward advise
  kvsteward advise --memory-full --duplicate-prompts
  kvsteward advise --slow-attention --model gemma-3-4b --json
"""
LINT_EXAMPLES = """examples:
  kvsteward lint policy.yaml
  kvsteward lint policy.yaml --config config.json
  kubectl get kvcp support-chat -o yaml | kvsteward lint - -o json

exit status: 0 nothing found, 1 risks only, 2 invalid
"""

_Adds = Callable[[argparse.ArgumentParser], None]
_Runs = Callable[[argparse.Namespace], int]
COMMANDS: dict[str, tuple[_Adds, _Runs, str, str]] = {
    "plan": (plan.add_arguments, plan.run, "bytes a token, and what fits into a pool", PLAN_EXAMPLES),
    "advise": (advise.add_arguments, advise.run, "which technique answers which constraint", ADVISE_EXAMPLES),
    "lint": (lint.add_arguments, lint.run, "what is wrong or risky in a policy file", LINT_EXAMPLES),
}


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """To the parser of `kvsteward`."""
    for name, (add_arguments, _, purpose, examples) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=purpose,
            description=f"{purpose.capitalize()}.",
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_arguments(command)
        which = command.add_mutually_exclusive_group()
        which.add_argument("--config", type=Path, metavar="FILE", help="a model's config.json, or its folder")
        which.add_argument("--model", metavar="NAME", help=f"a known model: {', '.join(catalogue.names())}")


def execute(given: argparse.Namespace) -> int:
    """Exit status. Raises CommandFailed."""
    try:
        return COMMANDS[given.command][1](given)
    except CannotPlan as cannot:
        raise CommandFailed(str(cannot), 2) from None

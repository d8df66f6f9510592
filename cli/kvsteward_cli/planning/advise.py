"""`kvsteward advise`: which technique answers which constraint, and what it costs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from kvsteward_bench.plan import advice

from kvsteward_cli.planning.models import Model, offered, read_model


def add_arguments(command: argparse.ArgumentParser) -> None:
    for one in advice.SITUATIONS:
        command.add_argument(f"--{one.key}", action="append_const", dest="situations", const=one.key, help=one.when)
    command.add_argument("--json", action="store_true", help="one JSON object")


def run(given: argparse.Namespace) -> int:
    """Raises CommandFailed and CannotPlan."""
    keys = dict.fromkeys(given.situations or [one.key for one in advice.SITUATIONS])
    model = read_model(given)
    answers = [_answer(advice.BY_KEY[key], model) for key in keys]
    if given.json:
        print(json.dumps({"situations": answers}, indent=2))
    else:
        print("\n\n".join(_advice_text(answer) for answer in answers))
    return 0


def _answer(situation: advice.Situation, model: Model | None) -> dict[str, Any]:
    techniques = []
    for one in situation.techniques:
        answer: dict[str, Any] = {
            "technique": one.name,
            "changes": one.changes,
            "saves": one.saves,
            "tradeOff": one.trade_off,
            "doesNotHelp": one.leaves,
            "partOfCheckpoint": one.trained,
            "field": one.field,
            "served": None if one.trained else _served(one),
        }
        if model is not None and one.trained:
            answer["inThisModel"] = advice.has(one, model.shape)
            answer["served"] = not model.refused if answer["inThisModel"] else False
        techniques.append(answer)
    return {"situation": situation.key, "when": situation.when, "first": situation.first, "techniques": techniques}


def _served(technique: advice.Technique) -> bool:
    parent, _, field = technique.field.rpartition(".")
    return parent != "spec.cache" or offered(field)


def _advice_text(answer: Mapping[str, Any]) -> str:
    lines = [f"{answer['situation']}: {answer['when']}", f"  first: {answer['first']}"]
    for number, one in enumerate(answer["techniques"], 1):
        lines.append(f"  {number}. {one['technique']}: {one['saves']}")
        lines.append(f"     changes {one['changes']}; does nothing about {one['doesNotHelp']}")
        lines.append(f"     trade-off: {one['tradeOff']}")
        lines.append(f"     {_how(one)}")
    return "\n".join(lines)


def _how(one: Mapping[str, Any]) -> str:
    if one.get("inThisModel") is False:
        return "this model does not have it, and no setting can add it"
    if one["partOfCheckpoint"]:
        suffix = {True: ", and the engine serves it", False: ", which this engine does not serve yet", None: ""}
        return f"comes with the checkpoint{suffix[one['served']]}"
    if not one["served"]:
        return f"planned as {one['field']}, not served by this engine yet"
    return f"set {one['field']}" if one["field"] else "always on"

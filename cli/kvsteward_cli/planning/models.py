"""The model and the policy that the flags name, and what this engine serves of them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from kvsteward_bench.plan import catalogue
from kvsteward_bench.plan.architectures import shape_of
from kvsteward_bench.plan.arithmetic import Wish
from kvsteward_bench.plan.shape import Shape
from kvsteward_bench.plan.sizes import QUANTISED, readable
from kvsteward_contract import wire
from kvsteward_contract.policy import Cache, DType, InvalidPolicy, PolicySpec, decode_policy
from kvsteward_contract.quantity import parse_quantity

from kvsteward_cli.errors import CommandFailed
from kvsteward_cli.yaml_file import read_documents


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint as its config.json tells it; `refused`: why this engine doesn't serve it, '' if it does."""

    shape: Shape
    refused: str


def read_model(given: argparse.Namespace) -> Model | None:
    """The model that the flags name. Raises CommandFailed and CannotPlan."""
    if given.config is None and given.model is None:
        return None
    raw, where, _ = read_raw(given, None)
    return Model(shape_of(raw, where), "; ".join(refusals(raw, where)))


def read_raw(given: argparse.Namespace, spec: PolicySpec | None) -> tuple[Mapping[str, Any], str, tuple[str, ...]]:
    """config.json, its name for messages, and what had to be assumed. Raises CommandFailed and CannotPlan."""
    if given.config is not None:
        return read_config(given.config), str(given.config), ()
    if given.model is not None:
        return catalogue.load(given.model), given.model, ()
    if spec is None:
        raise CommandFailed("give a model: --config config.json, --model NAME or -f policy.yaml", 2)
    name = spec.engine.model.name
    if (known := catalogue.find(name)) is None:
        sequences, tokens = spec.engine.max_concurrent, spec.engine.model.max_tokens
        most = parse_quantity(spec.cache.capacity) // (sequences * tokens)
        raise CommandFailed(
            f"{name} is no model this command knows: give its --config; for {sequences} sequences of {tokens:,} tokens "
            f"in {spec.cache.capacity} it may take {readable(most)} a token",
            2,
        )
    return catalogue.load(known), known, (f"sizes of {known} are taken from the policy's model name; --config is sure",)


def read_config(path: Path) -> Mapping[str, Any]:
    """Raises CommandFailed."""
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_bytes())
    except OSError as error:
        raise CommandFailed(f"--config {file} can't be read: {error.strerror}", 2) from None
    except ValueError:
        raise CommandFailed(f"--config {file} is no JSON; a model's config.json is needed", 2) from None
    if not isinstance(raw, dict):
        raise CommandFailed(f"--config {file} holds no JSON object; a model's config.json is needed", 2)
    return raw


def read_spec(file: str) -> PolicySpec:
    """Of the one policy in a file. Raises CommandFailed."""
    policies = [one for one in read_documents(file) if is_policy(one)]
    if len(policies) != 1:
        raise CommandFailed(f"-f {file} holds {len(policies)} {wire.KIND} documents; one is needed", 2)
    try:
        return decode_policy(policies[0]).spec
    except InvalidPolicy as invalid:
        raise CommandFailed(f"-f {file} is not accepted: {invalid}", 2) from None


def refusals(raw: Mapping[str, Any], where: str) -> list[str]:
    """What the engine says of the checkpoint: one sentence, or none."""
    from kvsteward_engine.config import parse_config
    from kvsteward_engine.errors import StartError

    try:
        parse_config(raw, where)
    except StartError as refusal:
        return [str(refusal)]
    except (AttributeError, KeyError, TypeError, ValueError):  # fields that no plan needs, of types that can't be right
        return [f"{where} has a field whose value the engine can't read"]
    return []


def beyond_contract(wish: Wish, dtype: str) -> list[str]:
    """What a policy can't ask for yet, and therefore no engine does."""
    asked = {
        f"{dtype} pages": dtype not in {one.value for one in DType},
        "a token budget": wish.budget_percent < 100 and not offered("tokenBudget"),
        "sparse reads": bool(wish.sparse_pages) and not offered("sparseReads"),
        "host offload": bool(wish.offload) and not offered("offload"),
    }
    return [what for what, missing in asked.items() if missing]


def offered(field: str) -> bool:
    """Whether spec.cache has the field, and so the engine what it asks for: a field is there on the day it works."""
    if field == "dtype":  # which has always been there; what counts is a quantised one
        return any(one.value in QUANTISED for one in DType)
    return field in {one.encode_name for one in msgspec.structs.fields(Cache)}


def is_policy(document: Any) -> bool:
    """Other kinds of the same file are somebody else's; what has no kind at all is a policy gone wrong."""
    return not isinstance(document, dict) or document.get("kind", wire.KIND) == wire.KIND

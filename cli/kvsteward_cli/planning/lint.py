"""`kvsteward lint`: what is wrong or risky in a policy file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from kvsteward_bench.plan.findings import Finding, Level, status
from kvsteward_bench.plan.lint import lint
from kvsteward_contract import wire

from kvsteward_cli.errors import CommandFailed
from kvsteward_cli.planning.models import is_policy, read_model
from kvsteward_cli.yaml_file import read_documents


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", help="one or more KVCachePolicy documents, - for stdin")
    command.add_argument("-o", "--output", choices=["text", "json"], default="text")
    command.add_argument("--json", action="store_const", dest="output", const="json", help="the same as -o json")


def run(given: argparse.Namespace) -> int:
    """Raises CommandFailed and CannotPlan."""
    model = read_model(given)
    found: list[tuple[str, Finding]] = []
    policies = [one for one in read_documents(given.file) if is_policy(one)]
    if not policies:
        raise CommandFailed(f"{given.file} holds no {wire.KIND}", 2)
    for index, resource in enumerate(policies):
        name = _name(resource) or f"document {index + 1}"
        shape, refused = (model.shape, model.refused) if model else (None, "")
        found += [(name, finding) for finding in lint(resource, shape, refused)]
    code = status(finding for _, finding in found)
    result = ("clean", "risks", "invalid")[code]
    if given.output == "json":
        findings = [
            {"policy": name, "level": one.level.value, "code": one.code, "field": one.field, "message": one.message}
            for name, one in found
        ]
        print(json.dumps({"file": given.file, "result": result, "findings": findings}, indent=2))
    else:
        for name, one in found:
            print(f"{name}: {one.level.value} {one.code}: {_located(one)}")
        print(f"{given.file}: {_summary(found)}")
    return code


def _located(finding: Finding) -> str:
    """Messages of the contract name their field themselves."""
    named = finding.message.startswith(("spec", "metadata", "expected"))
    return finding.message if named or not finding.field else f"{finding.field}: {finding.message}"


def _summary(found: Sequence[tuple[str, Finding]]) -> str:
    errors = sum(one.level is Level.ERROR for _, one in found)
    if errors:
        return f"invalid, {errors} error{'s' * (errors > 1)}"
    return f"valid, {len(found)} risk{'s' * (len(found) > 1)}" if found else "valid, nothing found"


def _name(resource: Any) -> str:
    metadata = resource.get("metadata") if isinstance(resource, dict) else None
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) else ""

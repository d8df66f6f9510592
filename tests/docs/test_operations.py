"""docs/operations.md says what every reason means that the code can give, and none that it can't."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvsteward_cli.cluster.main import add_commands
from kvsteward_contract.policy import Stage
from kvsteward_contract.status import CONDITIONS

ROOT = Path(__file__).parents[2]
OPERATOR, CONTRACT = ROOT / "operator" / "kvsteward_operator", ROOT / "contract" / "kvsteward_contract"
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
WORD = re.compile(r"[A-Z][A-Za-z]+")
COMMANDS = set("status receipts ledger pause resume kill release promote rollback".split())
NO_REASONS = {"True", "False", "Unknown", "Normal", "Warning", "Event", "Insufficient", "Bearer"}


def words(tree: ast.AST) -> Iterator[str]:
    """CamelCase strings of some code; `f"Stage{...}"` stands for one with each stage but Full, which has its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            first = node.values[0]
            if isinstance(first, ast.Constant) and first.value == "Stage":
                yield from (f"Stage{stage.value}" for stage in Stage if stage is not Stage.FULL)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and WORD.fullmatch(node.value):
            yield node.value


def code(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def conditions() -> set[str]:
    """Reasons of conditions: every such word in conditions.py that is neither a status nor a condition."""
    return set(words(code(OPERATOR / "conditions.py"))) - NO_REASONS - set(CONDITIONS) - {"Stage"}


def events() -> set[str]:
    """Reasons of events: of the tables and of the history, in events.py."""
    tree = code(OPERATOR / "events.py")
    returned = {
        word
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name == "_history_event"
        for node in ast.walk(function)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple)
        for word in words(node.value.elts[0])
    }
    tables = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Dict)
    }
    found = {word for table in tables.values() for value in table.values for word in words(value)}
    return (returned | found) - NO_REASONS


def refusals() -> set[str]:
    """Why a spec is not accepted: the first argument of every Refusal."""
    found = set()
    for file in [*OPERATOR.rglob("*.py"), CONTRACT / "policy.py"]:
        tree = code(file)
        constants = {
            node.targets[0].id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Refusal":
                first = node.args[0]
                found.update({constants[first.id]} if isinstance(first, ast.Name) else words(first))
    return found


def section(heading: str) -> str:
    """What stands under a heading, without what stands under the next of its level."""
    found = re.search(rf"^(#+) {re.escape(heading)}\n(.*?)(?=^#{{1,2}} |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/operations.md has no section {heading!r}"
    return found[2]


def explained(heading: str) -> set[str]:
    """What the first column of the section's tables names."""
    rows = re.findall(r"^\| *(`[^|]*`) *\|", section(heading), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


@pytest.mark.parametrize(
    ("heading", "known"),
    [
        pytest.param("Events", events(), id="events"),
        pytest.param("Conditions", conditions(), id="conditions"),
        pytest.param("Why a spec is not accepted", refusals(), id="refusals"),
    ],
)
def test_every_reason_that_the_code_can_give_is_explained_and_no_other(heading: str, known: set[str]) -> None:
    assert len(known) > 5, "the code is read wrongly: it gives more reasons than these"
    assert explained(heading) == known


def test_every_condition_has_its_own_heading() -> None:
    assert tuple(re.findall(r"^### (\w+)", section("Conditions"), re.MULTILINE)) == CONDITIONS


def test_every_command_that_is_shown_exists() -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_commands(parser)
    shown = re.findall(r"kubectl kvcache ([a-z][^#`\n]+)", PAGE)
    assert len(shown) > 15
    assert {line.split()[0] for line in shown} == COMMANDS
    for line in shown:
        parser.parse_args(line.replace("NAME", "support-chat").split())

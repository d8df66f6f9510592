"""What people write, and what editors leave behind, is read or refused in one way."""

from __future__ import annotations

import pytest
from kvsteward_sidecar.yaml_text import LARGEST, InvalidYaml, document, documents


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("a: 1\nb: 2\na: 3\n", "the key 'a' occurs twice", id="key-twice"),
        pytest.param("r: {killSwitch: Engaged, killSwitch: Released}", "'killSwitch' occurs twice", id="switch-twice"),
        pytest.param("a: 2025-13-47\n", "month must be in", id="impossible-date"),
        pytest.param(f"a: {'9' * 5_000}\n", "limit", id="number-that-nothing-holds"),
        pytest.param("[" * 5_000, "recursion", id="nested-too-deeply"),
        pytest.param('a: "\\uD800"\n', "surrogates", id="half-a-character"),
        pytest.param("a:\n\t- b\n", "line 2", id="tab"),
        pytest.param("a: *nowhere\n", "nowhere", id="alias-of-nothing"),
        pytest.param("? [a]\n: b\n", "unhashable", id="key-that-is-a-list"),
        pytest.param("!!python/object/apply:os.system ['true']", "tag", id="tag-that-would-run-code"),
        pytest.param("a: 1\n---\na: 2\n", "2 documents", id="two-documents"),
        pytest.param("a" * (LARGEST + 1), "no resource is that large", id="too-large"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(text: str, message: str) -> None:
    with pytest.raises(InvalidYaml, match=message) as caught:
        document(text)
    assert "\n" not in str(caught.value)


def test_anchors_and_merges_are_no_keys_that_occur_twice() -> None:
    assert document("x: &x {a: 1, b: 2}\ny: {<<: *x, b: 3}\nz: *x\n")["y"] == {"a": 1, "b": 3}


def test_a_mark_at_the_start_and_other_scripts_are_read() -> None:
    assert document("\ufeffa: grüße, 你好 🙂\n") == {"a": "grüße, 你好 🙂"}


def test_empty_documents_do_not_count() -> None:
    assert documents("---\na: 1\n---\n") == [{"a": 1}]
    assert document("# nothing\n") is None

"""YAML texts that people write, read as strictly as the API server reads them: a key that occurs twice is an error,
where YAML itself silently takes the last. Whatever is wrong with a text becomes one exception."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

LARGEST = 4 << 20  # characters; a resource of a cluster has at most 1.5 MB


class InvalidYaml(ValueError):
    """The text can't be read; says where and why, in one line."""


class _Strict(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"the key {key.value!r} occurs twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        if isinstance(value, str) and not value.isascii():
            value.encode()  # raises UnicodeEncodeError: half a character, which no other text can hold
        return value


def documents(text: str) -> list[Any]:
    """Every document that isn't empty. Raises InvalidYaml."""
    if len(text) > LARGEST:
        raise InvalidYaml(f"it has more than {LARGEST >> 20} Mi characters: no resource is that large")
    try:
        loaded = list(yaml.load_all(text, Loader=_Strict))
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # impossible dates and numbers are ValueErrors
        raise InvalidYaml(" ".join(str(error).split())) from None
    return [one for one in loaded if one is not None]


def document(text: str) -> Any:
    """The one document; None if the text holds none. Raises InvalidYaml."""
    found = documents(text)
    if len(found) > 1:
        raise InvalidYaml(f"it holds {len(found)} documents, and must hold one")
    return found[0] if found else None

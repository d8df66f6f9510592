"""The model's chat template: messages to the text that the model was trained on.

Templates come with checkpoints and are run in Jinja's immutable sandbox, with the names that Hugging Face's
templates expect (`raise_exception`, `strftime_now`, `tojson`, `{% generation %}`, break and continue).
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvsteward_engine.errors import BadCheckpoint, InvalidRequest


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant said, for training; here it is plain text."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Unlike Jinja's own filter this escapes nothing for HTML, as templates of models expect."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _now(pattern: str) -> str:
    return datetime.datetime.now().astimezone().strftime(pattern)


class ChatTemplate:
    """A compiled template with the model's special tokens at hand. Raises `BadCheckpoint` on a template that
    doesn't compile."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise, strftime_now=_now)
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise BadCheckpoint(f"the model's chat template does not compile: {error}") from error

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt's text. Raises `InvalidRequest` with the template's words if it refuses the messages."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise InvalidRequest(f"the model's chat template refused the messages: {error}") from error


def chat_template_of(config: Mapping[str, Any]) -> ChatTemplate | None:
    """The template in a tokenizer_config.json: `chat_template` is a string, or a list of named ones of which
    "default" counts. None if it has none."""
    source = config.get("chat_template")
    if isinstance(source, list):
        source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, special_tokens(config))


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, ... of a tokenizer_config.json, where each is a string or an added-token object."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = config.get(name)
        if isinstance(token, Mapping):
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found

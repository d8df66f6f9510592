"""Chat templates run in a sandbox, with the names that checkpoints' templates expect."""

import datetime

import pytest
from kvsteward_engine.chat_template import ChatTemplate, chat_template_of
from kvsteward_engine.errors import InvalidRequest

HI = [{"role": "user", "content": "hi"}]


def render(source: str, **tokens: str) -> str:
    return ChatTemplate(source, tokens).render(HI)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        pytest.param("{{ bos_token }}{{ messages[0]['content'] }}", "<s>hi", id="special tokens"),
        pytest.param("{% if tools is none and not documents %}none{% endif %}", "none", id="no tools"),
        pytest.param('{{ {"a": "<\u00e9>"} | tojson }}', '{"a": "<\u00e9>"}', id="tojson escapes nothing"),
        pytest.param("{% for m in [1, 2] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1", id="break"),
        pytest.param("{% generation %}said{% endgeneration %}", "said", id="generation"),
        pytest.param("{% if true %}\n  a\n{% endif %}\n", "  a\n", id="blocks are trimmed"),
        pytest.param("{{ '' if add_generation_prompt else 'no' }}", "", id="generation prompt"),
        pytest.param("{{ messages[0].content | trim }}", "hi", id="attributes"),
    ],
)
def test_templates_find_what_they_expect(source: str, expected: str) -> None:
    assert render(source, bos_token="<s>") == expected


def test_the_date_is_todays() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().astimezone().year)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("{{ raise_exception('roles must alternate') }}", id="the template refuses"),
        pytest.param("{{ messages.append(1) }}", id="it can't change what it is given"),
        pytest.param("{{ ''.__class__.__mro__ }}", id="it can't reach into Python"),
        pytest.param("{{ messages[0].content + 1 }}", id="it is wrong for this request"),
        pytest.param("{{ messages[7].content }}", id="it looks for what is not there"),
        pytest.param("{{ range(999999999) | list }}", id="it asks for too much"),
    ],
)
def test_a_failing_template_is_the_requests_fault_not_the_engines(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template refused"):
        render(source)


def test_the_named_template_default_is_taken() -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    template = chat_template_of({"chat_template": named, "bos_token": {"content": "<s>"}})
    assert template is not None and template.render(HI) == "d"
    assert chat_template_of({"chat_template": named[:1]}) is None
    assert chat_template_of({}) is None

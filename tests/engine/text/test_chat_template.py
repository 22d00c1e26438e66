"""Chat templates render as in transformers, within the sandbox."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from goodput_core.errors import InputError
from goodput_engine.text.chat_template import ChatTemplate

CHAT = [("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi"), ("user", "<b>ü</b>")]
NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)


def render(source: str, messages: list[tuple[str, str]] | None = None) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, now=lambda: NOON)
    chat = CHAT if messages is None else messages
    return template.render([{"role": role, "content": content} for role, content in chat])


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        pytest.param(
            "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{{ eos_token }}"
            "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
            "<s>[system]Be brief.</s>[user]Hello</s>[assistant]Hi</s>[user]<b>ü</b></s>[assistant]",
            id="roles and contents",
        ),
        pytest.param(
            "{% for m in messages %}{{ loop.index }}/{{ loop.length }}"
            "{{ '.' if loop.last else ', ' }}{% endfor %}",
            "1/4, 2/4, 3/4, 4/4.",
            id="variables of a loop",
        ),
        pytest.param(
            "{% for m in messages if m.role == 'user' %}{{ loop.index0 }}>"
            "{{ m.content }};{% endfor %}",
            "0>Hello;1><b>ü</b>;",
            id="a filtered loop",
        ),
        pytest.param(
            "{% for m in messages %}{% if loop.index == 3 %}{% break %}{% endif %}x{% endfor %}",
            "xx",
            id="break",
        ),
        pytest.param(
            "  {% if true %}\n    kept\n  {% endif %}\n", "    kept\n", id="white space of blocks"
        ),
        pytest.param(
            "{{ messages[3] | tojson }}", '{"role": "user", "content": "<b>ü</b>"}', id="JSON"
        ),
        pytest.param("{{ strftime_now('%d %b %Y') }}", "23 Nov 2026", id="the date"),
        pytest.param("{% generation %}x{% endgeneration %}", "x", id="a block of training"),
        pytest.param("{% if tools %}x{% endif %}{{ nothing }}.", ".", id="undefined values"),
        pytest.param(
            "{% for x in nothing %}x{% else %}none{% endfor %}", "none", id="an empty loop"
        ),
        pytest.param(
            "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}",
            "role=system;content=Be brief.;",
            id="pairs",
        ),
        pytest.param(
            "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}"
            "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
            "4",
            id="a namespace",
        ),
        pytest.param(
            "{% macro f(m) %}<{{ m.role }}>{% endmacro %}{{ f(messages[0]) }}",
            "<system>",
            id="macro",
        ),
    ],
)
def test_a_template_renders(source: str, prompt: str) -> None:
    assert render(source) == prompt


def test_the_error_of_a_template_is_passed_on() -> None:
    with pytest.raises(InputError, match="rejects the messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("{{ messages[9].content.text }}", id="an undefined value"),
        pytest.param("{{ messages + 1 }}", id="wrong types"),
        pytest.param("{{ 1 / (messages | length - 4) }}", id="a division by zero"),
        pytest.param("{{ ''.__class__.__mro__ }}", id="the sandbox"),
        pytest.param("{{ messages.append(1) }}", id="a change of the messages"),
        pytest.param("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", id="endless recursion"),
    ],
)
def test_a_template_that_fails_is_one_sentence(source: str) -> None:
    with pytest.raises(InputError) as error:
        render(source)
    assert str(error.value).startswith("the chat template of the model fails for these messages: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("{% for %}", id="a loop without a list"),
        pytest.param("{{", id="an open expression"),
        pytest.param("{% unknown %}", id="an unknown block"),
        pytest.param("{{ x | unknown }}", id="an unknown filter"),
        pytest.param("{{ x is unknown }}", id="an unknown test"),
        pytest.param("{{ " + "(" * 500 + ")" * 500 + " }}", id="nested parentheses"),
        pytest.param("{% for a in b %}" * 25 + "{% endfor %}" * 25, id="nested loops"),
        pytest.param("{% if a %}" * 200 + "{% endif %}" * 200, id="nested conditions"),
        pytest.param("{{ " + "9" * 5000 + " }}", id="a number of 5,000 digits"),
    ],
)
def test_an_invalid_template_is_rejected_when_it_is_loaded(source: str) -> None:
    with pytest.raises(InputError, match="the chat template is invalid: "):
        render(source)


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        pytest.param("{{ 'a' ~ 1 ~ none ~ nothing }}", "a1None", id="joined values"),
        pytest.param("{{ 1 + 2 * 3 % 4 }}{{ [1] + [2] }}", "3[1, 2]", id="numbers and lists"),
        pytest.param("{{ '%-5s|%05.1f' % ('a', 2) }}", "a    |002.0", id="widths"),
        pytest.param("{{ '{:>3}|{a:02d}'.format('a', a=1) }}", "  a|01", id="a format"),
        pytest.param("{{ '%s: %d' | format('a', 1) }}", "a: 1", id="a filter for formats"),
        pytest.param("{{ [1] | tojson(indent=4) }}", "[\n    1\n]", id="indented JSON"),
        pytest.param(
            "{% macro f(x) %}{{ caller(x + 'b') }}{% endmacro %}"
            "{% call(y) f('a') %}[{{ y ~ 'c' }}]{% endcall %}",
            "[abc]",
            id="a block that is called",
        ),
    ],
)
def test_operators_have_their_usual_results(source: str, prompt: str) -> None:
    assert render(source) == prompt


def test_ten_thousand_messages_are_rendered() -> None:
    source = "{% for m in messages %}{{ m.role | trim }}{{ m.content.strip() }}{% endfor %}"
    assert len(render(source, [("user", "x")] * 10_000)) == 50_000


def test_messages_are_not_templates() -> None:
    assert render("{{ messages[0].content }}", [("user", "{{ 7 * 7 }}")]) == "{{ 7 * 7 }}"


def test_json_of_a_template_is_not_escaped() -> None:
    text = "'\"<>&ü"
    assert json.loads(render("{{ messages[0].content | tojson }}", [("user", text)])) == text

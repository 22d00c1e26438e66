"""Calls of tools are found in outputs, however their text is divided into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_engine.text.tool_calls import ToolCall, ToolCallParser, ToolFormat, tool_format

CALL = ToolCall(name="add", arguments='{"a": 1, "b": "</x>"}')
TIME = ToolCall(name="time", arguments="{}")
ADD_TEXT = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "</x>"}}\n</tool_call>'
TIME_TEXT = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
LLAMA_TEXT = '{"name": "add", "parameters": {"a": 1, "b": "</x>"}}'


def parse(form: ToolFormat, pieces: list[str]) -> tuple[str, list[ToolCall]]:
    parser = ToolCallParser(form)
    text, calls = "", []
    for at, piece in enumerate(pieces):
        part, found = parser.feed(piece, last=at == len(pieces) - 1)
        text += part
        calls += found
    assert parser.count == len(calls)
    return text, calls


OUTPUTS = {
    "one call": (ToolFormat.HERMES, ADD_TEXT, "", [CALL]),
    "text and two calls": (
        ToolFormat.HERMES,
        f"I add.\n{ADD_TEXT}\n{TIME_TEXT}\n",
        "I add.",
        [CALL, TIME],
    ),
    "text around calls": (
        ToolFormat.HERMES,
        f" {ADD_TEXT}\n First.\n{TIME_TEXT}\n Then. \n",
        "First.\n\n Then.",
        [CALL, TIME],
    ),
    "white space without calls": (ToolFormat.HERMES, " \n a \n", None, []),
    "no closing tag": (ToolFormat.HERMES, ADD_TEXT.removesuffix("</tool_call>"), "", [CALL]),
    "text alone": (ToolFormat.HERMES, "a < b <tool", "a < b <tool", []),
    "no JSON": (ToolFormat.HERMES, "<tool_call>add(1)</tool_call>!", None, []),
    "no arguments": (ToolFormat.HERMES, '<tool_call>{"name": "time"}</tool_call>', None, []),
    "no name": (ToolFormat.HERMES, '<tool_call>{"arguments": {}}</tool_call>', None, []),
    "a list": (
        ToolFormat.HERMES,
        '<tool_call>{"name": "a", "arguments": []}</tool_call>',
        None,
        [],
    ),
    "Llama": (ToolFormat.LLAMA3_JSON, LLAMA_TEXT, "", [CALL]),
    "Llama with a tag": (ToolFormat.LLAMA3_JSON, f"<|python_tag|>{LLAMA_TEXT}", "", [CALL]),
    "two of Llama": (
        ToolFormat.LLAMA3_JSON,
        f'{LLAMA_TEXT}; {{"name": "time", "parameters": {{}}}}',
        "",
        [CALL, TIME],
    ),
    "Llama's text": (ToolFormat.LLAMA3_JSON, f"Use {LLAMA_TEXT}", None, []),
    "Llama's JSON": (ToolFormat.LLAMA3_JSON, '{"answer": 1}', None, []),
    "unknown": (ToolFormat.UNKNOWN, ADD_TEXT, None, []),
}


@pytest.mark.parametrize("case", OUTPUTS)
@given(data=st.data())
def test_calls_are_found_in_every_division(case: str, data: st.DataObject) -> None:
    form, output, text, calls = OUTPUTS[case]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(output) - 1), max_size=12)))
    pieces = [output[a:b] for a, b in zip([0, *cuts], [*cuts, len(output)], strict=True)]
    found, found_calls = parse(form, pieces)
    assert found_calls == calls
    assert found == (output if text is None else text)


def test_text_before_a_call_is_not_held_back() -> None:
    parser = ToolCallParser(ToolFormat.HERMES)
    assert parser.feed("I add <", last=False) == ("I add", [])
    assert parser.feed("b.<tool_c", last=False) == (" <b.", [])
    parser = ToolCallParser(ToolFormat.LLAMA3_JSON)
    assert parser.feed("Hello", last=False) == ("Hello", [])
    assert parser.feed(" {", last=False) == (" {", [])


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ messages }}", None),
        ("{% if tools %}<tool_call>{% endif %}", ToolFormat.HERMES),
        ('{% if tools %}{"name": f, "parameters": d}{% endif %}', ToolFormat.LLAMA3_JSON),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", ToolFormat.UNKNOWN),
    ],
    ids=["none", "hermes", "llama", "another"],
)
def test_the_template_names_the_form(template: str, form: ToolFormat | None) -> None:
    assert tool_format(template) is form

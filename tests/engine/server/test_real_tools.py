"""Tools over HTTP: the template gets them, and the model's calls return in OpenAI's form."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

from openai import AsyncOpenAI
from tests.builders.torch_models import make_folder
from tests.engine.conftest import EngineStarter
from tests.engine.server.test_real_text import VOCABULARY, make_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.engine.conftest import RunningEngine

pytestmark = pytest.mark.torch

# Calls are JSON objects with "parameters", as those of Llama 3.
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}|{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.tool_call_id %}={{ m.tool_call_id }}{% endif %}{% endfor %}>"
    '{# "parameters" #}'
)
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
# A random model calls no tool unless its output has this schema.
CALL_SCHEMA = {
    "type": "object",
    "properties": {"name": {"const": "add"}, "parameters": {"const": {"a": 1}}},
    "required": ["name", "parameters"],
    "additionalProperties": False,
}
CALL_FORMAT = {"type": "json_schema", "json_schema": {"name": "call", "schema": CALL_SCHEMA}}
USER = {"role": "user", "content": "1+1"}


def with_strict(strict: bool | None) -> dict[str, Any]:
    """Return a tool whose arguments must follow the schema, or need not."""
    return {**TOOL, "function": {**TOOL["function"], "strict": strict}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """An engine whose model ends outputs with tokens that have no text."""
    folder = make_folder(
        tmp_path_factory.mktemp("tiny"), "Llama", vocab_size=VOCABULARY, eos_token_id=[0, 1]
    )
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    engines = EngineStarter(tmp_path_factory.mktemp("engine"))
    yield engines.start("--kv-blocks", "60", "--threads", "1", source=f"file://{folder}")
    engines.close()


def chat(**fields: Any) -> dict[str, Any]:
    # Without a bias, the model writes much white space.
    space = [id_ for token, id_ in make_tokenizer().get_vocab().items() if not token.strip("ĠĊĉ")]
    bias = dict.fromkeys(map(str, space), -100)
    return {
        "model": "chat", "messages": [USER], "max_tokens": 80, "logit_bias": bias, **fields
    }  # fmt: skip


async def post(engine: RunningEngine, **fields: Any) -> tuple[int, dict[str, Any]]:
    async with (
        aiohttp.ClientSession(engine.url) as http,
        http.post("/v1/chat/completions", json=chat(**fields)) as response,
    ):
        return response.status, await response.json()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_call_returns_in_the_form_of_openai(engine: RunningEngine, stream: bool) -> None:
    async with AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as client:
        body = chat(tools=[TOOL], response_format=CALL_FORMAT)
        if stream:
            events = [
                one async for one in await client.chat.completions.create(**body, stream=True)
            ]
            choices = [one.choices[0] for one in events if one.choices]
            calls = [call for one in choices for call in one.delta.tool_calls or []]
            # Each token is an event: those of the call without a text, the last one with the call.
            contents = [one.delta.content for one in choices]
            assert contents == ["" for _ in contents[:-2]] + [None, None]
            assert len(contents) > 10
            assert [call.index for call in calls] == [0]
            assert choices[0].delta.role == "assistant"
            reason = choices[-1].finish_reason
        else:
            answer = await client.chat.completions.create(**body)
            (choice,) = answer.choices
            assert choice.message.content is None
            calls, reason = choice.message.tool_calls, choice.finish_reason
    (call,) = calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    assert call.id.startswith("call_")
    assert reason == "tool_calls"


async def test_an_output_without_tools_is_text(engine: RunningEngine) -> None:
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        status, answer = await post(engine, response_format=CALL_FORMAT, **fields)
        assert status == 200
        message = answer["choices"][0]["message"]
        assert json.loads(message["content"]) == {"name": "add", "parameters": {"a": 1}}
        assert "tool_calls" not in message
        assert answer["choices"][0]["finish_reason"] == "stop"


async def test_the_template_gets_tools_calls_and_results(engine: RunningEngine) -> None:
    called = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    _, answer = await post(engine, messages=messages, tools=[TOOL], max_tokens=1)
    prompt = 'add|user:1+1|assistant:c1{"a": 1}|tool:2=c1>'
    assert answer["usage"]["prompt_tokens"] == len(make_tokenizer().encode(prompt).ids)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [TOOL, with_strict(True)]}, "tools[1].function.strict"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"messages": [USER, {"role": "tool", "content": "2"}]}, "messages[1].tool_call_id"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "function": {}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "c", "function": {"name": "a", "arguments": "[1]"}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
async def test_an_invalid_field_of_tools_is_named(
    engine: RunningEngine, fields: dict[str, Any], param: str
) -> None:
    status, answer = await post(engine, **fields)
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize("strict", [False, None])
async def test_a_tool_that_is_not_strict_is_accepted(
    engine: RunningEngine, strict: bool | None
) -> None:
    status, _ = await post(engine, tools=[with_strict(strict)], max_tokens=1)
    assert status == 200

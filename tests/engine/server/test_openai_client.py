"""The `openai` package as the client of a real engine process."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

import openai
import pytest

from goodput_engine.openai.bodies import ChatBody, CompletionBody
from goodput_engine.tokens import answer_text, count_tokens, encode_chat

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.engine.conftest import RunningEngine, StartEngine


@pytest.fixture
def client(engine: RunningEngine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_is_streamed(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="chat",
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "how are you"},
        ],
        max_completion_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, reasons, usage, roles = "", [], None, []
    with stream:
        for chunk in stream:
            if chunk.usage is not None:
                usage = chunk.usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                roles.append(choice.delta.role)
                if choice.finish_reason is not None:
                    reasons.append(choice.finish_reason)
    assert text == answer_text(0, 12)
    assert reasons == ["length"]
    assert roles[0] == "assistant"
    assert usage is not None
    assert usage.completion_tokens == 12
    prompt = encode_chat([("system", "be brief"), ("user", "how are you")])
    assert usage.prompt_tokens == len(prompt)


def test_a_completion_is_streamed_with_one_token_per_event(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="chat", prompt="once", max_tokens=20, stream=True)
    with stream:
        pieces = [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == answer_text(0, 20)
    assert all(piece.strip() for piece in pieces)


def test_responses_that_are_not_streamed_are_complete(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="chat", messages=[{"role": "user", "content": "hi"}], max_tokens=5, temperature=0
    )
    assert chat.choices[0].message.content == answer_text(0, 5)
    assert chat.choices[0].finish_reason == "length"
    completion = client.completions.create(model="chat", prompt=[5, 6, 7], max_tokens=3, seed=1)
    assert completion.choices[0].text == answer_text(0, 3)
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == 3


def test_the_second_turn_of_a_conversation_finds_its_prefix_cached(client: openai.OpenAI) -> None:
    chat: list[Any] = [{"role": "user", "content": "tell me more of this " * 40}]
    answer = client.chat.completions.create(model="chat", messages=chat, max_tokens=40)
    # A client sends the response back with all its empty fields.
    chat += [answer.choices[0].message.model_dump(), {"role": "user", "content": "and?"}]
    again = client.chat.completions.create(model="chat", messages=chat, max_tokens=1)
    assert again.usage is not None
    assert answer.usage is not None
    details = again.usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens is not None
    assert details.cached_tokens >= answer.usage.prompt_tokens // 16 * 16 - 16


def test_stop_strings_end_an_output(client: openai.OpenAI) -> None:
    # The string is part of "jumps over", so it spans two tokens.
    for stop in ("mps ov", ["nothing", "mps ov"]):
        completion = client.completions.create(model="chat", prompt="x", max_tokens=50, stop=stop)
        assert completion.choices[0].text == "the quick brown fox ju"
        assert completion.choices[0].finish_reason == "stop"
        assert completion.usage is not None
        assert completion.usage.completion_tokens == 6
    with client.completions.create(
        model="chat", prompt="x", max_tokens=50, stop="mps ov", stream=True
    ) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "the quick brown fox ju"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_stop_string_within_min_tokens_is_ignored(client: openai.OpenAI) -> None:
    completion = client.completions.create(
        model="chat", prompt="x", max_tokens=50, stop="fox", extra_body={"min_tokens": 10}
    )
    text = completion.choices[0].text
    assert text.startswith(answer_text(0, 10))
    assert completion.usage is not None
    assert completion.usage.completion_tokens > 10
    assert count_tokens(text) == completion.usage.completion_tokens - 1


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("chat", "goodput")
    assert client.models.retrieve("chat") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_errors_raise_the_exceptions_of_the_library(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as two:
        client.completions.create(model="chat", prompt="x", n=2)
    assert two.value.param == "n"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="chat", prompt="w " * 70_000)
    assert long.value.code == "context_length_exceeded"


def test_overload_raises_the_librarys_rate_limit_error(start_engine: StartEngine) -> None:
    engine = start_engine(maxNumSeqs=1, maxWaiting=0)
    with (
        openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as client,
        client.completions.create(
            model="chat", prompt="x", max_tokens=30_000, stream=True
        ) as stream,
    ):
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as rejected:
            client.completions.create(model="chat", prompt="y", max_tokens=1)
        assert int(rejected.value.response.headers["Retry-After"]) >= 1
        assert rejected.value.code == "rate_limit_exceeded"


@pytest.mark.parametrize("body", [ChatBody, CompletionBody])
def test_every_parameter_of_the_library_is_a_known_field(
    client: openai.OpenAI, body: type[ChatBody | CompletionBody]
) -> None:
    api = client.chat.completions if body is ChatBody else client.completions
    of_the_library = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    parameters = set(inspect.signature(type(api).create).parameters) - of_the_library
    assert "temperature" in parameters
    assert parameters <= set(body.__struct_fields__)


async def test_a_stream_that_the_asynchronous_client_ends_early_is_cancelled(
    start_engine: StartEngine,
) -> None:
    engine = start_engine()
    async with openai.AsyncOpenAI(
        base_url=f"{engine.url}/v1", api_key="none", max_retries=0
    ) as client:

        async def leave_after(events: int) -> None:
            stream = await client.completions.create(
                model="chat", prompt="x", max_tokens=30_000, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            async with stream:
                for _ in range(events):
                    await anext(stream)

        await asyncio.gather(*map(leave_after, range(8)))
    state = await engine.state_when(lambda state: not state["running"] and not state["in_flight"])
    assert state["kv_free_blocks"] == state["kv_total_blocks"]

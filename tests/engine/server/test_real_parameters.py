"""Parameters of requests to a tiny real model: defaults of the model, and invalid values.

An invalid request gets its status while a stream is running, and the stream stays as it would be
alone.
"""

from __future__ import annotations

import asyncio
import io
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

from tests.builders.torch_models import make_folder
from tests.engine.conftest import EngineStarter
from tests.engine.server.test_real_text import TEMPLATE, VOCABULARY, make_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from tests.engine.conftest import RunEngine, RunningEngine, StartEngine

pytestmark = pytest.mark.torch

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
OPTIONS = ("--dtype", "float64", "--kv-blocks", "40", "--threads", "1")
PROMPT = [7, 8, 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer and a chat template."""
    folder = make_folder(tmp_path_factory.mktemp("tiny"), "Llama", vocab_size=VOCABULARY)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """An engine that serves the model."""
    engines = EngineStarter(tmp_path_factory.mktemp("engine"))
    yield engines.start(*OPTIONS, source=f"file://{folder}")
    engines.close()


def change_defaults(folder: Path, **changes: Any) -> None:
    """Change fields of `generation_config.json`."""
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


async def output_of(engine: RunningEngine, **fields: Any) -> tuple[list[int], str]:
    """Return the token ids and the finish reason of a completion."""
    body = {"model": "chat", "prompt": PROMPT, "return_token_ids": True, "seed": 1, **fields}
    async with (
        aiohttp.ClientSession(engine.url) as http,
        http.post(COMPLETIONS, json=body) as response,
    ):
        answer = await response.json()
    assert response.status == 200, answer
    (choice,) = answer["choices"]
    return choice["token_ids"], choice["finish_reason"]


async def test_requests_get_the_defaults_of_the_model_unless_they_state_their_own(
    folder: Path, engine: RunningEngine, start_engine: StartEngine, tmp_path: Path
) -> None:
    own = make_folder(tmp_path / "own", "Llama", vocab_size=VOCABULARY)
    defaults = {"temperature": 1.5, "top_k": 4, "top_p": 0.9, "repetition_penalty": 1.2}
    change_defaults(own, **defaults, min_p=None, max_new_tokens=6, eos_token_id=[5, 0])
    with_defaults = start_engine(*OPTIONS, source=f"file://{own}")
    expected = await output_of(engine, **defaults, max_tokens=6, stop_token_ids=[0])
    plain = await output_of(engine, max_tokens=6)
    assert await output_of(with_defaults) == expected
    assert len(expected[0]) <= 6
    assert expected != plain
    # A field of the request replaces the default, also with the value that OpenAI would assume.
    neutral = {"temperature": 1, "top_k": -1, "top_p": 1, "repetition_penalty": 1}
    assert await output_of(with_defaults, **neutral, ignore_eos=True, max_tokens=6) == (
        await output_of(engine, ignore_eos=True, max_tokens=6)
    )
    longer, _ = await output_of(with_defaults, max_tokens=20, ignore_eos=True)
    assert len(longer) == 20
    at_least, _ = await output_of(with_defaults, min_tokens=9)
    assert len(at_least) == 9
    assert "temperature=1.5" in with_defaults.stderr()


async def test_the_default_length_ends_at_the_context(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    own = make_folder(tmp_path / "own", "Llama")
    change_defaults(own, max_new_tokens=1_000_000)
    engine = start_engine(*OPTIONS, "--max-model-tokens", "32", source=f"file://{own}")
    assert await output_of(engine, ignore_eos=True) == await output_of(
        engine, ignore_eos=True, max_tokens=29
    )


async def test_the_defaults_of_the_model_can_be_ignored(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    own = make_folder(tmp_path / "own", "Llama")
    change_defaults(own, temperature=0, max_new_tokens=2)
    engine = start_engine(*OPTIONS, "--sampling-defaults", "openai", source=f"file://{own}")
    ids, _ = await output_of(engine, ignore_eos=True, max_tokens=None)
    assert len(ids) > 2
    others = {tuple((await output_of(engine, seed=seed, max_tokens=3))[0]) for seed in range(4)}
    assert len(others) > 1, "the temperature is 1"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        pytest.param('{"temperature": 3}', "temperature is 3: expected `float` <= 2.0", id="range"),
        pytest.param('{"top_k": "a"}', "top_k is a: expected `int", id="type"),
        pytest.param('{"top_p": NaN}', "top_p is nan: expected `float` >= 0.0", id="NaN"),
        pytest.param("[]", "must be a JSON object", id="no object"),
        pytest.param('{"temperature": ', "is not JSON", id="cut off"),
    ],
)
def test_damaged_defaults_are_refused_in_one_sentence(
    run_engine: RunEngine, tmp_path: Path, text: str, part: str
) -> None:
    folder = make_folder(tmp_path / "own", "Llama")
    (folder / "generation_config.json").write_text(text)
    ended = run_engine(source=f"file://{folder}")
    assert ended.returncode == 64
    assert "Traceback" not in ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert f"{folder}/generation_config.json: {part}" in line


def completion(**fields: Any) -> tuple[str, bytes]:
    return COMPLETIONS, json.dumps({"model": "chat", "prompt": PROMPT, **fields}).encode()


def chat(messages: Any, **fields: Any) -> tuple[str, bytes]:
    return CHATS, json.dumps({"model": "chat", "messages": messages, **fields}).encode()


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def raw(fields: str) -> tuple[str, bytes]:
    return COMPLETIONS, b'{"model": "chat", "prompt": [7], %b}' % fields.encode()


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
# The request, the status, the named parameter, and a part of the message.
INVALID: dict[str, tuple[tuple[str, bytes], int, str | None, str]] = {
    "a temperature of NaN": (raw('"temperature": NaN'), 400, "temperature", "finite"),
    "an infinite temperature": (raw('"temperature": Infinity'), 400, "temperature", "finite"),
    "a huge temperature": (raw('"temperature": 1e999'), 400, "temperature", "out of range"),
    "a negative temperature": (completion(temperature=-0.1), 400, "temperature", ">= 0.0"),
    "top_p of 1.5": (completion(top_p=1.5), 400, "top_p", "<= 1.0"),
    "1000 stop strings": (completion(stop=["x"] * 1000), 400, "stop", "<= 16"),
    "a stop string of 1 MB": (completion(stop="x" * 900_000), 400, "stop", "64 KiB"),
    "an empty stop string": (completion(stop=""), 400, "stop", "length >= 1"),
    "an empty stop string in a list": (completion(stop=["a", ""]), 400, "stop[1]", "length >= 1"),
    "a negative id": (completion(prompt=[-1]), 400, "prompt", ">= 0"),
    "the first id that is too large": (
        completion(prompt=[VOCABULARY]),
        400,
        "prompt",
        f"prompt[0] is the token id {VOCABULARY}; this model's token ids are below {VOCABULARY}",
    ),
    "an id of 2**63": (completion(prompt=[2**63]), 400, "prompt", "$[0]"),
    "a prompt without tokens": (completion(prompt=[]), 400, "prompt", "has no tokens"),
    "a prompt longer than the context": (
        completion(prompt=[1] * 200),
        400,
        "prompt",
        "context of 128",
    ),
    "a prompt of a million tokens": (completion(prompt=[1] * 1_000_000), 413, None, "larger than"),
    "a text of a million characters": (completion(prompt="fox " * 250_000), 400, "prompt", "128"),
    "invalid UTF-8": (
        (COMPLETIONS, b'{"model": "chat", "prompt": "\xff\xfe"}'),
        400,
        "prompt",
        "prompt: byte 29 of the body is not UTF-8; encode",
    ),
    "nested JSON": (raw('"logit_bias": ' + "[" * 50_000 + "]" * 50_000), 400, None, "recursion"),
    "an unknown model": (completion(model="gpt-4o"), 404, "model", "'gpt-4o' is not served here"),
    "logprobs of 6": (completion(logprobs=6), 400, "logprobs", "<= 5"),
    "negative logprobs": (completion(logprobs=-1), 400, "logprobs", ">= 0"),
    "top_logprobs of 21": (
        chat(user("x"), logprobs=True, top_logprobs=21),
        400,
        "top_logprobs",
        "<= 20",
    ),
    "top_logprobs without logprobs": (chat(user("x"), top_logprobs=3), 400, "top_logprobs", ""),
    "no output tokens": (completion(max_tokens=0), 400, "max_tokens", ">= 1"),
    "negative output tokens": (completion(max_tokens=-1), 400, "max_tokens", ">= 1"),
    "a billion output tokens": (completion(max_tokens=1_000_000_000), 400, "max_tokens", ""),
    "more output tokens than the context": (
        completion(max_tokens=126),
        400,
        "max_tokens",
        "context of 128 leaves 125",
    ),
    "a minimum of more output tokens than the context": (
        completion(min_tokens=126),
        400,
        "min_tokens",
        "min_tokens is 126, but after a prompt of 3 tokens this model's context of 128 leaves 125",
    ),
    "a repetition penalty that makes logits infinite": (
        completion(repetition_penalty=1e-300),
        400,
        "repetition_penalty",
        ">= 0.01",
    ),
    "several outputs": (completion(n=2), 400, "n", "leave it out or send 1"),
    "a schema": (
        chat(user("x"), response_format={"type": "json_schema", "json_schema": {}}),
        400,
        "response_format.json_schema.name",
        "is required",
    ),
    "tools": (
        chat(user("x"), tools=[{"type": "function", "function": {"name": "add"}}]),
        400,
        "tools",
        "not supported by the chat template",
    ),
    "beam search": (completion(use_beam_search=True), 400, "use_beam_search", "or send false"),
    "log-probabilities of the prompt": (
        completion(prompt_logprobs=0),
        400,
        "prompt_logprobs",
        "leave it out",
    ),
    "special tokens in the text": (
        completion(skip_special_tokens=False),
        400,
        "skip_special_tokens",
        "or send true",
    ),
    "another chat template": (chat(user("x"), chat_template="x"), 400, "chat_template", "leave"),
    "a field of another server": (completion(mirostat=1), 400, "mirostat", "not a field"),
    "no messages": (chat([]), 400, "messages", "length >= 1"),
    "messages that are a text": (chat("x"), 400, "messages", "array"),
    "a message without a role": (chat([{"content": "x"}]), 400, "messages[0].role", "required"),
    "an unknown role": (
        chat([{"role": "robot", "content": "x"}]),
        400,
        "messages[0].role",
        "robot",
    ),
    "an image": (chat(user([IMAGE])), 400, "messages[0].content[0].type", "image_url"),
    "a content that is a number": (chat(user(5)), 400, "messages[0].content", ""),
    "10,000 messages": (chat(user("fox") * 10_000), 400, "messages", "context of 128"),
    "10,001 messages": (chat(user("") * 10_001), 400, "messages", "length <= 10000"),
}


async def ids_of(response: aiohttp.ClientResponse) -> AsyncIterator[list[int]]:
    async for line in response.content:
        if line.startswith(b"data: {"):
            (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
            yield choice["token_ids"]


LONG = {
    "model": "chat",
    "prompt": PROMPT,
    "stream": True,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
    "max_tokens": 40,
}


@pytest.fixture(scope="module")
def undisturbed(engine: RunningEngine) -> list[int]:
    """The token ids of a stream that runs alone."""

    async def read() -> list[int]:
        async with (
            aiohttp.ClientSession(engine.url) as http,
            http.post(COMPLETIONS, json=LONG) as response,
        ):
            return [one async for ids in ids_of(response) for one in ids]

    ids = asyncio.run(read())
    assert len(ids) == 40
    return ids


@pytest.mark.parametrize("case", INVALID)
async def test_an_invalid_request_gets_its_status_and_disturbs_no_stream(
    engine: RunningEngine, undisturbed: list[int], case: str
) -> None:
    (url, body), status, param, part = INVALID[case]
    async with (
        aiohttp.ClientSession(engine.url) as http,
        http.post(COMPLETIONS, json=LONG) as stream,
    ):
        events = ids_of(stream)
        ids = await anext(events)
        async with http.post(url, data=io.BytesIO(body)) as response:
            answer = await response.json()
        async for more in events:
            ids += more
    assert response.status == status, answer
    error = answer["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert part in error["message"]
    assert len(error["message"]) < 500
    assert ids == undisturbed


NEUTRAL: dict[str, Any] = {
    "n": 1,
    "logit_bias": {},
    "logprobs": None,
    "stop": [],
    "stop_token_ids": [],
    "response_format": {"type": "text"},
    "allowed_token_ids": [],
    "bad_words": [],
    "echo": False,
    "include_stop_str_in_output": False,
    "length_penalty": 1.0,
    "priority": 0,
    "prompt_logprobs": None,
    "return_tokens_as_token_ids": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "structured_outputs": None,
    "truncate_prompt_tokens": None,
    "use_beam_search": False,
    "user": "me",
    "stream_options": None,
}


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        pytest.param(
            completion(),
            {"best_of": 1, "suffix": "", "add_special_tokens": True},
            id="completion",
        ),
        pytest.param(
            chat(user("fox")),
            {
                "add_generation_prompt": True,
                "add_special_tokens": False,
                "chat_template_kwargs": {},
                "continue_final_message": False,
                "documents": [],
                "metadata": {"a": "b"},
                "modalities": ["text"],
                "tool_choice": "none",
                "tools": [],
                "top_logprobs": 0,
            },
            id="chat",
        ),
    ],
)
async def test_neutral_values_change_nothing(
    engine: RunningEngine, request_: tuple[str, bytes], fields: dict[str, Any]
) -> None:
    url, body = request_
    plain = {**json.loads(body), "seed": 3, "max_tokens": 8, "return_token_ids": True}
    found = []
    async with aiohttp.ClientSession(engine.url) as http:
        for more in ({}, {**NEUTRAL, **fields}):
            async with http.post(url, json={**plain, **more}) as response:
                answer = await response.json()
            assert response.status == 200, answer
            found.append(answer["choices"][0]["token_ids"])
    assert found[0] == found[1]


async def test_a_top_p_of_zero_takes_the_most_probable_token(engine: RunningEngine) -> None:
    assert await output_of(engine, top_p=0, max_tokens=9) == (
        await output_of(engine, temperature=0, max_tokens=9)
    )


@pytest.mark.parametrize(
    "content_type",
    [
        pytest.param("application/json; charset=utf-8", id="JSON"),
        pytest.param("text/plain", id="a text"),
        pytest.param("application/x-www-form-urlencoded", id="curl without a header"),
    ],
)
async def test_a_json_body_is_read_whatever_its_content_type_is(
    engine: RunningEngine, content_type: str
) -> None:
    url, body = completion(max_tokens=1)
    headers = {"Content-Type": content_type}
    async with (
        aiohttp.ClientSession(engine.url) as http,
        http.post(url, data=body, headers=headers) as response,
    ):
        assert response.status == 200


async def test_a_form_is_rejected_as_no_json(engine: RunningEngine) -> None:
    form = aiohttp.FormData({"model": "chat", "prompt": "x"})
    multipart = aiohttp.FormData({"model": "chat"})
    multipart.add_field("prompt", b"x", filename="prompt")
    for data in (form, multipart):
        async with (
            aiohttp.ClientSession(engine.url) as http,
            http.post(COMPLETIONS, data=data) as response,
        ):
            assert response.status == 400
            assert "the body is not JSON" in (await response.json())["error"]["message"]

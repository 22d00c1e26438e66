"""Text of a tiny random model over HTTP: prompts, chats, streams, stop strings and usage."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
import pytest

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

from openai import AsyncOpenAI
from tests.builders.torch_models import Outputs, make_folder
from tests.engine.conftest import EngineStarter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from yarl import URL

from goodput_engine.messages import ExecutorInput, Submit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.engine.conftest import RunEngine, RunningEngine, StartEngine

pytestmark = pytest.mark.torch

VOCABULARY = 300
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system messages') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
)


def make_tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer with fewer tokens than the model."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 4,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox", "user and assistant"] * 9, trainer)
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer and a chat template."""
    folder = make_folder(tmp_path_factory.mktemp("tiny"), "Llama", vocab_size=VOCABULARY)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def outputs(folder: Path) -> Outputs:
    """The model's own outputs."""
    return Outputs(folder, "float64")


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """An engine that serves the model with three HTTP processes."""
    engines = EngineStarter(tmp_path_factory.mktemp("engine"))
    options = ("--dtype", "float64", "--kv-blocks", "40", "--threads", "1")
    yield engines.start(*options, source=f"file://{folder}", preemption="hybrid", httpProcesses=3)
    engines.close()


def expected_output(outputs: Outputs, prompt: list[int]) -> tuple[list[int], str]:
    """Return the ids and the text of the output for a prompt."""
    submit = Submit(
        rid=0,
        arrival_ns=0,
        input_tokens=len(prompt),
        max_output_tokens=Outputs.max_tokens,
        executor=ExecutorInput(token_ids=prompt),
    )
    ids, _ = outputs.of(submit)
    return ids, make_tokenizer().decode(ids)


def body_of(text: str, *, chat: bool, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    greedy = {"model": "chat", "max_tokens": Outputs.max_tokens, "temperature": 0}
    return {**greedy, **prompt, **fields}


def prompt_ids(text: str, *, chat: bool) -> list[int]:
    whole = f"<|im_start|>user\n{text}<|im_end|><|im_start|>" if chat else text
    return make_tokenizer().encode(whole).ids


TEXTS = ("the quick brown fox", "x", "Grüße 🦊 aus 東京", "user and the fox and the user")


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
async def test_streamed_and_whole_texts_are_those_of_generate(
    engine: RunningEngine, outputs: Outputs, chat: bool
) -> None:
    url = "/v1/chat/completions" if chat else "/v1/completions"

    async def stream(http: aiohttp.ClientSession, text: str) -> tuple[str, dict[str, Any]]:
        pieces: list[str] = []  # one for each token, also if it ends inside a character
        usage: dict[str, Any] = {}
        body = body_of(text, chat=chat, stream=True, stream_options={"include_usage": True})
        async with http.post(url, json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                for choice in event["choices"]:
                    assert "token_ids" not in choice
                    pieces.append(choice["delta"]["content"] if chat else choice["text"])
                usage = event["usage"] or usage
        assert len(pieces) == usage["completion_tokens"]
        return "".join(pieces), usage

    async def whole(http: aiohttp.ClientSession, text: str) -> tuple[str, dict[str, Any]]:
        async with http.post(url, json=body_of(text, chat=chat, return_token_ids=True)) as response:
            answer = await response.json()
        (choice,) = answer["choices"]
        assert choice["token_ids"] == expected_output(outputs, prompt_ids(text, chat=chat))[0]
        return choice["message"]["content"] if chat else choice["text"], answer["usage"]

    async with aiohttp.ClientSession(engine.url) as http:
        calls = [call(http, text) for text in TEXTS for call in (stream, whole)]
        answers = await asyncio.gather(*calls)
    for at, (text, usage) in enumerate(answers):
        prompt = prompt_ids(TEXTS[at // 2], chat=chat)
        ids, expected = expected_output(outputs, prompt)
        assert text == expected
        assert usage["completion_tokens"] == len(ids)
        assert usage["prompt_tokens"] == len(prompt)


async def test_the_three_http_processes_share_the_requests(
    engine: RunningEngine, outputs: Outputs
) -> None:
    before = await engine.state()

    async def check(http: aiohttp.ClientSession, number: int) -> None:
        text, chat = TEXTS[number % len(TEXTS)], number % 8 < 4
        url = "/v1/chat/completions" if chat else "/v1/completions"
        async with http.post(url, json=body_of(text, chat=chat)) as response:
            (choice,) = (await response.json())["choices"]
        _, expected = expected_output(outputs, prompt_ids(text, chat=chat))
        assert (choice["message"]["content"] if chat else choice["text"]) == expected

    # Each of these requests has its own connection, and the kernel chooses its process.
    async with aiohttp.ClientSession(engine.url, connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(check(http, number) for number in range(32)))
        leader = psutil.Process(engine.process.pid)
        connections = Counter(
            process.pid
            for process in (leader, *leader.children())
            for one in process.net_connections("tcp4")
            if one.status == "ESTABLISHED" and one.laddr.port == URL(engine.url).port
        )
    assert len(connections) == 3, connections
    assert sum(connections.values()) == 32
    after = await engine.state()
    assert finished(after) - finished(before) == 32
    assert (after["in_flight"], after["running"]) == (0, 0)


def finished(state: dict[str, Any]) -> int:
    return sum(row[0] for row in state["answered"])


async def test_a_stop_string_ends_the_text_before_it(
    engine: RunningEngine, outputs: Outputs
) -> None:
    ids, text = expected_output(outputs, prompt_ids(TEXTS[0], chat=False))
    stop = text[len(text) // 2 :][:2]
    assert stop
    async with (
        aiohttp.ClientSession(engine.url) as http,
        http.post("/v1/completions", json=body_of(TEXTS[0], chat=False, stop=[stop])) as response,
    ):
        answer = await response.json()
    (choice,) = answer["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] <= len(ids)
    await engine.state_when(lambda state: not state["running"])


def offsets(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["logprobs"]["text_offset"]
    return found


async def test_log_probabilities_follow_the_text_of_a_completion(
    engine: RunningEngine, outputs: Outputs
) -> None:
    ids, text = expected_output(outputs, prompt_ids(TEXTS[0], chat=False))
    stop = text[len(text) // 2 :][:2]
    body = body_of(TEXTS[0], chat=False, logprobs=2)
    async with aiohttp.ClientSession(engine.url) as http:
        async with http.post("/v1/completions", json=body) as response:
            whole = await response.json()
        async with http.post("/v1/completions", json={**body, "stop": stop}) as response:
            stopped = await response.json()
        streamed: list[dict[str, Any]] = []
        async with http.post("/v1/completions", json={**body, "stream": True}) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    streamed += json.loads(line.removeprefix(b"data: "))["choices"]
    logprobs = whole["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(ids)
    assert offsets(whole) == sorted(offsets(whole))
    most_probable = [max(top, key=top.__getitem__) for top in logprobs["top_logprobs"]]
    assert most_probable == logprobs["tokens"]  # temperature 0
    kept = stopped["choices"][0]["text"]
    assert offsets(stopped) == [at for at in offsets(whole) if at < len(kept)]
    parts = [choice["logprobs"] for choice in streamed if choice["logprobs"]]
    for name, values in logprobs.items():
        assert [one for part in parts for one in part[name]] == values
    sent = 0
    for choice in streamed:
        sent += len(choice["text"])
        assert choice["finish_reason"] or all(
            at < sent for at in (choice["logprobs"] or {"text_offset": []})["text_offset"]
        )


async def test_an_openai_client_reads_the_log_probabilities_of_a_chat(
    engine: RunningEngine,
) -> None:
    async with AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as client:
        fields: dict[str, Any] = {
            "model": "chat",
            "messages": [{"role": "user", "content": TEXTS[1]}],
            "max_tokens": 8,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 4,
        }
        whole = await client.chat.completions.create(**fields)
        parts = [part async for part in await client.chat.completions.create(**fields, stream=True)]
    assert whole.usage is not None
    (choice,) = whole.choices
    assert choice.logprobs is not None
    entries = choice.logprobs.content
    assert entries is not None
    assert len(entries) == whole.usage.completion_tokens
    assert b"".join(bytes(one.bytes or b"") for one in entries).decode(errors="replace") == (
        choice.message.content
    )
    assert all(len(entry.top_logprobs) == 4 for entry in entries)
    assert [entry.top_logprobs[0].logprob for entry in entries] == [e.logprob for e in entries]
    streamed = [
        one
        for part in parts
        if part.choices[0].logprobs is not None
        for one in part.choices[0].logprobs.content or []
    ]
    assert [one.token for one in streamed] == [one.token for one in entries]


@pytest.mark.parametrize(
    ("body", "param", "part"),
    [
        pytest.param({"prompt": ""}, "prompt", "prompt has no tokens", id="an empty text"),
        pytest.param({"prompt": "x" * 500}, "prompt", "context of 128 must", id="a long text"),
        pytest.param(
            {"prompt": ["a", "b"]}, "prompt", "prompt has several prompts", id="two texts"
        ),
        pytest.param(
            {"prompt": [[1], [2]]}, "prompt", "prompt has several prompts", id="two lists"
        ),
        pytest.param({"prompt": ["a", 1]}, "prompt", "prompt has several prompts", id="a mixture"),
        pytest.param({"prompt": "a\ud800"}, None, "the body is not JSON", id="a surrogate"),
        pytest.param(
            {"messages": [{"role": "system", "content": "x"}]},
            "messages",
            "rejects the messages: no system messages",
            id="a role that the template rejects",
        ),
    ],
)
async def test_a_bad_text_is_refused(
    engine: RunningEngine, body: dict[str, Any], param: str | None, part: str
) -> None:
    url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with (
        aiohttp.ClientSession(engine.url) as http,
        http.post(url, json={"model": "chat", **body}) as response,
    ):
        answer = await response.json()
    assert response.status == 400, answer
    assert answer["error"]["param"] == param
    assert part in answer["error"]["message"]


def test_a_damaged_tokenizer_is_refused_in_one_sentence(
    run_engine: RunEngine, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path / "model", "Llama")
    (folder / "tokenizer.json").write_text('{"model": ')
    ended = run_engine(source=f"file://{folder}")
    assert ended.returncode == 64
    assert "Traceback" not in ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert "not a tokenizer.json of Hugging Face's tokenizers" in line


SHAPE = {
    "type": "object",
    # The tokens f and r end an output of this model.
    "properties": {"x": {"enum": ["quick", None]}, "n": {"type": "integer", "minimum": 1}},
    "required": ["x", "n"],
    "additionalProperties": False,
}


def schema_format(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_output_has_the_requested_format(engine: RunningEngine, stream: bool) -> None:
    body = body_of("the fox", chat=True, max_tokens=80, temperature=1, seed=4, stream=stream)
    body["response_format"] = schema_format(SHAPE)
    # Without it, this model writes much white space.
    space = [id_ for token, id_ in make_tokenizer().get_vocab().items() if not token.strip("ĠĊĉ")]
    body["logit_bias"] = dict.fromkeys(map(str, space), -100)
    async with aiohttp.ClientSession(engine.url) as http:
        async with http.post("/v1/chat/completions", json=body) as response:
            answer = await response.text()
            assert response.status == 200, answer
        if stream:
            lines = answer.split("\n\n")
            events = [json.loads(one[6:]) for one in lines if one.startswith("data: {")]
            text = "".join(one["choices"][0]["delta"].get("content", "") for one in events)
        else:
            text = json.loads(answer)["choices"][0]["message"]["content"]
        value = json.loads(text)
        assert value["x"] in {"quick", None}
        assert value["n"] >= 1

        body = body_of("x", chat=False, max_tokens=30, response_format={"type": "json_object"})
        async with http.post("/v1/completions", json=body) as response:
            assert (await response.json())["choices"][0]["text"].lstrip()[0] == "{"


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (
            {"type": "xml"},
            "response_format.type is 'xml', which is not supported; send text, json_object or",
        ),
        ({"type": "json_schema"}, "response_format.json_schema is required"),
        (schema_format({"type": "foo"}), "the JSON schema cannot be used: Invalid type: foo"),
        (schema_format({"not": {}}), "the JSON schema cannot be used: Unimplemented keys"),
        (schema_format([1]), "response_format: the JSON schema cannot be used"),
        (schema_format({"enum": ["x" * 70_000]}), "response_format is longer than 64 KiB"),
        (
            schema_format({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
            "response_format: the output cannot continue: no text matches the schema",
        ),
    ],
    ids=["form", "no schema", "type", "keyword", "list", "large", "endless"],
)
async def test_a_format_that_cannot_be_produced_is_rejected(
    engine: RunningEngine, form: dict[str, Any], message: str
) -> None:
    body = body_of("x", chat=True, response_format=form)
    async with (
        aiohttp.ClientSession(engine.url) as http,
        http.post("/v1/chat/completions", json=body) as response,
    ):
        error = (await response.json())["error"]
    assert response.status == 400
    assert message in error["message"]
    assert error["param"].startswith("response_format")


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        (b'{"type":"array","items":' * 300 + b"{}" + b"}" * 300, "response_format"),
        (b'{"enum":["\xff"]}', "response_format.json_schema.schema.enum[0]"),
    ],
    ids=["deep", "not UTF-8"],
)
async def test_a_schema_that_cannot_be_read_is_rejected(
    engine: RunningEngine, schema: bytes, param: str
) -> None:
    body = json.dumps(body_of("x", chat=True, response_format=schema_format("SCHEMA"))).encode()
    async with (
        aiohttp.ClientSession(engine.url) as http,
        http.post("/v1/chat/completions", data=body.replace(b'"SCHEMA"', schema)) as response,
    ):
        error = (await response.json())["error"]
    assert response.status == 400
    assert error["param"] == param


@pytest.mark.parametrize(
    "decoder", [decoders.Metaspace(), decoders.WordPiece()], ids=["Metaspace", "WordPiece"]
)
async def test_a_format_is_rejected_if_no_grammar_knows_the_tokenizer(
    start_engine: StartEngine, tmp_path: Path, decoder: decoders.Decoder
) -> None:
    folder = make_folder(tmp_path / "model", "Llama", vocab_size=VOCABULARY)
    tokenizer = make_tokenizer()
    tokenizer.decoder = decoder
    tokenizer.save(str(folder / "tokenizer.json"))
    engine = start_engine("--kv-blocks", "40", "--threads", "1", source=f"file://{folder}")
    async with aiohttp.ClientSession(engine.url) as http:
        for _ in range(2):
            body = body_of("the fox", chat=False, response_format={"type": "json_object"})
            async with http.post("/v1/completions", json=body) as response:
                error = (await response.json())["error"]
            assert response.status == 400, error
            assert error["param"] == "response_format"
            assert "response_format is not supported for the tokenizer" in error["message"]
        body = body_of("the fox", chat=False, response_format={"type": "text"})
        async with http.post("/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
    assert "core restarted" not in engine.stderr()

"""A chat template that loops for ever costs its chats, and no other request of the server."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
import pytest

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

from tests.builders.torch_models import make_folder
from tests.engine.conftest import EngineStarter
from tests.engine.server.test_real_text import VOCABULARY, make_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.engine.conftest import RunEngine, RunningEngine

pytestmark = pytest.mark.torch

LOOP = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{{ messages[0].content }}"
)
TEMPLATE = (
    "{% set text = messages[0].content %}{% if text == 'loop' %}"
    + LOOP
    + "{% elif text == 'grow' %}{{ text * 1000000000 }}"
    "{% elif text == 'long' %}{{ text * 15000000 }}{% endif %}{{ text }}"
)


def save_model(folder: Path, template: object) -> Path:
    folder = make_folder(folder, "Llama", vocab_size=VOCABULARY)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """An engine whose template loops or grows for some messages."""
    folder = save_model(tmp_path_factory.mktemp("hostile"), TEMPLATE)
    engines = EngineStarter(tmp_path_factory.mktemp("engine"))
    yield engines.start("--kv-blocks", "40", "--threads", "1", source=f"file://{folder}")
    engines.close()


async def post(
    http: aiohttp.ClientSession, path: str, body: dict[str, Any], *, padding: int = 0
) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of a response; `padding` makes the request longer."""
    data = json.dumps({"model": "chat", "max_tokens": 4, **body}) + " " * padding
    async with http.post(path, data=data) as response:
        return response.status, await response.json()


async def complete(http: aiohttp.ClientSession, *, padding: int = 0) -> int:
    prompt = {"prompt": "the quick brown fox"}
    return (await post(http, "/v1/completions", prompt, padding=padding))[0]


async def chat(
    http: aiohttp.ClientSession, text: str, *, padding: int = 0
) -> tuple[int, dict[str, Any]]:
    messages = {"messages": [{"role": "user", "content": text}]}
    return await post(http, "/v1/chat/completions", messages, padding=padding)


async def test_completions_are_served_while_a_chat_loops(engine: RunningEngine) -> None:
    async with aiohttp.ClientSession(engine.url) as http:
        assert await complete(http) == 200
        loops = asyncio.create_task(chat(http, "loop"))
        for _ in range(3):
            assert await complete(http) == 200
        assert not loops.done(), "completions waited for the chat template"
        status, answer = await loops
        assert status == 400
        assert answer["error"]["param"] == "messages"
        assert answer["error"]["message"] == (
            "the chat template of the model fails for these messages: it takes more than 2 s of "
            "processor time"
        )
        assert (await chat(http, "hello"))[0] == 200


async def test_a_chat_that_waits_too_long_for_the_template_is_rejected(
    engine: RunningEngine,
) -> None:
    began = time.monotonic()
    async with aiohttp.ClientSession(engine.url) as http:
        answers = await asyncio.gather(*[chat(http, "loop") for _ in range(12)])
        assert time.monotonic() - began < 60
        statuses = [status for status, _ in answers]
        assert set(statuses) == {400, 429}
        late = next(answer for status, answer in answers if status == 429)
        assert late["error"]["message"] == "the chat template is behind with chats; retry later"
        assert (await chat(http, "hello"))[0] == 200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("grow", "it needs more than 1024 MiB of memory", id="memory"),
        pytest.param("long", "context of 128", id="a prompt of 60 MB"),
    ],
)
async def test_a_template_that_grows_is_an_error_of_its_chat(
    engine: RunningEngine, text: str, message: str
) -> None:
    async with aiohttp.ClientSession(engine.url) as http:
        status, answer = await chat(http, text)
        assert status == 400
        assert message in answer["error"]["message"]
        assert (await chat(http, "hello"))[0] == 200
    process = psutil.Process(engine.process.pid)
    assert process.memory_info().rss < 600 << 20


async def test_long_chats_do_not_delay_long_completions(
    engine: RunningEngine,
) -> None:
    async with aiohttp.ClientSession(engine.url) as http:
        loops = asyncio.create_task(chat(http, "loop", padding=60_000))
        assert (await complete(http, padding=60_000)) == 200
        assert not loops.done(), "a long completion waited for the chat template"
        assert (await loops)[0] == 400


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        pytest.param("{{ 9 ** (9 ** 9) }}", "processor time", id="endless"),
        pytest.param("{{ messages | nothing }}", "No filter named 'nothing'", id="no such filter"),
        pytest.param("{% if a %}" * 200 + "{% endif %}" * 200, "indentation", id="nested"),
        pytest.param("x" * ((1 << 20) + 1), "at most 1048576 characters", id="long"),
        pytest.param(7, "must be a text", id="no text"),
    ],
)
def test_an_engine_refuses_an_invalid_template_in_one_sentence(
    run_engine: RunEngine, tmp_path: Path, template: object, problem: str
) -> None:
    folder = save_model(tmp_path / "model", template)
    result = run_engine("--threads", "1", source=f"file://{folder}")
    assert result.returncode == 64
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if "INFO" not in line]
    assert problem in line
    assert "Traceback" not in result.stderr

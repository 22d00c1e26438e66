"""Text prompts have the token counts of their rows on a server with a real tokenizer."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from tests.builders.tokenizers import KINDS
from tests.builders.traces import trace_row
from tests.replay.sending.stand_ins import (
    DONE,
    Answer,
    StandIn,
    event,
    finish,
    running,
    text,
    tokens,
)
from tokenizers import Tokenizer

from goodput_core.slo.record import Outcome
from goodput_replay.options import parse_options
from goodput_replay.runs.prompt_kind import PromptKind
from goodput_replay.runs.record_rows import read_records
from goodput_replay.runs.summary import read_summary

if TYPE_CHECKING:
    from pathlib import Path

    from tests.replay.sending.builders import WriteTrace

ROWS = [
    trace_row(
        number,
        number / 40,
        input_tokens=40 + 7 * number,
        total_hashes=(1, 2, number),
        block_size=16,
    )
    for number in range(20)
]
FINISHED = {0, 3}
"""Exit codes of a run. On a busy machine, the requests may be late and the run invalid."""
TEMPLATE = "user: {}\nassistant:"


@dataclass(frozen=True, kw_only=True)
class Tokenizing(StandIn):
    """Counts the tokens of each prompt with its own tokenizer, as a model server does.

    Args:
        tokenizer: tokenizer of the model.
        ids_status: status of the response to a prompt of token ids.
        reports_usage: False for responses without a usage.
        prompts: token ids by request id.
    """

    answer: Answer = tokens
    tokenizer: Tokenizer
    ids_status: int = 200
    reports_usage: bool = True
    prompts: dict[str, list[int]] = field(default_factory=dict)

    async def respond(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        prompt = body.get("prompt")
        if prompt is None:
            (message,) = body["messages"]
            prompt = TEMPLATE.format(message["content"])
        if isinstance(prompt, list):
            if self.ids_status != 200:
                error = {"error": {"message": "prompt: a string is required"}}
                return web.json_response(error, status=self.ids_status)
            ids = prompt
        else:
            ids = self.tokenizer.encode(prompt).ids
        self.prompts[request.headers.get("X-Request-Id", "")] = ids
        usage = {"prompt_tokens": len(ids), "completion_tokens": body["max_tokens"]}
        usages = {"usage": usage} if self.reports_usage else {}
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": " a"}], **usages})
        pieces = [text() for _ in range(body["max_tokens"])]
        last = [event({"choices": [], **usages})] if usages else []
        answer = [*pieces, finish(), *last, DONE]
        return await StandIn(answer=lambda _: answer).respond(request)


async def replayed(server: Tokenizing, trace: Path, folder: Path, *more: object) -> tuple[int, str]:
    """Replay a trace against a server; returns the exit code and the output."""
    async with running(server) as url:
        command = ["-m", "goodput_core", "replay", "--trace", trace, "--target", url]
        command += ["--out", folder, "--no-report", *more]
        child = await asyncio.create_subprocess_exec(
            sys.executable, *map(str, command), stdout=PIPE, stderr=PIPE
        )
        out, err = await child.communicate()
    assert child.returncode is not None
    return child.returncode, " ".join((out + err).decode().split())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A tokenizer that adds a start token."""
    return KINDS["byte-level BPE with a prefix space and a start token"][0]()


@pytest.fixture
def path(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def trace(trace_of: WriteTrace) -> Path:
    return trace_of(ROWS)


@pytest.mark.parametrize(
    ("endpoint", "overhead"), [("completions", 1), ("chat", None)], ids=["completions", "chat"]
)
async def test_the_server_counts_the_tokens_of_each_row(
    tokenizer: Tokenizer,
    path: Path,
    trace: Path,
    tmp_path: Path,
    endpoint: str,
    overhead: int | None,
) -> None:
    server = Tokenizing(tokenizer=tokenizer)
    options = ("--endpoint", endpoint, "--tokenizer", path, "--salt", "s")
    code, output = await replayed(server, trace, tmp_path / "run", *options)
    assert code in FINISHED, output
    assert {r.request_id: len(server.prompts[r.request_id]) for r in ROWS} == {
        r.request_id: r.input_tokens for r in ROWS
    }
    records = list(read_records(tmp_path / "run"))
    assert {r.outcome for r in records} == {Outcome.OK}
    assert {r.request_id: r.input_tokens for r in records} == {
        r.request_id: r.input_tokens for r in ROWS
    }
    assert {r.reported_input_tokens for r in records} == {r.input_tokens for r in records}
    summary = read_summary(tmp_path / "run")
    counted = summary.prompt_tokens
    assert counted is not None
    assert (counted.responses, counted.max_difference, counted.sentence) == (len(ROWS), 0, "")
    target = summary.target
    assert target.prompt is PromptKind.TOKENIZER_WORDS
    if overhead is None:
        overhead = len(tokenizer.encode(TEMPLATE.format("the")).ids) - 1
    assert target.prompt_overhead_tokens == overhead
    # Blocks of 16 tokens are shared after what the server adds in front of them.
    one, other = server.prompts["row-3"], server.prompts["row-4"]
    head = next(k for k in range(len(one)) if one[k] != other[k])
    assert 2 * 16 <= head < 2 * 16 + overhead + 1


@pytest.mark.parametrize("status", [400, 422, 500])
async def test_a_server_without_token_ids_is_named_before_the_run(
    tokenizer: Tokenizer, trace: Path, tmp_path: Path, status: int
) -> None:
    server = Tokenizing(tokenizer=tokenizer, ids_status=status)
    code, output = await replayed(server, trace, tmp_path / "run")
    assert code == 64
    assert (
        f"the target does not accept token ids as a prompt (HTTP {status}: prompt: a string is "
        "required); give the tokenizer of its model with --tokenizer"
    ) in output
    assert not (tmp_path / "run").exists()
    code, _ = await replayed(server, trace, tmp_path / "run", "--prompt", "text")
    assert code in FINISHED
    assert read_summary(tmp_path / "run").target.prompt is PromptKind.INVENTED_WORDS


async def test_prompts_of_another_length_than_their_rows_are_reported(
    tokenizer: Tokenizer, trace: Path, tmp_path: Path
) -> None:
    server = Tokenizing(tokenizer=tokenizer)
    code, output = await replayed(server, trace, tmp_path / "run", "--endpoint", "chat")
    assert code in FINISHED, output
    planned = sum(row.input_tokens for row in ROWS)
    lengths = {row.request_id: len(server.prompts[row.request_id]) for row in ROWS}
    counted = read_summary(tmp_path / "run").prompt_tokens
    assert counted is not None
    assert (counted.responses, counted.planned) == (len(ROWS), planned)
    assert counted.reported == sum(lengths.values()) > planned
    differences = [abs(lengths[row.request_id] - row.input_tokens) for row in ROWS]
    assert counted.max_difference == max(differences)
    assert counted.mean_difference == (counted.reported - planned) / len(ROWS)
    times = f"{counted.reported / planned:.2f}"
    assert f"prompts: the target counted {times} times the input tokens" in output
    assert "give the tokenizer of its model with --tokenizer" in output


async def test_a_target_without_usage_reports_no_prompt_tokens(
    tokenizer: Tokenizer, trace: Path, tmp_path: Path
) -> None:
    server = Tokenizing(tokenizer=tokenizer, reports_usage=False)
    _, output = await replayed(server, trace, tmp_path / "run", "--prompt", "text")
    assert read_summary(tmp_path / "run").prompt_tokens is None
    assert "prompts:" not in output


async def test_the_tokenizer_of_another_model_is_rejected(
    tokenizer: Tokenizer, trace: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.json"
    KINDS["WordPiece"][0]().save(str(other))
    server = Tokenizing(tokenizer=KINDS["Unigram"][0]())
    code, output = await replayed(server, trace, tmp_path / "run", "--tokenizer", other)
    assert code == 64
    assert "tokens for 8 words of one token each" in output
    assert "so it uses another tokenizer; give the one of its model 'm'" in output
    assert not (tmp_path / "run").exists()


async def test_without_a_count_the_tokenizer_s_own_tokens_are_subtracted(
    tokenizer: Tokenizer, path: Path, trace: Path, tmp_path: Path
) -> None:
    server = Tokenizing(tokenizer=tokenizer, reports_usage=False)
    code, output = await replayed(server, trace, tmp_path / "run", "--tokenizer", path)
    assert code in FINISHED, output
    assert "no number of prompt tokens could be read from a response" in output
    assert [len(server.prompts[r.request_id]) for r in ROWS] == [r.input_tokens for r in ROWS]


async def test_without_probes_nothing_but_the_trace_is_sent(
    tokenizer: Tokenizer, path: Path, trace: Path, tmp_path: Path
) -> None:
    server = Tokenizing(tokenizer=tokenizer)
    code, output = await replayed(
        server, trace, tmp_path / "run", "--tokenizer", path, "--no-probe"
    )
    assert code in FINISHED, output
    assert set(server.prompts) == {row.request_id for row in ROWS}
    assert [len(server.prompts[r.request_id]) for r in ROWS] == [r.input_tokens for r in ROWS]


@pytest.mark.parametrize(
    ("options", "form"),
    [
        ((), PromptKind.TOKEN_IDS),
        (("--prompt", "text"), PromptKind.INVENTED_WORDS),
        (("--endpoint", "chat"), PromptKind.INVENTED_WORDS),
        (("--tokenizer", "x"), PromptKind.TOKENIZER_WORDS),
        (("--tokenizer", "x", "--endpoint", "chat"), PromptKind.TOKENIZER_WORDS),
        (("--prompt", "tokens"), PromptKind.TOKEN_IDS),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_the_form_of_prompts_follows_from_the_options(
    options: tuple[str, ...], form: PromptKind
) -> None:
    parsed = parse_options(["--trace", "t", "--target", "http://127.0.0.1", *options])
    assert parsed.prompt is form


async def test_the_tokenizer_is_read_before_anything_is_sent(
    tokenizer: Tokenizer, trace: Path, tmp_path: Path
) -> None:
    server = Tokenizing(tokenizer=tokenizer)
    code, output = await replayed(server, trace, tmp_path / "run", "--tokenizer", trace)
    assert code == 64
    assert "not a tokenizer.json of Hugging Face's tokenizers" in output
    assert not server.prompts

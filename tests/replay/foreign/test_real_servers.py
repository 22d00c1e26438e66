"""Replays against llama_cpp.server and `transformers serve`, with a real model of 135M parameters.

`make test-foreign` installs both servers and runs these tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from functools import cache
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.traces import trace_row, write_rows
from tokenizers import Tokenizer
from tools.foreign.servers import MODEL, ForeignServer, folder, running, snapshot

from goodput_core.slo.conformance import Deviation
from goodput_core.slo.record import Outcome
from goodput_core.slo.verdict import VerdictKind
from goodput_replay.plan import PromptKey
from goodput_replay.runs.length_pinning import LengthPinning
from goodput_replay.runs.prompt_kind import PromptKind
from goodput_replay.runs.record_rows import read_records
from goodput_replay.runs.summary import read_summary
from goodput_replay.sending.prompts import WordPrompts
from goodput_replay.sending.tokenizer import read_tokenizer
from goodput_traces.format.schema import Clock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from goodput_traces.format.schema import TraceRow

pytestmark = [pytest.mark.foreign, pytest.mark.slow, pytest.mark.timeout(600)]

KINDS = ("llama_cpp", "transformers")
TEMPLATE_TOKENS = 30
"""Tokens of SmolLM2's chat template, with its system message."""
FINISHED = {0, 1, 2, 3}
"""Exit codes of a run with a verdict. These servers are slow on a small machine."""
SLO = ("--ttft", "30s", "--tpot", "5s", "--objective", "50%", "--timeout", "120s", "--gate")


def make_rows(count: int, *, every_s: float, output_tokens: int) -> list[TraceRow]:
    return [
        trace_row(
            number,
            number * every_s,
            input_tokens=40 + 9 * number,
            output_tokens=output_tokens,
            total_hashes=(1, 2, number),
            block_size=16,
        )
        for number in range(count)
    ]


ROWS = make_rows(6, every_s=2, output_tokens=6)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def server(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForeignServer]:
    """Start a server, and load its model with a first request."""
    options = ("--interrupt_requests", "false") if kind == "llama_cpp" else ()
    with running(kind, tmp_path_factory.mktemp(kind) / "log", *options) as server:
        count_prompt(server, "hello", chat=True)
        yield server


def count_prompt(server: ForeignServer, prompt: str, *, chat: bool) -> int:
    """Return the tokens that a server counts in a prompt."""
    content = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    body = json.dumps({"model": server.model, "max_tokens": 1, **content}).encode()
    path = "/v1/chat/completions" if chat else "/v1/completions"
    request = urllib.request.Request(
        f"{server.url}{path}", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        count: int = json.load(response)["usage"]["prompt_tokens"]
        return count


def replay(
    server: ForeignServer, folder: Path, rows: list[TraceRow], *more: str
) -> tuple[int, str]:
    """Replay rows; returns the exit code and the output."""
    trace = write_rows(folder / "trace.parquet", rows, Clock.TRACE_RELATIVE)
    command = [sys.executable, "-m", "goodput_core", "replay", "--trace", str(trace)]
    command += ["--target", server.url, "--out", str(folder / "run"), *SLO, *more]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=400, env=cache_of_models()
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def cache_of_models() -> dict[str, str]:
    return {**os.environ, "HF_HOME": str(folder() / "huggingface")}


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_every_request_is_served_with_a_prompt_of_its_length(
    server: ForeignServer, kind: str, tmp_path: Path, endpoint: str
) -> None:
    options = ("--tokenizer", MODEL, "--endpoint", endpoint)
    code, output = replay(server, tmp_path, ROWS, *options)
    assert code in FINISHED, output
    summary = read_summary(tmp_path / "run")
    records = {r.request_id: r for r in read_records(tmp_path / "run")}
    assert {r.outcome for r in records.values()} == {Outcome.OK}, summary.errors
    assert {name: r.input_tokens for name, r in records.items()} == {
        row.request_id: row.input_tokens for row in ROWS
    }
    target = summary.target
    assert target.prompt is PromptKind.TOKENIZER_WORDS
    assert target.prompt_overhead_tokens == (TEMPLATE_TOKENS if endpoint == "chat" else 0)
    if kind == "llama_cpp":
        # It streams no usage and rejects request ids that are no UUIDs. It honours min_tokens.
        assert "X-Request-Id is a UUID" in output
        assert target.pinning is LengthPinning.MAX_TOKENS
        assert summary.prompt_tokens is None
        assert Deviation.NO_USAGE in {d.kind for d in summary.validity.deviations}
    else:
        # It rejects ignore_eos and min_tokens.
        assert "limited by max_tokens alone" in output
        assert target.pinning is LengthPinning.LIMIT
        assert summary.prompt_tokens is not None
        assert summary.prompt_tokens.responses == len(ROWS)
        assert summary.prompt_tokens.max_difference == 0


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_a_text_has_the_tokens_that_the_server_counts(server: ForeignServer, *, chat: bool) -> None:
    overhead = TEMPLATE_TOKENS if chat else 0
    words = read_tokenizer(snapshot() / "tokenizer.json").words
    prompts = WordPrompts(b"salt", words=words, overhead_tokens=overhead)
    for tokens in (31, 32, 33, 100, 500):
        key = PromptKey(request_id="a", input_tokens=tokens, hashes=(1, 2, 3), block_size=16)
        assert count_prompt(server, json.loads(prompts.render(key)), chat=chat) == tokens


@given(tokens=st.integers(1, 300), hashes=st.lists(st.integers(), max_size=8))
@settings(deadline=None)
def test_any_text_has_the_tokens_of_its_row(tokens: int, hashes: list[int]) -> None:
    file, words = smollm2()
    key = PromptKey(request_id="a", input_tokens=tokens, hashes=hashes, block_size=16)
    text = json.loads(WordPrompts(b"salt", words=words).render(key))
    assert len(file.encode(text).ids) == tokens


@cache
def smollm2() -> tuple[Tokenizer, tuple[str, ...]]:
    path = snapshot() / "tokenizer.json"
    return Tokenizer.from_file(str(path)), read_tokenizer(path).words


def test_token_ids_are_rejected_before_the_run(server: ForeignServer, tmp_path: Path) -> None:
    code, output = replay(server, tmp_path, ROWS)
    assert code == 64
    assert "the target does not accept token ids as a prompt (HTTP" in output
    assert "--tokenizer" in output
    assert not (tmp_path / "run").exists()


def test_words_that_the_server_counts_otherwise_are_reported(
    server: ForeignServer, kind: str, tmp_path: Path
) -> None:
    code, output = replay(server, tmp_path, ROWS, "--prompt", "text")
    assert code in FINISHED, output
    if kind == "transformers":
        assert "times the input tokens of the requests" in output
        assert "give the tokenizer of its model with --tokenizer" in output


def test_interrupted_responses_are_named_and_are_no_verdict(tmp_path: Path) -> None:
    """By default, llama_cpp.server ends a response when the next request arrives."""
    rows = make_rows(8, every_s=1, output_tokens=80)
    with running("llama_cpp", tmp_path / "log") as server:
        count_prompt(server, "hello", chat=False)
        code, output = replay(server, tmp_path, rows, "--tokenizer", MODEL)
    summary = read_summary(tmp_path / "run")
    deviations = {d.kind: d.sentence for d in summary.validity.deviations}
    assert Deviation.NO_FINISH_REASON in deviations, output
    assert "--interrupt_requests false" in deviations[Deviation.NO_FINISH_REASON]
    # On a slow machine the responses may also miss their targets, which is a verdict.
    assert code == VerdictKind.INVALID.exit_code or "ttft" in summary.overall.misses

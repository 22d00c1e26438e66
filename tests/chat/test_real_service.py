"""SmolLM2 behind the router, as `goodput up -f examples/smollm2.yaml` serves it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

from benchmarks.real_chats import check_chats, prompts, stream_chats
from openai import OpenAI
from tests.e2e.test_one_manifest import replayed
from tools.chat import Chat, serve
from tools.smollm2 import model_folder

from goodput_core.slo.record import Outcome
from goodput_core.slo.verdict import VerdictKind
from goodput_replay.runs.record_rows import read_records
from goodput_replay.runs.summary import read_summary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MANIFEST = Path(__file__).resolve().parents[2] / "examples" / "smollm2.yaml"

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def manifest() -> Path:
    """The example, whose model is present."""
    if not model_folder().exists():
        pytest.skip("NOT RUN: SmolLM2 is missing; run `make smollm2`")
    return MANIFEST


@pytest.fixture(scope="module")
def url(manifest: Path) -> Iterator[str]:
    """The URL of the router."""
    with serve(str(manifest)) as url:
        yield url


# The first test, because the replay starts a service of its own.
def test_a_replay_of_the_example_is_a_valid_run_with_the_times_of_all_tokens(
    manifest: Path, tmp_path: Path
) -> None:
    load = ("--rate", "40/m", "--duration", "8s", "--input-tokens", "64", "--output-tokens", "16")
    replayed(*load, "-f", manifest, cwd=tmp_path)
    summary = read_summary(tmp_path / "run")
    assert summary.verdict.kind is not VerdictKind.INVALID, summary.verdict
    assert summary.validity.deviations == ()
    records = list(read_records(tmp_path / "run"))
    assert len(records) >= 3
    # On a machine that is busy with other tests, the policy can reject a request as too late.
    assert {record.outcome for record in records} <= {Outcome.OK, Outcome.SHED}, summary.errors
    served = [record for record in records if record.outcome is Outcome.OK]
    assert served
    for record in served:
        assert record.output_tokens == record.pinned_output_tokens
        assert len(record.gaps_us) == record.output_tokens - 1


# Before the service of the other tests, too.
def test_the_last_command_of_make_chat_answers_a_question(manifest: Path) -> None:
    root = manifest.parents[1]
    ended = subprocess.run(
        [sys.executable, "-m", "tools.chat", str(manifest.relative_to(root))],
        input="What is the capital of France?",
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "The capital of France is Paris.\n"), (
        ended.stderr
    )
    assert "135 million parameters" in ended.stderr


def test_an_openai_client_streams_sensible_text(url: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=32,
            temperature=0,
            stream=True,
        )
        pieces = [choice.delta.content or "" for chunk in stream for choice in chunk.choices]
    assert len(pieces) > 5
    assert "capital of France is Paris" in "".join(pieces)


def test_the_same_question_has_the_same_answer_in_the_chat(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        Chat(url).ask("What is the capital of France?")
    assert capsys.readouterr().out == 2 * "The capital of France is Paris.\n"


def test_concurrent_chats_have_the_tokens_of_transformers(
    url: str, tell: Callable[[str], None]
) -> None:
    began = time.monotonic()
    chats = asyncio.run(stream_chats(url, "smollm2", prompts(200), 32))
    served = time.monotonic()
    check = check_chats(model_folder(), chats)
    tell(
        f"200 chats: {check.tokens:,} tokens in {served - began:.0f} s, checked in "
        f"{time.monotonic() - served:.0f} s; wrong: {check.wrong}, ties: {check.ties}"
    )
    assert check.tokens == 200 * 32
    assert check.passed, check


def test_another_token_text_or_prompt_is_found(url: str) -> None:
    (chat,) = asyncio.run(stream_chats(url, "smollm2", prompts(1), 8))
    token_ids = [*chat.token_ids[:-1], chat.token_ids[-1] + 1]
    changed = [
        replace(chat, token_ids=token_ids),
        replace(chat, text=f"{chat.text}x"),
        replace(chat, prompt_tokens=chat.prompt_tokens + 1),
    ]
    checks = [check_chats(model_folder(), [one]) for one in changed]
    assert [check.passed for check in checks] == [False] * 3
    assert [check.wrong for check in checks] == [1, 0, 0]

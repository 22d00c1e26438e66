"""The `replay` command as a process, against scripted servers."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.builders.traces import steady_rows
from tests.replay.sending.builders import http_response

from goodput_core.dispatch import run_command
from goodput_replay.runs.record_rows import read_judged

if TYPE_CHECKING:
    from tests.replay.sending.builders import Script, Serve, WriteTrace


MODELS = b'{"data":[{"id":"m","owned_by":"goodput"}]}'
SLO = """
classes:
  - {name: fast, ttftMs: 5000, tpotMs: 5000, objective: "50%"}
"""


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


STREAM = http_response(
    b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
    b'data: {"choices":[{"index":0,"text":"a","finish_reason":"length"}]}\n\n'
    b"data: [DONE]\n\n",
    kind="text/event-stream",
)


def is_probe(request: bytes) -> bool:
    # The id of a probe is a UUID if the target rejected the first one.
    return b"x-request-id: probe" in request.lower() or b'"max_tokens":1,' in request


def answers(reply: bytes | None = STREAM, seen: list[bytes] | None = None) -> Script:
    """Make a server of one model with one response; None if it never responds."""

    async def script(request: bytes, writer: asyncio.StreamWriter) -> None:
        if request.startswith(b"GET /v1/models"):
            writer.write(http_response(MODELS))
        else:
            if seen is not None and not is_probe(request):
                seen.append(request)
            if reply is not None:
                writer.write(reply)

    return script


def start(*arguments: object) -> Any:
    return asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "goodput_core",
        "replay",
        *map(str, arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "200", "GOODPUT_DEBUG": ""},
    )


async def replay(*arguments: object) -> Ended:
    child = await start(*arguments)
    out, err = await child.communicate()
    return Ended(child.returncode, out.decode(), err.decode())


@pytest.fixture
def trace(trace_of: WriteTrace) -> Path:
    """Forty requests in two seconds, of two tokens each."""
    return trace_of(steady_rows(40, input_tokens=20, output_tokens=2))


@pytest.fixture
def slo(tmp_path: Path) -> Path:
    path = tmp_path / "slo.yaml"
    path.write_text(SLO)
    return path


async def test_a_replay_sends_and_judges_every_row_and_writes_a_folder(
    serve: Serve, trace: Path, slo: Path, tmp_path: Path
) -> None:
    seen: list[bytes] = []
    url = await serve(answers(seen=seen))
    ended = await replay(
        "--trace", trace, "--target", url, "--slo", slo, "--out", tmp_path / "run", "--json",
        "--warmup", 4, "--header", "X-Key: hunter2",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    summary = json.loads(ended.out)
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["overall"]["good"], summary["overall"]["total"]) == (36, 36)
    assert summary["window"]["warmup_rows"] == 4
    assert summary["target"]["pinning"] == "header"
    assert summary["target"]["header_names"] == ["X-Key"]
    assert "hunter2" not in ended.out + ended.err
    assert (tmp_path / "run" / "report.html").exists()
    rows = list(read_judged(tmp_path / "run"))
    assert {row.record.request_id for row in rows} == {f"row-{i}" for i in range(40)}
    assert sum(row.warmup for row in rows) == 4
    assert len(seen) == 40
    assert all(b"X-Key: hunter2" in request for request in seen)


async def test_two_runs_send_different_prompts_unless_they_share_a_salt(
    serve: Serve, trace: Path, tmp_path: Path
) -> None:
    async def prompts(name: str, *more: object) -> list[object]:
        seen: list[bytes] = []
        url = await serve(answers(seen=seen))
        ended = await replay("--trace", trace, "--target", url, "--out", tmp_path / name,
                             "--speed", 20, "--no-report", *more)  # fmt: skip
        assert ended.code in {0, 3}, ended.err  # a busy machine may send too late to be valid
        bodies = [json.loads(request.partition(b"\r\n\r\n")[2]) for request in seen]
        return sorted(body["prompt"] for body in bodies)

    one, two, three, four = (
        await prompts("1"),
        await prompts("2"),
        await prompts("3", "--salt", "same"),
        await prompts("4", "--salt", "same"),
    )
    assert one != two
    assert three == four


async def test_errors_of_the_target_abort_the_run(
    serve: Serve, trace: Path, tmp_path: Path
) -> None:
    broken = b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"
    url = await serve(answers(broken))
    ended = await replay(
        "--trace", trace, "--target", url, "--abort-on", "error-rate=5%",
        "--out", tmp_path / "run", "--no-report",
    )  # fmt: skip
    assert ended.code == 3
    assert "error: aborted: 20 of 20 requests failed within 30 s" in ended.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert not summary["run"]["complete"]
    assert summary["overall"]["outcomes"]["error"] == 20


async def test_pages_in_place_of_streams_are_rejected_before_the_run(
    serve: Serve, trace: Path, slo: Path, tmp_path: Path
) -> None:
    url = await serve(answers(http_response(b"<html>login</html>", kind="text/html")))
    ended = await replay("--trace", trace, "--target", url, "--slo", slo, "--out", tmp_path / "run")
    assert ended.code == 64
    assert "the response is text/html, not an event stream" in ended.err


async def test_later_failures_of_the_target_are_judged(
    serve: Serve, trace: Path, slo: Path, tmp_path: Path
) -> None:
    url = await serve(answers(http_response(b"out of memory", "500 No", "text/plain")))
    ended = await replay(
        "--trace", trace, "--target", url, "--slo", slo, "--out", tmp_path / "run", "--json",
        "--gate", "--no-report"
    )  # fmt: skip
    summary = json.loads(ended.out)
    assert summary["overall"]["outcomes"] == {"error": 40}
    assert summary["validity"]["valid"]
    assert summary["overall"]["good"] == 0
    assert ended.code in {1, 2}


async def test_an_unreachable_target_leaves_no_folder(trace: Path, tmp_path: Path) -> None:
    ended = await replay(
        "--trace", trace, "--target", "http://127.0.0.1:9", "--out", tmp_path / "run"
    )
    assert ended.code == 64
    assert ended.err.startswith("error: http://127.0.0.1:9/v1/models: could not connect")
    assert ended.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


async def test_an_existing_run_is_not_overwritten(
    serve: Serve, trace: Path, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious").write_text("x")
    url = await serve(answers())
    ended = await replay("--trace", trace, "--target", url, "--out", tmp_path / "run")
    assert ended.code == 64
    assert "the folder is not empty" in ended.err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["precious"]


def rejected(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the error message of a rejected command line."""
    assert run_command(["replay", *map(str, arguments)]) == 64
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    return said.err


def test_the_rate_of_the_busiest_second_is_limited(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = rejected(capsys, "--trace", trace, "--target", "http://127.0.0.1:9", "--max-rate", 19)
    assert "--max-rate 19: the busiest second of the plan" in said
    assert "has 20 requests" in said


def test_a_gate_needs_an_slo(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = rejected(capsys, "--trace", trace, "--target", "http://127.0.0.1:9", "--gate")
    assert "--gate: the run has no SLO" in said


def test_another_machine_needs_permission(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = rejected(capsys, "--trace", trace, "--target", "http://192.0.2.1:8000")
    assert "add --yes" in said


def test_an_unset_variable_of_a_key_is_named(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = rejected(
        capsys, "--trace", trace, "--target", "http://127.0.0.1:9", "--api-key-env", "NO_SUCH_KEY"
    )
    assert "--api-key-env NO_SUCH_KEY: the variable is not set" in said


SLO_TEXT = "classes: [{name: fast, ttftMs: 5, tpotMs: 1}]"
INVALID_SLOS = {
    "a unit": (SLO_TEXT.replace("5", "5s"), "classes[0].ttftMs: must be a whole number of milli"),
    "a key twice": (f"{SLO_TEXT}\n{SLO_TEXT}", "the key 'classes' is already used above"),
    "two documents": (f"{SLO_TEXT}\n---\n{SLO_TEXT}", "holds 2 documents"),
    "over 1 MiB": (f"{SLO_TEXT}\n" + "#" * (1 << 20), "over 1 MiB"),
    "half a manifest": ("apiVersion: goodput.dev/v1alpha1\nkind: LLMService", "metadata"),
}


@pytest.mark.parametrize(("text", "words"), INVALID_SLOS.values(), ids=INVALID_SLOS)
def test_an_invalid_slo_names_file_and_field(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    slo = tmp_path / "slo.yaml"
    slo.write_text(text)
    said = rejected(capsys, "--trace", trace, "--target", "http://127.0.0.1:9", "--slo", slo)
    assert said.startswith(f"error: {slo}: ")
    assert words in said


def test_a_missing_trace_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    said = rejected(capsys, "--trace", "nowhere.parquet", "--dry-run")
    assert said == "error: nowhere.parquet: no such file; check the path\n"


def test_a_dry_run_prints_the_plan(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["replay", "--trace", str(trace), "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["requests"], plan["peak_requests_in_1s"]) == (40, 20)
    assert (plan["input_tokens"], plan["output_tokens"]) == (800, 80)
    assert plan["duration_s"] == pytest.approx(1.95, abs=0.001)


@pytest.mark.parametrize(
    ("window", "noted"),
    [("0s..4s", True), ("1s..3s", True), ("0s..2s", False), ("1s..", False), ("500ms..1s", False)],
)
def test_a_window_that_ends_long_after_the_trace_is_named_before_the_run(
    window: str, noted: bool, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["replay", "--trace", str(trace), "--window", window, "--dry-run"]
    assert run_command(command) == 0
    note = "note: the trace spans 1.95 s, but rates are computed over the window "
    assert (note in capsys.readouterr().err) is noted


def test_control_characters_of_a_trace_are_escaped_in_a_dry_run(
    trace_of: WriteTrace, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = trace_of(steady_rows(2, slo_class="\x1b]0;class\x07[b]", model_name="\x1b]0;model\x07"))
    assert run_command(["replay", "--trace", str(trace), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert shown.replace("\n", "").isprintable()
    words = " ".join(shown.split())
    assert r"classes \x1b]0;class\x07[b] 2" in words
    assert r"models \x1b]0;model\x07 2" in words


async def test_control_characters_of_a_server_are_escaped_in_an_error(
    serve: Serve, trace: Path, tmp_path: Path
) -> None:
    async def script(_: bytes, writer: asyncio.StreamWriter) -> None:
        ids = r'{"data":[{"id":"\u001b]0;a\u0007"},{"id":"b"}]}'
        writer.write(http_response(ids.encode()))

    url = await serve(script)
    ended = await replay("--trace", trace, "--target", url, "--out", tmp_path / "run")
    assert ended.code == 64
    assert ended.err.rstrip("\n").isprintable()
    assert r"\x1b]0;a\x07" in ended.err


@pytest.mark.parametrize(
    ("source", "message"),
    [("emulated://no-such-device", "no-such-device"), ("pvc://weights/chat", "with --model-path")],
    ids=["no profile", "a claim"],
)
async def test_a_service_that_cannot_start_ends_the_run_with_its_message(
    trace: Path, tmp_path: Path, source: str, message: str
) -> None:
    manifest = tmp_path / "chat.yaml"
    example = Path(__file__).parents[3] / "examples" / "chat.yaml"
    manifest.write_text(example.read_text().replace("emulated://llama-3-8b-h100", source))
    ended = await replay("--trace", trace, "-f", manifest, "--out", tmp_path / "run")
    assert ended.code == 64
    assert message in ended.err.splitlines()[-1]
    assert "Traceback" not in ended.err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
async def test_a_service_is_started_replayed_and_stopped(trace: Path, tmp_path: Path) -> None:
    manifest = Path(__file__).parents[3] / "examples" / "chat.yaml"
    ended = await replay(
        "--trace",
        trace,
        "-f",
        manifest,
        "--out",
        tmp_path / "run",
        "--json",
        "--endpoint",
        "chat",
        "--no-report",
    )
    assert ended.code in {0, 3}, ended.err
    summary = json.loads(ended.out)
    assert summary["target"]["service"] == "chat"
    assert summary["overall"]["outcomes"] == {"ok": 40}
    assert summary["overall"]["input_tokens"] == 800
    assert summary["overall"]["output_tokens"] == 80
    assert (tmp_path / "run" / "service.log").exists()


def http_error(status: int, message: str) -> bytes:
    return http_response(json.dumps({"error": {"message": message}}).encode(), f"{status} No")


@pytest.mark.parametrize(
    ("status", "hint"),
    [
        (307, "give the final address with --target"),
        (401, "--api-key-env"),
        (404, "--model"),
        (422, "--length-pinning none"),
    ],
)
async def test_a_rejected_probe_is_an_error_that_quotes_the_target(
    serve: Serve, trace: Path, tmp_path: Path, status: int, hint: str
) -> None:
    seen: list[bytes] = []
    url = await serve(answers(http_error(status, "no such\x1b[2J thing"), seen=seen))
    ended = await replay("--trace", trace, "--target", url, "--out", tmp_path / "run")
    assert ended.code == 64
    assert ended.err.count("\n") == 1
    assert f"error: {url}/v1/completions: the target rejects requests: HTTP {status}: no such" in (
        ended.err
    )
    assert hint in ended.err
    assert "--no-probe" in ended.err
    assert "\x1b" not in ended.err
    assert seen == [], "no request of the run was sent"
    assert not (tmp_path / "run").exists()


async def test_without_the_probe_a_rejected_run_is_recorded_and_invalid(
    serve: Serve, trace: Path, slo: Path, tmp_path: Path
) -> None:
    url = await serve(answers(http_error(404, "no such model")))
    ended = await replay(
        "--trace", trace, "--target", url, "--slo", slo, "--out", tmp_path / "run",
        "--no-probe", "--no-report",
    )  # fmt: skip
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert ended.code == 3
    assert summary["verdict"]["reason"] == "ClientError"
    (error,) = summary["errors"]
    assert (error["status"], error["detail"], error["count"]) == (
        404,
        "HTTP 404: no such model",
        40,
    )
    assert "40 ×  HTTP 404: no such model" in ended.out


@pytest.mark.parametrize(
    ("rejected", "slow_every", "code", "text"),
    [
        pytest.param(8, 50, 3, "so its load was lighter", id="a-fifth-of-the-load"),
        pytest.param(8, 2, 3, "would be FAIL, not INCONCLUSIVE", id="fewer-than-other-misses"),
        pytest.param(1, 1, 1, "at most", id="a-FAIL-that-does-not-depend-on-them"),
        pytest.param(40, 50, 3, "would be without a judged request", id="every-request"),
    ],
)
async def test_a_key_that_expires_decides_no_verdict(
    serve: Serve, trace: Path, tmp_path: Path, rejected: int, slow_every: int, code: int, text: str
) -> None:
    sent = 0

    async def script(request: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        if request.startswith(b"GET /v1/models"):
            writer.write(http_response(MODELS))
            return
        sent += 1
        if sent > 40 - rejected:
            writer.write(http_error(401, "the key has expired"))
            return
        if sent % slow_every == 0:
            await asyncio.sleep(0.8)
        writer.write(STREAM)

    url = await serve(script)
    ended = await replay(
        "--trace", trace, "--target", url, "--ttft", "400ms", "--tpot", "5s", "--objective", "70%",
        "--out", tmp_path / "run", "--no-probe", "--no-report", "--gate",
    )  # fmt: skip
    assert ended.code == code, ended.out + ended.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert text in summary["verdict"]["sentence"]
    assert (summary["verdict"]["reason"] == "ClientError") is (code == 3)
    assert summary["validity"]["client_errors"] == rejected
    if code != 3:
        expected = f"does not depend on {rejected} of 40 requests that the server rejected"
        assert expected in summary["validity"]["sentence"]
    assert f"{rejected} ×  HTTP 401: the key has expired" in ended.out


async def test_every_class_is_probed_once_and_probes_are_not_recorded(
    serve: Serve, trace_of: WriteTrace, tmp_path: Path
) -> None:
    requests: list[bytes] = []

    async def script(request: bytes, writer: asyncio.StreamWriter) -> None:
        if request.startswith(b"GET /v1/models"):
            writer.write(http_response(MODELS.replace(b"goodput", b"other")))
        else:
            requests.append(request)
            writer.write(STREAM)

    rows = list(steady_rows(6, input_tokens=2000))
    trace = trace_of(
        [replace(row, slo_class=("fast", "slow")[i % 2]) for i, row in enumerate(rows)]
    )
    url = await serve(script)
    ended = await replay(
        "--trace", trace, "--target", url, "--out", tmp_path / "run", "--no-report"
    )
    assert ended.code in {0, 3}, ended.err
    probes = [request for request in requests if is_probe(request)]
    bodies = [json.loads(request.partition(b"\r\n\r\n")[2]) for request in probes]
    assert len(probes) == 2
    assert {body["max_tokens"] for body in bodies} == {1}
    assert all(body["ignore_eos"] and len(body["prompt"]) == 8 for body in bodies)
    assert [b"X-SLO-Class: fast" in p or b"X-SLO-Class: slow" in p for p in probes] == [True, True]
    ids = [row.record.request_id for row in read_judged(tmp_path / "run")]
    assert sorted(ids) == [f"row-{i}" for i in range(6)]


@pytest.mark.parametrize("status", [429, 408, 503, 500])
async def test_a_temporary_failure_of_a_probe_starts_the_run(
    serve: Serve, trace: Path, tmp_path: Path, status: int
) -> None:
    async def script(request: bytes, writer: asyncio.StreamWriter) -> None:
        if request.startswith(b"GET /v1/models"):
            writer.write(http_response(MODELS))
        else:
            writer.write(http_error(status, "starting") if is_probe(request) else STREAM)

    url = await serve(script)
    ended = await replay(
        "--trace", trace, "--target", url, "--out", tmp_path / "run", "--no-report", "--json",
        "--speed", 10,
    )  # fmt: skip
    assert ended.code in {0, 3}, ended.err
    assert f"failed (HTTP {status}: starting); the run starts anyway" in ended.err
    assert json.loads(ended.out)["overall"]["outcomes"] == {"ok": 40}

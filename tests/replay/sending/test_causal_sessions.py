"""`--sessions causal` as a command, against scripted servers and the project's own engine."""

from __future__ import annotations

import asyncio
import re
import sys
from asyncio.subprocess import PIPE
from typing import TYPE_CHECKING

import pytest
from tests.builders.manifests import manifest_path
from tests.builders.sessions import session_row
from tests.replay.sending.builders import http_response

from goodput_core.errors import UsageError
from goodput_core.slo.record import Outcome
from goodput_core.units import NS_PER_MS
from goodput_replay.options import parse_options
from goodput_replay.runs.record_rows import read_judged
from goodput_replay.runs.summary import read_summary

if TYPE_CHECKING:
    from pathlib import Path

    from tests.replay.sending.builders import Script, Serve, WriteTrace

    from goodput_core.slo.record import RequestRecord

MODELS = b'{"data":[{"id":"m"}]}'
STREAM = http_response(
    b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
    b'data: {"choices":[{"index":0,"text":"a","finish_reason":"length"}]}\n\n'
    b"data: [DONE]\n\n",
    kind="text/event-stream",
)
ERROR = http_response(b'{"error":{"message":"no"}}', "500 Internal Server Error")
SHED = http_response(b'{"error":{"message":"full"}}', "429 Too Many Requests\r\nRetry-After: 60")
SLOS = ["--ttft", "5s", "--tpot", "5s", "--objective", "50%"]


def answer_by_id(answers: dict[str, bytes | None], pause_s: float = 0.0) -> Script:
    """Make a server with its own response for some requests; None if it never responds."""

    async def script(request: bytes, writer: asyncio.StreamWriter) -> None:
        if request.startswith(b"GET /v1/models"):
            writer.write(http_response(MODELS))
            return
        found = re.search(rb"x-request-id: (\S+)", request, re.IGNORECASE)
        assert found is not None
        await asyncio.sleep(pause_s)
        answer = answers.get(found[1].decode(), STREAM)
        if answer is not None:
            writer.write(answer)

    return script


async def replay(out: Path, *arguments: object) -> tuple[int | None, str]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "goodput_core", "replay", "--no-report", "--sessions", "causal",
        "--out", str(out), *map(str, arguments), stdout=PIPE, stderr=PIPE,
    )  # fmt: skip
    output, err = await child.communicate()
    return child.returncode, " ".join((output + err).decode().split())


def records_of(out: Path) -> dict[str, RequestRecord]:
    return {row.record.request_id: row.record for row in read_judged(out)}


def pause_ms(records: dict[str, RequestRecord], before: int, after: int) -> float:
    end_ns = records[f"row-{before}"].end_ns
    assert end_ns is not None
    return (records[f"row-{after}"].scheduled_ns - end_ns) / NS_PER_MS


async def test_follow_ups_are_sent_a_think_time_after_the_response_before_them(
    serve: Serve, trace_of: WriteTrace, tmp_path: Path
) -> None:
    # An hour between the follow-ups of the trace; all sessions start within 300 ms.
    rows = [session_row(i, 100 * i, f"s{i}" if i != 2 else None, output_tokens=2) for i in range(4)]
    rows += [
        session_row(
            4 + i, 3_600_000 * (1 + i), f"s{i % 2}", delay_ms=(0, 40)[i % 2], output_tokens=2
        )
        for i in range(6)
    ]
    url = await serve(answer_by_id({}, pause_s=0.03))
    out = tmp_path / "run"
    code, text = await replay(out, "--trace", trace_of(rows), "--target", url, *SLOS)
    assert code == 0, text
    assert "causal sessions: 10 requests over" in text
    assert "4 requests start at their times in the trace, 6 follow the end" in text
    records = records_of(out)
    assert [records[f"row-{i}"].scheduled_ns for i in range(4)] == [
        i * 100 * NS_PER_MS for i in range(4)
    ]
    chains = [(0, 4), (4, 6), (6, 8)], [(1, 5), (5, 7), (7, 9)]
    assert [pause_ms(records, *pair) for pair in chains[0]] == [0, 0, 0]
    assert [pause_ms(records, *pair) for pair in chains[1]] == [40, 40, 40]
    assert all((r.sent_ns or 0) >= r.scheduled_ns for r in records.values())
    summary = read_summary(out)
    assert summary.run.sessions is not None
    assert summary.window.length_s < 60
    assert summary.window.rows_sent == summary.window.rows_planned == 10


async def test_follow_ups_come_after_failed_shed_and_timed_out_requests_and_are_all_judged(
    serve: Serve, trace_of: WriteTrace, tmp_path: Path
) -> None:
    rows = [session_row(i, 60_000 * i, delay_ms=5, output_tokens=2) for i in range(6)]
    rows[4] = session_row(4, 240_000, delay_ms=5, cancel_after_ms=60)
    answers = {"row-0": ERROR, "row-1": SHED, "row-2": None, "row-4": None}
    url = await serve(answer_by_id(answers))
    out = tmp_path / "run"
    code, text = await replay(
        out, "--trace", trace_of(rows), "--target", url, "--timeout", "1s", *SLOS, "--warmup", 1
    )
    assert code == 0, text
    records = records_of(out)
    assert [records[f"row-{i}"].outcome for i in range(6)] == [
        Outcome.ERROR, Outcome.SHED, Outcome.TIMEOUT, Outcome.OK, Outcome.CANCELLED, Outcome.OK
    ]  # fmt: skip
    assert [pause_ms(records, i, i + 1) for i in range(5)] == [5] * 5
    summary = read_summary(out)
    assert (summary.overall.good, summary.overall.total, summary.overall.excluded) == (2, 4, 1)
    assert summary.validity.unsent_rows == 0
    start_ns = records["row-1"].scheduled_ns
    assert summary.window.start_s * 1e9 == pytest.approx(start_ns, abs=1000)


async def test_several_senders_send_every_follow_up_once_also_below_a_parent_in_another_session(
    serve: Serve, trace_of: WriteTrace, tmp_path: Path
) -> None:
    rows = [session_row(i, 20 * i, f"s{i}", output_tokens=2) for i in range(12)]
    rows += [
        session_row(
            12 + i,
            60_000 + i,
            (f"s{i}", f"other-{i}", None)[i % 3],
            parent_request_id=f"row-{i}" if i % 2 or i % 3 else None,
            delay_ms=30,
            output_tokens=2,
        )
        for i in range(12)
    ]
    url = await serve(answer_by_id({}))
    out = tmp_path / "run"
    code, text = await replay(
        out, "--trace", trace_of(rows), "--target", url, *SLOS, "--workers", 2
    )
    assert code in {0, 3}, text  # a busy test machine can be late
    records = records_of(out)
    assert set(records) == {f"row-{i}" for i in range(24)}
    assert {record.sender for record in records.values()} == {0, 1}
    for i in range(12):
        assert pause_ms(records, i, 12 + i) == 30
        assert records[f"row-{i}"].sender == records[f"row-{12 + i}"].sender


async def test_follow_ups_that_an_aborted_run_never_sends_make_it_invalid(
    serve: Serve, trace_of: WriteTrace, tmp_path: Path
) -> None:
    rows = [session_row(i, i, f"s{i}") for i in range(30)]
    rows += [session_row(30 + i, 100 + i, f"s{i}", delay_ms=3_600_000) for i in range(30)]
    answers = {f"row-{i}": ERROR for i in range(30)}
    url = await serve(answer_by_id(dict(answers)))
    out = tmp_path / "run"
    code, text = await replay(
        out, "--trace", trace_of(rows), "--target", url, *SLOS, "--abort-on", "error-rate=5%"
    )
    assert code == 3, text
    summary = read_summary(out)
    assert not summary.validity.valid
    # Of the starts, at least those were sent that triggered the rule.
    assert 30 <= summary.validity.unsent_rows <= 40


async def test_the_engine_gets_the_schedule_and_the_prefixes_of_virtual_time(
    trace_of: WriteTrace, tmp_path: Path
) -> None:
    hashes = tuple(range(100, 140))
    rows = [
        session_row(
            8 * turn + s,
            20_000 * turn + 150 * s,
            f"s{s}",
            delay_ms=60,
            input_tokens=64 * (turn + 1),
            output_tokens=20,
            total_hashes=tuple(1000 * s + h for h in hashes[: 4 * (turn + 1)]),
            block_size=16,
        )
        for turn in range(3)
        for s in range(8)
    ]
    trace = trace_of(rows)
    manifest = tmp_path / "chat.yaml"
    manifest.write_text(manifest_path("emulated").read_text())
    for option in ("-f", "--emulate"):
        code, text = await replay(tmp_path / option, "--trace", trace, option, manifest)
        # A busy test machine can be late; its records still show the schedule.
        assert code in {0, 3}, text
    real, virtual = records_of(tmp_path / "-f"), records_of(tmp_path / "--emulate")
    assert set(real) == set(virtual) == {row.request_id for row in rows}
    for records in (real, virtual):
        for number in range(16):
            assert pause_ms(records, number, number + 8) == 60
    cached = {name: record.cached_tokens for name, record in virtual.items()}
    assert {name: record.cached_tokens for name, record in real.items()} == cached
    assert set(cached.values()) == {0, 64, 128}
    # Both end long before the trace, whose follow-ups are 20 s apart.
    assert max(record.scheduled_ns for record in virtual.values()) < 3_000 * NS_PER_MS
    assert max(record.scheduled_ns for record in real.values()) < 19_000 * NS_PER_MS


HERE = ["--trace", "t", "--target", "http://127.0.0.1:1", "--sessions", "causal"]
LOAD = ["--rate", "5/s", "--duration", "5m", "--input-tokens", "5", "--output-tokens", "2"]
REJECTED = {
    "a closed loop": ([*HERE, "--concurrency", "2"], "--concurrency and --sessions causal are"),
    "a maximum rate": ([*HERE, "--max-rate", "2"], "--max-rate and --sessions causal"),
    "a load": ([*HERE[2:], *LOAD], "a load without a trace has no sessions"),
    "another mode": ([*HERE[:5], "chained"], "--sessions"),
}


@pytest.mark.parametrize(("argv", "sentence"), REJECTED.values(), ids=REJECTED)
def test_options_that_need_known_times_are_rejected(argv: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_options(argv)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_arrivals_are_independent_unless_asked_for() -> None:
    assert not parse_options(HERE[:4]).causal
    assert not parse_options([*HERE[:4], "--sessions", "independent"]).causal
    assert parse_options(HERE).causal

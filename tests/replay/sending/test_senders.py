"""Several sending processes: one merged run, and no row is lost without an INVALID verdict."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections import defaultdict
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
import pytest
from tests.builders.traces import steady_rows, trace_row
from tests.replay.sending.stand_ins import DONE, StandIn, event, finish, running, tokens, usage

from goodput_core.slo.record import Outcome
from goodput_core.slo.targets import SLOClass
from goodput_core.slo.verdict import Reason, VerdictKind
from goodput_core.spec.choices import Endpoint
from goodput_replay.plan import RequestPlan
from goodput_replay.runs.length_pinning import LengthPinning
from goodput_replay.runs.prompt_kind import PromptKind
from goodput_replay.runs.record_rows import read_judged, read_records
from goodput_replay.runs.slo import SLOClasses
from goodput_replay.runs.summary import read_summary
from goodput_replay.runs.summary_builder import read_stalls
from goodput_replay.sending.client.redaction import Redaction
from goodput_replay.sending.client.request import SendingPolicy
from goodput_replay.sending.loop import SenderPlan
from goodput_replay.sending.preflight import ModelNames
from goodput_replay.sending.senders import SENDER_MESSAGES, SenderStart
from goodput_replay.shares import Share
from goodput_traces.format.reader import open_trace
from goodput_traces.transforms import (
    TransformPlan,
    parse_class_rules,
    parse_session_arrivals,
    parse_window,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator

    from tests.replay.sending.builders import WriteTrace

    from goodput_replay.runs.summary import Summary

WORKER = "goodput_replay.sending.worker"
SLO = ("--ttft", "5s", "--tpot", "5s", "--objective", "99%")


class Endless:
    """A server that responds to the first requests only.

    Args:
        complete: number of complete responses.
        awaited: number of requests after which `arrived` is set.
    """

    def __init__(self, *, complete: int, awaited: int) -> None:
        self.arrived = asyncio.Event()
        self._complete = complete
        self._awaited = awaited
        self._requests = 0

    def answer(self, count: int) -> Iterable[bytes]:
        """Return the events of a response, which has no end if it is not among the first."""
        self._requests += 1
        if self._requests == self._awaited:
            self.arrived.set()
        if self._requests <= self._complete:
            return [*tokens(count), finish(), usage(count), DONE]
        return self._drip()

    @staticmethod
    def _drip() -> Iterator[bytes]:
        while True:
            yield from tokens(1)


@pytest.fixture
async def endless() -> AsyncIterator[tuple[Endless, str]]:
    """Four complete responses; the event is set at the twelfth request."""
    server = Endless(complete=4, awaited=12)
    async with running(StandIn(answer=server.answer, pause_s=0.02)) as url:
        yield server, url


async def started(folder: Path, trace: Path, url: str, *options: str) -> asyncio.subprocess.Process:
    """Start a replay with three workers, or as `options` say."""
    command = ["replay", "--trace", str(trace), "--target", url, "--out", "run", "--no-probe"]
    command += ["--no-report", *SLO, *(() if "--workers" in options else ("--workers", "3"))]
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "goodput_core", *command, *options),
        cwd=folder, stdout=PIPE, stderr=PIPE, env={**os.environ, "COLUMNS": "200"},
        start_new_session=True,
    )  # fmt: skip


async def ended(child: asyncio.subprocess.Process, folder: Path) -> tuple[Summary, str]:
    """Wait for the end of a replay, and return its summary and its stderr."""
    _, err = await asyncio.wait_for(child.communicate(), 60)
    assert workers_of(folder) == [], "no sender survives"
    return read_summary(folder / "run"), err.decode()


def workers_of(folder: Path) -> list[psutil.Process]:
    """Return the senders that run in a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and WORKER in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


def sessions_of_twelve(number: int) -> dict[str, str]:
    return {"provided_session_id": f"session-{number % 12}"}


async def test_several_workers_make_one_run_with_every_row_once(
    trace_of: WriteTrace, tmp_path: Path
) -> None:
    trace = trace_of(trace_row(n, n / 100, **sessions_of_twelve(n)) for n in range(120))
    answer = lambda count: [*tokens(count), finish(), usage(count), DONE]  # noqa: E731
    async with running(StandIn(answer=answer)) as url:
        child = await started(tmp_path, trace, url, "--warmup", "10", "--salt", "x")
        summary, err = await ended(child, tmp_path)
    assert (child.returncode, err) == (0, "")
    rows = list(read_judged(tmp_path / "run"))
    assert sorted(row.record.request_id for row in rows) == sorted(f"row-{n}" for n in range(120))
    assert sorted(row.record.request_id for row in rows if row.warmup) == [
        f"row-{n}" for n in range(10)
    ]
    senders = defaultdict(set)
    for row in rows:
        senders[int(row.record.request_id[4:]) % 12].add(row.record.sender)
    assert all(len(numbers) == 1 for numbers in senders.values()), "a session has one sender"
    assert {number for numbers in senders.values() for number in numbers} == {0, 1, 2}
    assert summary.validity.valid
    assert summary.window.rows_planned == summary.window.rows_sent == 110
    assert [one.shard for one in summary.client.senders] == [None] * 3
    assert sum(one.requests for one in summary.client.senders) == 120
    assert summary.client.cpu_s > sum(one.cpu_s for one in summary.client.senders) > 0
    lags = [row.record.lag_ns for row in rows if row.record.lag_ns is not None]
    assert len(lags) == 120
    assert all(-1_000_000 < lag < 2_000_000_000 for lag in lags), "all have one time zero"


async def test_a_killed_worker_makes_the_run_invalid_and_keeps_the_records(
    endless: tuple[Endless, str], trace_of: WriteTrace, tmp_path: Path
) -> None:
    server, url = endless
    trace = trace_of(steady_rows(60))
    child = await started(tmp_path, trace, url, "--gate")
    await server.arrived.wait()
    victim = max(workers_of(tmp_path), key=lambda process: process.create_time())
    victim.send_signal(signal.SIGKILL)
    summary, err = await ended(child, tmp_path)
    assert child.returncode == 70
    assert "of 3 was killed by SIGKILL before all of its requests had ended" in err
    assert not summary.run.complete
    assert (summary.verdict.kind, summary.verdict.reason) == (
        VerdictKind.INVALID,
        Reason.INCOMPLETE,
    )
    assert summary.validity.unsent_rows >= 40, "rows of the killed sender are missing too"
    assert "rows were never sent" in summary.verdict.sentence
    outcomes = [record.outcome for record in read_records(tmp_path / "run")]
    assert outcomes.count(Outcome.OK) == 4
    assert outcomes.count(Outcome.CANCELLED) >= 2, "the requests of the other senders"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
async def test_an_interrupt_reaches_all_workers(
    endless: tuple[Endless, str], trace_of: WriteTrace, tmp_path: Path, number: signal.Signals
) -> None:
    server, url = endless
    child = await started(tmp_path, trace_of(steady_rows(60)), url)
    await server.arrived.wait()
    os.killpg(child.pid, number)  # as a terminal does
    summary, err = await ended(child, tmp_path)
    assert child.returncode == 130
    assert f"holds the records of {summary.overall.requests} requests" in err
    assert summary.verdict.reason is Reason.INCOMPLETE
    records = list(read_records(tmp_path / "run"))
    outcomes = [record.outcome for record in records]
    assert outcomes.count(Outcome.OK) == 4
    assert outcomes.count(Outcome.CANCELLED) >= 8
    assert len({record.sender for record in records}) == 3


async def test_a_second_ctrl_c_ends_all_workers(
    endless: tuple[Endless, str], trace_of: WriteTrace, tmp_path: Path
) -> None:
    server, url = endless
    child = await started(tmp_path, trace_of(steady_rows(60)), url)
    await server.arrived.wait()
    stuck = workers_of(tmp_path)
    assert len(stuck) == 3
    for process in stuck:
        process.send_signal(signal.SIGSTOP)
    try:
        child.send_signal(signal.SIGINT)
        await asyncio.sleep(0.2)
        child.send_signal(signal.SIGINT)
        assert child.stderr is not None
        line = await asyncio.wait_for(child.stderr.readline(), 60)
        assert line.startswith(b"error: ended immediately by Ctrl-C; run holds")
    finally:
        for process in stuck:  # they hold the pipes open, and would stay forever
            process.send_signal(signal.SIGCONT)
    assert await asyncio.wait_for(child.wait(), 60) == 130
    _, alive = await asyncio.to_thread(psutil.wait_procs, stuck, timeout=10)
    assert alive == []


async def test_workers_end_with_the_process_of_the_command(
    endless: tuple[Endless, str], trace_of: WriteTrace, tmp_path: Path
) -> None:
    server, url = endless
    child = await started(tmp_path, trace_of(steady_rows(60)), url)
    await server.arrived.wait()
    senders = workers_of(tmp_path)
    assert len(senders) == 3
    child.kill()
    await child.communicate()
    _, alive = await asyncio.to_thread(psutil.wait_procs, senders, timeout=10)
    assert alive == []


async def test_the_error_rate_counts_the_requests_of_all_workers(
    trace_of: WriteTrace, tmp_path: Path
) -> None:
    """No worker sends the twenty requests that a rule needs before it applies."""
    answer = lambda _: [event({"error": {"message": "broken"}})]  # noqa: E731
    async with running(StandIn(answer=answer)) as url:
        trace = trace_of(steady_rows(50, per_s=25))
        options = ("--abort-on", "error-rate=50%", "--workers", "6")
        child = await started(tmp_path, trace, url, *options)
        summary, err = await ended(child, tmp_path)
    assert child.returncode == 3
    assert "error: aborted: 20 of 20 requests failed within 30 s" in err
    assert max(one.requests for one in summary.client.senders) < 20
    assert summary.verdict.reason is Reason.INCOMPLETE


async def test_a_stalled_worker_excuses_only_its_own_requests(
    trace_of: WriteTrace, tmp_path: Path
) -> None:
    all_arrived, arrived = asyncio.Event(), 0

    def answer(count: int) -> Iterable[bytes]:
        nonlocal arrived
        arrived += 1
        if arrived == 20:
            all_arrived.set()
        return [*tokens(count), finish(), usage(count), DONE]

    trace = trace_of(steady_rows(20, output_tokens=60))
    async with running(StandIn(answer=answer, pause_s=0.02)) as url:
        options = ("--workers", "2", "--tbt-p99", "250ms")
        child = await started(tmp_path, trace, url, *options)
        await all_arrived.wait()
        victim, _ = workers_of(tmp_path)
        victim.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.5)
        victim.send_signal(signal.SIGCONT)
        summary, _ = await ended(child, tmp_path)
    stalls = read_stalls(summary.client)
    (stalled,) = (number for number, one in stalls.items() if one.total_ns >= 450_000_000)
    missed = {r.record.sender for r in read_judged(tmp_path / "run") if r.judgement
              and "tbt" in r.judgement.reasons}  # fmt: skip
    assert missed == {stalled}
    assert summary.verdict.kind is VerdictKind.INVALID
    assert "without the client's lag (late sends and stalls)" in summary.verdict.sentence


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--workers", "0"), "argument --workers"),
        (("--workers", "257"), "argument --workers"),
        (("--workers", "2", "--concurrency", "4"), "--workers and --concurrency are mutually"),
    ],
)
async def test_impossible_numbers_of_workers_are_rejected(
    trace_of: WriteTrace, tmp_path: Path, options: tuple[str, ...], problem: str
) -> None:
    child = await started(tmp_path, trace_of(steady_rows(2)), "http://127.0.0.1:1", *options)
    _, err = await child.communicate()
    assert child.returncode == 64
    assert problem in err.decode()
    assert not (tmp_path / "run").exists()


async def test_a_plan_arrives_at_a_sender_as_it_was_sent(trace_of: WriteTrace) -> None:
    trace = open_trace(trace_of(steady_rows(2)))
    objective = SLOClass(name="chat", ttft_ms=500, tpot_ms=50, objective=Fraction("0.999"))
    plan = SenderPlan(
        requests=RequestPlan(
            trace=trace,
            transforms=TransformPlan(
                window=parse_window("1s..1m"),
                session_arrivals=parse_session_arrivals("poisson:6/min"),
                rate_scale=Fraction(1, 3),
                class_rules=parse_class_rules(
                    ["long: input_tokens >= 2048", "eval: model_name == 'a b'", "rest: *"]
                ),
                speed=Fraction("1.1"),
                first_ns=trace.first_ns,
            ),
            slo=SLOClasses(classes=(objective,), default="chat", outage_s=10),
            warmup=3,
        ),
        share=Share(index=1, count=4),
        urls=("http://127.0.0.1:8000/v1/completions",),
        endpoint=Endpoint.COMPLETIONS,
        headers={"Authorization": "Bearer secret"},
        ca_file=Path(os.fsdecode(b"ca-\xff.pem")),
        policy=SendingPolicy(
            timeout_ns=1, class_timeouts_ns={"chat": 2}, pinned=True,
            redaction=Redaction.of(["Bearer secret"]),
        ),
        pinning=LengthPinning.HEADER,
        models=ModelNames(mapping={"a": "b"}, default=None),
        prompt=PromptKind.TOKEN_IDS,
        words=("one", "two"),
        salt="salt",
        concurrency=None,
    )  # fmt: skip
    assert await _over_a_pipe(SENDER_MESSAGES.encode(plan)) == plan


async def test_a_message_of_another_form_is_not_decoded() -> None:
    start = SENDER_MESSAGES.encode(SenderStart(zero_ns=7))
    assert await _over_a_pipe(start) == SenderStart(zero_ns=7)
    with pytest.raises(msgspec.ValidationError):
        await _over_a_pipe(start.replace(b"\x07", b"\xc0"))


async def _over_a_pipe(data: bytes) -> object:
    pipe = asyncio.StreamReader()
    pipe.feed_data(data)
    pipe.feed_eof()
    return await SENDER_MESSAGES.read(pipe)

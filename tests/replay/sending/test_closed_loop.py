"""Closed loops: a fixed number of clients, throughput, and no verdict."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.builders.records import request_record
from tests.builders.traces import steady_rows
from tests.replay.sending.builders import make_planned
from tests.replay.sending.stand_ins import DONE, StandIn, finish, running, tokens, usage

from goodput_core.dispatch import run_command
from goodput_core.errors import UsageError
from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.slo.verdict import Reason, VerdictKind
from goodput_core.units import NS_PER_S
from goodput_replay.options import parse_options
from goodput_replay.runs.record_rows import read_judged
from goodput_replay.runs.summary import read_summary
from goodput_replay.sending.body import PreparedRequest
from goodput_replay.sending.lookahead import Lookahead
from goodput_replay.sending.pacer import Pacer
from goodput_replay.sending.sender import ClosedLoopSender

if TYPE_CHECKING:
    from pathlib import Path

    from tests.replay.sending.builders import WriteTrace

    from goodput_replay.plan import PlannedRequest


class ManualPacer(Pacer):
    """A clock that the test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.at_ns = 0

    def now_ns(self) -> int:
        return self.at_ns

    async def wait_until(self, deadline_ns: int) -> None:
        self.at_ns = max(self.at_ns, deadline_ns)


def render(planned: PlannedRequest) -> PreparedRequest:
    return PreparedRequest(planned=planned, body=b"{}", input_tokens=1, headers={})


class CountingServer:
    """Holds requests until the test ends one of them."""

    def __init__(self) -> None:
        self.open: dict[str, asyncio.Future[None]] = {}
        self.scheduled: dict[str, int] = {}
        self.most_open = 0

    async def exchange(self, request: PreparedRequest, _zero_ns: int) -> RequestRecord:
        planned = request.planned
        self.scheduled[planned.request_id] = planned.scheduled_ns
        future = asyncio.get_running_loop().create_future()
        self.open[planned.request_id] = future
        self.most_open = max(self.most_open, len(self.open))
        outcome = Outcome.OK
        try:
            await future
        except asyncio.CancelledError:
            outcome = Outcome.CANCELLED
        del self.open[planned.request_id]
        return request_record(
            request_id=planned.request_id, scheduled_ns=planned.scheduled_ns, outcome=outcome
        )


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@given(
    clients=st.integers(1, 6),
    requests=st.integers(1, 20),
    order=st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=examples(50))
def test_as_many_requests_as_clients_are_in_flight_and_all_are_sent_in_order(
    clients: int, requests: int, order: object
) -> None:
    asyncio.run(_check_in_flight(clients, requests, order))


async def _check_in_flight(clients: int, requests: int, order: object) -> None:
    server, pacer, ended = CountingServer(), ManualPacer(), []
    # One request a minute in the trace, which does not matter.
    planned = (make_planned(i, i * 60 * NS_PER_S, warmup=i == 0) for i in range(requests))
    lookahead = Lookahead(planned, render, ahead_ns=1 << 62)
    await lookahead.fill()
    sender = ClosedLoopSender(
        server.exchange, pacer, lambda _, record: ended.append(record), clients=clients
    )
    running_task = asyncio.ensure_future(sender.run(lookahead, 1_000))
    for done in range(requests):
        await settle()
        assert len(server.open) == min(clients, requests - done) == sender.in_flight
        pacer.at_ns += 7
        order.choice(list(server.open.values())).set_result(None)  # type: ignore[attr-defined]
    await running_task
    lookahead.close()
    assert server.most_open == min(clients, requests) == sender.peak_in_flight
    assert list(server.scheduled) == [f"row-{i}" for i in range(requests)]
    times = list(server.scheduled.values())
    assert times == [0] * min(clients, requests) + [7 * (i + 1) for i in range(requests - clients)]
    assert len(ended) == requests == sender.sent
    assert sender.first_judged_ns == (times[1] if requests > 1 else None)


async def test_a_stopped_run_sends_no_more_and_records_the_requests_in_flight() -> None:
    server, ended = CountingServer(), []
    lookahead = Lookahead((make_planned(i, i) for i in range(9)), render)
    await lookahead.fill()
    sender = ClosedLoopSender(
        server.exchange, ManualPacer(), lambda _, record: ended.append(record), clients=3
    )
    task = asyncio.ensure_future(sender.run(lookahead, 0))
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    lookahead.close()
    assert [record.outcome for record in ended] == [Outcome.CANCELLED] * 3
    assert sender.sent == 3


HERE = ["--trace", "t", "--target", "http://127.0.0.1:1", "--concurrency", "8"]
LENGTHS = ["--input-tokens", "5", "--output-tokens", "2"]
REJECTED = {
    "a gate": ([*HERE, "--gate"], "--gate and --concurrency are mutually exclusive: a load that"),
    "virtual time": (["--trace", "t", "--emulate", "m", *HERE[4:]], "--emulate and --concurrency"),
    "a speed": ([*HERE, "--speed", "2"], "--speed and --concurrency"),
    "a rate scale": ([*HERE, "--rate-scale", "2"], "--rate-scale and --concurrency"),
    "a maximum rate": ([*HERE, "--max-rate", "2"], "--max-rate and --concurrency"),
    "a rate": ([*HERE[2:], *LENGTHS, "--rate", "5/s"], "--rate and --concurrency are mutually"),
    "no limit": ([*HERE[2:], *LENGTHS], "--limit is missing; a load needs --limit, --input-tokens"),
    "no client": ([*HERE[:4], "--concurrency", "0"], "'0' is not a number of clients"),
}


@pytest.mark.parametrize(("argv", "sentence"), REJECTED.values(), ids=REJECTED)
def test_options_about_times_or_a_verdict_are_rejected(argv: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_options(argv)
    assert sentence in str(caught.value)


async def replayed(out: Path, *arguments: object) -> tuple[int, str]:
    """Run a closed loop of three clients against a server with 20 ms a token."""
    answer = StandIn(answer=lambda n: [*tokens(n), finish(), usage(n), DONE], pause_s=0.02)
    async with running(answer) as url:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "goodput_core", "replay", "--target", url, "--no-report",
            "--concurrency", "3", "--out", str(out), *map(str, arguments),
            "--ttft", "5s", "--tpot", "5s", "--objective", "50%", stdout=PIPE, stderr=PIPE,
        )  # fmt: skip
        output, err = await child.communicate()
    assert child.returncode is not None
    return child.returncode, (output + err).decode()


async def test_a_closed_loop_is_labelled_and_gets_no_verdict(
    trace_of: WriteTrace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # An hour between the requests of the trace.
    rows = [
        replace(row, timestamp_start_unix_ns=i * 3600 * NS_PER_S)
        for i, row in enumerate(steady_rows(12, input_tokens=8, output_tokens=2))
    ]
    out = tmp_path / "run"
    code, output = await replayed(out, "--trace", trace_of(rows), "--warmup", 2)
    assert code == 0, output
    assert "closed loop of 3 clients: 10 requests over" in output
    assert "INCONCLUSIVE (ClosedLoop)" in output
    summary = read_summary(out)
    assert (summary.run.concurrency, summary.client.peak_in_flight) == (3, 3)
    assert (summary.verdict.kind, summary.verdict.reason) == (
        VerdictKind.INCONCLUSIVE,
        Reason.CLOSED_LOOP,
    )
    (one,) = summary.classes
    assert (one.good, one.total, one.verdict) == (10, 10, None)
    judged = [row.record for row in read_judged(out) if not row.warmup]
    assert summary.window.start_s * NS_PER_S == pytest.approx(
        min(r.scheduled_ns for r in judged), abs=1_000
    )
    end_s = summary.window.start_s + summary.window.length_s
    assert 0 <= end_s - max(r.end_ns or 0 for r in judged) / NS_PER_S < 5
    # The summary rounds the length of the window to a microsecond.
    assert summary.overall.served_per_s == pytest.approx(10 / summary.window.length_s, rel=1e-4)
    assert run_command(["replay", "gate", str(out)]) == 64
    assert "a closed loop gets no verdict" in capsys.readouterr().err


async def test_a_closed_loop_needs_no_trace(tmp_path: Path) -> None:
    code, output = await replayed(tmp_path / "run", *LENGTHS, "--limit", 7)
    assert code == 0, output
    summary = read_summary(tmp_path / "run")
    assert summary.overall.outcomes == {"ok": 7}
    assert summary.overall.output_tokens == 14
    assert summary.trace.synthetic
    assert "--limit 7 --input-tokens 5" in summary.trace.source

"""Limits of open connections are named before the run, and rows beyond them make it INVALID."""

from __future__ import annotations

import asyncio
import resource
import sys
from asyncio.subprocess import PIPE
from typing import TYPE_CHECKING

import pytest
from tests.builders.traces import steady_rows
from tests.replay.sending.stand_ins import StandIn, running, tokens

from goodput_core.slo.record import Outcome
from goodput_core.slo.verdict import Reason
from goodput_replay.plan import PlanStats
from goodput_replay.runs.record_rows import read_records
from goodput_replay.runs.summary import read_summary
from goodput_replay.sending.open_streams import count_ports, find_stream_limit

if TYPE_CHECKING:
    from pathlib import Path

    from tests.replay.sending.builders import WriteTrace


@pytest.mark.parametrize(
    ("rows", "peak", "files", "senders", "ports", "targets", "named"),
    [
        pytest.param(900, 500, 1024, 1, 28_232, 1, None, id="fewer rows than files"),
        pytest.param(50_000, 5, 1024, 1, 28_232, 1, None, id="only very long responses"),
        pytest.param(50_000, 100, 1024, 1, 28_232, 1, "responses of 9.6 s", id="few files"),
        pytest.param(50_000, 100, 1024, 4, 28_232, 1, "at most 3,840", id="four senders"),
        pytest.param(90_000, 1000, 10**6, 1, 28_232, 1, "28,232 ports", id="few ports"),
        pytest.param(90_000, 1000, 10**6, 1, 28_232, 3, None, id="three targets"),
        pytest.param(90_000, 1000, 10, 1, 28_232, 1, "at most 1 requests", id="hardly a file"),
    ],
)
def test_a_limit_that_common_responses_reach_is_named(
    rows: int, peak: int, files: int, senders: int, ports: int, targets: int, named: str | None
) -> None:
    found = find_stream_limit(
        PlanStats(own_rows=rows, peak_1s=peak),
        files=files, senders=senders, ports=ports, targets=targets,
    )  # fmt: skip
    assert found is None if named is None else named in (found or "")


def test_this_machine_has_ports() -> None:
    assert 1000 < count_ports() <= 65_536


async def test_streams_beyond_the_limit_of_files_are_unsent(
    trace_of: WriteTrace, tmp_path: Path
) -> None:
    trace = trace_of(steady_rows(120, per_s=120))

    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))

    async with running(StandIn(answer=lambda _: tokens(1), keeps_open=True)) as url:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "goodput_core", "replay", "--trace", str(trace), "--target", url,
            "--out", str(tmp_path / "run"), "--timeout", "3s", "--no-probe", "--ttft", "1s",
            "--tpot", "1s", "--objective", "90%",
            preexec_fn=limit_files, stdout=PIPE, stderr=PIPE,
        )  # fmt: skip
        _, err = await asyncio.wait_for(child.communicate(), 60)
    assert child.returncode == 3, err.decode()
    assert err.decode().startswith("at most 36 requests can be in flight, because a process may ")
    summary = read_summary(tmp_path / "run")
    assert summary.verdict.reason is Reason.UNSENT_ROWS
    records = list(read_records(tmp_path / "run"))
    assert len(records) == 120
    unsent = [record for record in records if record.outcome is Outcome.UNSENT]
    assert 20 <= len(unsent) == summary.validity.unsent_rows
    assert {r.detail for r in unsent} == {
        "this machine could not send the request: Too many open files"
    }

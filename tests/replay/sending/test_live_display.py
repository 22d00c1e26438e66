"""The live display of a run on a terminal."""

from __future__ import annotations

import io

from rich.console import Console
from tests.builders.records import finished_request

from goodput_core.slo.judging import judge
from goodput_core.slo.record import Outcome
from goodput_core.slo.targets import Targets
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_replay.sending.live_display import LiveCounts, RunProgress, display

TARGETS = Targets(ttft_ns=500 * NS_PER_MS)


async def test_the_panel_shows_progress_attainment_errors_and_send_lag() -> None:
    counts = LiveCounts(["chat", "batch"])
    for ttft_ms in (100, 100, 900):
        record = finished_request(ttft_ms=ttft_ms, lag_ms=2)
        counts.add(record, judge(record, TARGETS))
    failed = finished_request(outcome=Outcome.ERROR, detail="HTTP 500: boom")
    counts.add(failed, judge(failed, TARGETS))
    counts.add(failed, None)
    progress = RunProgress(
        elapsed_ns=2 * NS_PER_S,
        duration_ns=5 * NS_PER_S,
        planned=40,
        sent=7,
        in_flight=2,
        counts=counts,
    )
    console = Console(file=(sink := io.StringIO()), force_terminal=True, width=100)
    with display(lambda: progress, console):
        pass
    shown = sink.getvalue()
    assert "2 s, 3 s left" in shown
    assert "7 of 40, 2 in flight" in shown
    assert "50.00% (2 of 4)" in shown
    assert "ttft 1" in shown
    assert "2 × HTTP 500: boom" in shown
    assert "max 2 ms" in shown

"""The live display of a run on a terminal."""

from __future__ import annotations

import asyncio
import io

import pytest
from rich.console import Console
from tests.builders.http import PATIENCE_S
from tests.builders.records import finished_request

from goodput_core.slo.judging import judge
from goodput_core.slo.record import Outcome
from goodput_core.slo.targets import Targets
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_replay.sending import live_display
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


@pytest.mark.parametrize("terminal", [True, False], ids=["panel", "line"])
async def test_control_characters_are_escaped(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_display, "_LINE_EVERY_S", 0.0)
    counts = LiveCounts(["\x1b]0;class\x07"])
    counts.add(finished_request(outcome=Outcome.ERROR, detail="\x1b]0;error\x07"), None)
    progress = RunProgress(
        elapsed_ns=0, duration_ns=NS_PER_S, planned=1, sent=1, in_flight=0, counts=counts
    )
    console = Console(file=(sink := io.StringIO()), force_terminal=terminal, width=100)
    async with asyncio.timeout(PATIENCE_S):
        with display(lambda: progress, console):
            while not sink.getvalue():  # noqa: ASYNC110 - no event when a line was written
                await asyncio.sleep(0)
    shown = sink.getvalue()
    assert "\x1b]" not in shown
    assert "\x07" not in shown
    assert r"\x1b]0;error\x07" in shown
    assert (r"\x1b]0;class\x07" in shown) == terminal

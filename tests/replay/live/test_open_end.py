"""A live run whose end depends on the responses: causal sessions, or a closed loop."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from benchmarks.replayer_lateness import mock_server
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.builders.pages import opened
from tests.builders.records import finished_request
from tests.builders.sessions import session_row
from tests.builders.traces import write_rows
from tests.replay.conftest import SLO
from tests.replay.live.builders import make_progress, make_window

from goodput_core.units import NS_PER_S
from goodput_replay.live.page import LivePage
from goodput_replay.live.tally import LiveTally, LiveWindow, RunProgress
from goodput_replay.live.terminal import TerminalView
from goodput_traces.format.schema import Clock

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser
    from tests.replay.conftest import SyntheticRun

OPEN = LiveWindow(slo=SLO, start_ns=0, length_ns=None, confidence=0.95)
CLOSED = replace(OPEN, closed_loop=True)


def _progress(elapsed_s: float, *, sent: int, planned: int, in_flight: int = 0) -> RunProgress:
    return RunProgress(
        elapsed_ns=round(elapsed_s * NS_PER_S),
        duration_ns=None,
        planned=planned,
        sent=sent,
        in_flight=in_flight,
    )


@given(
    scheduled_s=st.lists(st.floats(0, 20_000), min_size=1, max_size=40),
    extra_s=st.floats(0, 40_000),
    window=st.sampled_from([OPEN, CLOSED]),
)
def test_every_request_is_in_one_interval_however_long_the_run_becomes(
    scheduled_s: list[float], extra_s: float, window: LiveWindow
) -> None:
    tally = LiveTally(window)
    in_flight = 0
    for number, at_s in enumerate(scheduled_s):
        record = finished_request(
            scheduled_ns=round(at_s * NS_PER_S), ttft_ms=100 + 500 * (number % 2), lag_ms=1
        )
        tally.add(replace(record, slo_class="interactive"))
        in_flight = max(in_flight, number)
        tally.sample(_progress(at_s, sent=number + 1, planned=99, in_flight=number))
    progress = _progress(max(scheduled_s) + 1 + extra_s, sent=len(scheduled_s), planned=99)
    timeline = tally.timeline(progress)
    count = len(scheduled_s)
    assert timeline.offered.sum() == timeline.served.sum() == count
    assert timeline.judged.sum() == count
    assert timeline.good.sum() + sum(int(m.sum()) for m in timeline.misses.values()) == count
    assert timeline.in_flight.max() == in_flight
    assert timeline.edges_s[0] == 0
    assert timeline.edges_s[-1] == pytest.approx(progress.elapsed_ns / NS_PER_S)
    assert len(timeline.widths_s) <= 120
    assert len(timeline.widths_s) == 1 or 0.5 <= timeline.widths_s[-1] / timeline.widths_s[0] <= 1.5
    assert np.isfinite(timeline.lag_max_ms).sum() == np.count_nonzero(timeline.offered)
    for at_s in scheduled_s:
        interval = int(np.searchsorted(timeline.edges_s, at_s, side="right")) - 1
        assert timeline.offered[min(interval, len(timeline.offered) - 1)] > 0


def test_a_run_with_an_open_end_has_the_evidence_of_one_that_was_planned_to_end_now(
    synthetic_run: SyntheticRun,
) -> None:
    tallies = [LiveTally(make_window(synthetic_run)), LiveTally(OPEN)]
    found = []
    for tally in tallies:
        for record in synthetic_run.records:
            if record.end_ns is not None and record.end_ns < 200 * NS_PER_S:
                tally.add(record)
        found.append(tally.so_far(make_progress(synthetic_run, 200)))
    assert found[0].evidence == found[1].evidence
    assert found[0].verdict == found[1].verdict


def test_the_window_of_causal_sessions_ends_with_the_last_send() -> None:
    for window, seconds in ((OPEN, 60), (CLOSED, 100)):
        tally = LiveTally(window)
        for at_s in (10, 60, 100):
            tally.sample(_progress(at_s, sent=5 if at_s >= 60 else 4, planned=5, in_flight=1))
        last = _progress(100, sent=5, planned=5, in_flight=1)
        assert tally.so_far(last).evidence.window_ns == seconds * NS_PER_S


@pytest.mark.parametrize("terminal", [True, False], ids=["panel", "line"])
def test_the_terminal_shows_requests_done_and_that_a_closed_loop_gets_no_verdict(
    terminal: bool,
) -> None:
    tally = LiveTally(CLOSED)
    tally.add(replace(finished_request(lag_ms=1), slo_class="interactive"))
    console = Console(
        file=(sink := io.StringIO()), force_terminal=terminal, color_system=None, width=100
    )
    with TerminalView(console) as view:
        view.draw(tally.so_far(_progress(70, sent=12, planned=40, in_flight=3)))
    shown = sink.getvalue()
    assert "done 9, sent 12 of 40, 3 in flight" in shown
    assert "no verdict" in shown
    assert "left" not in shown
    assert "so far" not in shown


def test_the_page_has_an_axis_until_now_and_its_progress_in_requests(
    synthetic_run: SyntheticRun,
) -> None:
    tally = LiveTally(OPEN)
    for record in synthetic_run.records[:300]:
        tally.add(record)
    progress = _progress(90.4, sent=310, planned=1000, in_flight=10)
    page = LivePage(tally, synthetic_run.info, lambda: progress)
    html = page.render()
    update = msgspec.json.decode(page.update())
    assert '<progress max="1000" value="300"' in html
    assert "300 of 1,000 requests done" in html
    assert "requests over 5 min" not in html, "the length of the plan is not that of the run"
    assert {f["end"] for f in update["data"]["figures"] if f["axis"] == "time"} == {91}


SLO_FILE = """
slo:
  classes:
    - {name: interactive, ttftMs: 5000, tpotMs: 500, objective: "90%"}
  default: interactive
"""


LIVE = r"""(verdict) => {
    const text = (selector) => document.querySelector(selector)?.innerText ?? "";
    const progress = /\d+ of (96|90) requests done after .*:\s+\d+ sent, \d+ in flight/;
    return progress.test(text("#progress"))
        && /[1-9]\d* of [1-9]\d* requests met every target/.test(text("#classes .card"))
        && text("#verdict").includes(verdict)
        && document.querySelectorAll("figure .uplot canvas").length >= 6;
}"""


@pytest.mark.slow
@pytest.mark.parametrize("closed_loop", [False, True], ids=["causal sessions", "closed loop"])
def test_the_live_page_of_a_run_with_an_open_end_turns_into_its_report(
    browser: Browser, tmp_path: Path, closed_loop: bool
) -> None:
    rows = [
        session_row(8 * turn + s, 100_000 * turn + 50 * s, f"s{s}", delay_ms=400)
        for turn in range(1 if closed_loop else 12)
        for s in range(8)
    ]
    trace = write_rows(tmp_path / "trace.parquet", rows, Clock.TRACE_RELATIVE)
    (tmp_path / "slo.yaml").write_text(SLO_FILE)
    load = ["--trace", str(trace), "--sessions", "causal"]
    if closed_loop:
        load = ["--concurrency", "2", "--limit", "90", "--input-tokens", "9"]
        load += ["--output-tokens", "9"]
    with (
        mock_server(tmp_path / "arrivals.csv") as target,
        subprocess.Popen(
            [
                *(sys.executable, "-m", "goodput_core", "replay", *load, "--target", target),
                *("--slo", str(tmp_path / "slo.yaml"), "--no-probe", "--length-pinning", "none"),
                *("--out", str(tmp_path / "run"), "--ui"),
            ],
            stderr=subprocess.PIPE,
            text=True,
        ) as child,
    ):
        assert child.stderr is not None
        line = child.stderr.readline()
        while not line.startswith("live page: "):
            line = child.stderr.readline()
        try:
            with opened(browser, line.split()[-1]) as page:
                # One look at the page, because the run goes on meanwhile.
                page.wait_for_function(
                    LIVE, arg="gets no verdict" if closed_loop else "so far", timeout=30_000
                )
                page.wait_for_url("**/report", timeout=60_000)
                assert page.locator("#slowest table").is_visible()
                verdict = page.locator("#verdict").inner_text()
                late = "ClientLag" in verdict
                assert late or ("gets no verdict" in verdict) == closed_loop
            assert child.wait(timeout=30) in {0, 3}  # a busy test machine can be late
        finally:
            child.kill()

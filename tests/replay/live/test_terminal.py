"""The live display of a run on a terminal."""

from __future__ import annotations

import io
from dataclasses import replace
from fractions import Fraction

import pytest
from rich.console import Console
from tests.builders.records import finished_request

from goodput_core.slo.record import Outcome
from goodput_core.slo.targets import SLOClass
from goodput_core.units import NS_PER_S
from goodput_replay.live.tally import LiveTally, LiveWindow, RunProgress
from goodput_replay.live.terminal import TerminalView
from goodput_replay.runs.slo import SLOClasses

PROGRESS = RunProgress(
    elapsed_ns=2 * NS_PER_S, duration_ns=5 * NS_PER_S, planned=40, sent=7, in_flight=2
)


def _tally(*classes: SLOClass) -> LiveTally:
    slo = SLOClasses(classes=classes, default=classes[0].name)
    return LiveTally(LiveWindow(slo=slo, start_ns=0, length_ns=10**10, confidence=0.95))


def _draw(tally: LiveTally, *, terminal: bool) -> str:
    console = Console(
        file=(sink := io.StringIO()), force_terminal=terminal, color_system=None, width=100
    )
    with TerminalView(console) as view:
        view.draw(tally.so_far(PROGRESS))
    return sink.getvalue()


def test_the_panel_shows_the_essentials_of_the_live_page() -> None:
    chat = SLOClass(name="chat", ttft_ms=500, tpot_ms=1000, objective=Fraction("0.99"))
    tally = _tally(chat, SLOClass(name="batch", ttft_ms=1, tpot_ms=1))
    for ttft_ms in (100, 100, 900):
        tally.add(replace(finished_request(ttft_ms=ttft_ms, lag_ms=2), slo_class="chat"))
    failed = replace(
        finished_request(outcome=Outcome.ERROR, detail="HTTP 500: boom"), slo_class="chat"
    )
    tally.add(failed)
    tally.add(failed, warmup=True)
    shown = _draw(tally, terminal=True)
    for expected in (
        "2 s, 3 s left",
        "7 of 40, 2 in flight",
        "1/s",
        "50.00% (2 of 4), between",
        "TTFT p50 10",
        "ttft 1, error 1",
        "2 × HTTP 500: boom",
        "of 25 ms allowed, max 2 ms",
        "FAIL (BelowObjective) chat:",
    ):
        assert expected in shown, expected


def test_the_line_has_the_goodput_and_the_reason_of_the_verdict() -> None:
    tally = _tally(SLOClass(name="chat", ttft_ms=500, tpot_ms=50, objective=Fraction("0.99")))
    tally.add(replace(finished_request(ttft_ms=100), slo_class="chat"))
    shown = _draw(tally, terminal=False)
    assert "2 in flight, goodput 0.5/s, attained 100.00% (1 of 1)" in shown
    assert shown.endswith("so far INCONCLUSIVE (TooFewBlocks: 2 of 20 s)\n")


@pytest.mark.parametrize("terminal", [True, False], ids=["panel", "line"])
def test_control_characters_are_escaped(terminal: bool) -> None:
    name = "\x1b]0;class\x07"
    tally = _tally(SLOClass(name=name, ttft_ms=500, tpot_ms=50))
    failed = finished_request(outcome=Outcome.ERROR, detail="\x1b]0;error\x07")
    tally.add(replace(failed, slo_class=name))
    shown = _draw(tally, terminal=terminal)
    assert "\x1b]" not in shown
    assert "\x07" not in shown
    assert r"\x1b]0;error\x07" in shown
    assert (r"\x1b]0;class\x07" in shown) == terminal


@pytest.mark.parametrize(
    ("terminal", "expected_s"),
    [(True, [-0.25, 0.75, 1.75, 2.75]), (False, [10, 20])],
    ids=["panel", "line"],
)
def test_a_panel_is_drawn_at_once_and_a_line_every_ten_seconds(
    terminal: bool, expected_s: list[float]
) -> None:
    view = TerminalView(Console(file=io.StringIO(), force_terminal=terminal))
    quarters = range(-1, 4 * 21)
    due_s = [
        at / 4 for at in quarters if view.is_due(replace(PROGRESS, elapsed_ns=at * NS_PER_S // 4))
    ]
    assert due_s[: len(expected_s)] == expected_s
    assert terminal or len(due_s) == len(expected_s)

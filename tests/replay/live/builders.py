"""The synthetic run as a live run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_core.units import NS_PER_S
from goodput_replay.live.tally import LiveTally, LiveWindow, RunProgress

if TYPE_CHECKING:
    from tests.replay.conftest import SyntheticRun


def make_window(run: SyntheticRun) -> LiveWindow:
    return LiveWindow(
        slo=run.info.slo,
        start_ns=run.info.window_start_ns,
        length_ns=run.info.window_ns,
        confidence=run.info.confidence,
    )


def make_progress(run: SyntheticRun, elapsed_s: float = 300, in_flight: int = 0) -> RunProgress:
    sent = sum(r.scheduled_ns <= elapsed_s * NS_PER_S for r in run.records)
    return RunProgress(
        elapsed_ns=round(elapsed_s * NS_PER_S),
        duration_ns=run.info.window_ns,
        planned=len(run.records),
        sent=sent,
        in_flight=in_flight,
    )


def make_tally(run: SyntheticRun) -> LiveTally:
    """Count the complete run."""
    tally = LiveTally(make_window(run))
    for record in run.warmup:
        tally.add(record, warmup=True)
    for record in run.records:
        tally.add(record)
    return tally

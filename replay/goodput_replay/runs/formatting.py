"""Formats of numbers, shared by the terminal and the report."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from goodput_replay.runs.summary import EmulationSummary, RunSummary, WindowSummary
    from goodput_replay.runs.summary_parts import SessionsSummary

__all__ = [
    "describe_emulation",
    "describe_sessions",
    "describe_warmup",
    "format_confidence",
    "format_count",
    "format_ms",
    "format_percent",
    "format_rate",
    "format_seconds",
    "session_mode",
]


def format_count(value: int) -> str:
    """Format a count as `12,031`."""
    return f"{value:,}"


def format_percent(share: float | None) -> str:
    """Truncate to two decimals, so that a missed objective never looks met; `–` for None."""
    if share is None:
        return "–"
    # Shares of a summary have six decimals; rounding restores them before truncation.
    return f"{math.floor(round(share * 1_000_000) / 100) / 100:.2f}%"


def format_confidence(share: float) -> str:
    """Format a confidence as `95%` or `99.9%`."""
    return f"{share * 100:.6g}%"


def format_ms(value: float | None) -> str:
    """Format as `49.98 ms` with four digits, or as seconds if 10 s or more; `–` for None."""
    if value is None:
        return "–"
    if value >= 10_000:
        return f"{value / 1000:,.2f}".removesuffix("0").removesuffix(".0") + " s"
    return f"{value:,.0f} ms" if value >= 1000 else f"{value:.4g} ms"


def format_rate(per_s: float) -> str:
    """Format a rate as `8.48/s`."""
    return f"{per_s:,.1f}/s" if per_s >= 100 else f"{per_s:.3g}/s"


def format_seconds(seconds: float) -> str:
    """Format a duration as `45 s`, `5 min` or `1 h 10 min`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def describe_emulation(fleet: EmulationSummary) -> str:
    """Describe the emulated fleet in one sentence."""
    replicas = f"{format_count(fleet.replicas)} replica{'' if fleet.replicas == 1 else 's'}"
    if fleet.peak_replicas and {fleet.peak_replicas, fleet.final_replicas} != {fleet.replicas}:
        replicas += f" at first, {fleet.peak_replicas} at most, {fleet.final_replicas} at the end,"
    replicas += f" ({fleet.topology})" if fleet.topology else ""
    figures = ", whose figures are illustrative" if fleet.illustrative else ""
    policy = (
        "shortest first by an oracle (an upper bound)" if fleet.oracle else f"policy {fleet.policy}"
    )
    return (
        f"Emulated in virtual time, not measured: {replicas} on device profile "
        f"{fleet.device}{figures}; {policy}, {fleet.preemption} on preemption, token "
        f"budget {format_count(fleet.token_budget)}, {fleet.placement} placement."
    )


def session_mode(run: RunSummary) -> str:
    """Return the value of `--sessions` of a run."""
    return "independent" if run.sessions is None else "causal"


def describe_sessions(sessions: SessionsSummary) -> str:
    """Describe the order of requests and the source of think times in one sentence."""
    think = (
        ("recorded", sessions.think_recorded),
        ("from the recorded end of that request", sessions.think_from_ends),
        ("from both arrivals, because its duration is unknown", sessions.think_from_arrivals),
    )
    sources = ", ".join(f"{format_count(count)} {source}" for source, count in think if count)
    text = (
        f"{format_count(sessions.starts)} requests start at their times in the trace, "
        f"{format_count(sessions.follow_ups)} follow the end of an earlier request; think times: "
        f"{sources}"
    )
    if sessions.overlapping:
        text += f"; {format_count(sessions.overlapping)} overlapped that request in the trace"
    if sessions.without_parent:
        text += f"; {format_count(sessions.without_parent)} have a parent that is not in the plan"
    return text


def describe_warmup(window: WindowSummary) -> str:
    """Describe the failed requests of the warm-up as a clause; empty if none failed."""
    if not window.warmup_failed:
        return ""
    failed, rows = format_count(window.warmup_failed), format_count(window.warmup_rows)
    return (
        f"{failed} of {rows} requests failed, most often with {window.warmup_error!r}, so the "
        "service was not warmed up as intended"
    )

"""What `--dry-run` says: what would be sent, as a table or as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from rich.table import Table

from goodput_core.units import NS_PER_S, format_duration

if TYPE_CHECKING:
    from rich.console import Console

    from goodput_replay.plan import Plan, PlanStats

__all__ = ["print_plan"]


def print_plan(plan: Plan, stats: PlanStats, console: Console, *, json: bool) -> None:
    """Print a plan.

    Args:
        plan: what would be sent.
        stats: what it amounts to.
        console: on stdout.
        json: as one JSON object instead of a table.
    """
    facts = _facts(plan, stats)
    if json:
        text = msgspec.json.format(msgspec.json.encode(facts), indent=2)
        console.print(text.decode(), soft_wrap=True, highlight=False, markup=False)
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    for name, value in _rows(facts):
        table.add_row(name, value)
    console.print(table)


def _facts(plan: Plan, stats: PlanStats) -> dict[str, Any]:
    window_ns = plan.window_ns(stats)
    return {
        "trace": str(plan.trace.path),
        "requests": stats.rows,
        "warmup_requests": stats.warmup_rows,
        "duration_s": window_ns / NS_PER_S,
        "requests_per_s": round(stats.rows * NS_PER_S / window_ns, 6),
        "peak_requests_in_1s": stats.peak_1s,
        "peak_at_s": stats.peak_at_ns / NS_PER_S,
        "input_tokens": stats.input_tokens,
        "max_input_tokens": stats.max_input_tokens,
        "output_tokens": stats.output_tokens,
        "max_output_tokens": stats.max_output_tokens,
        "classes": dict(stats.classes),
        "models": dict(stats.models),
        "requests_with_shared_prefixes": stats.rows_with_hashes,
        "requests_with_own_targets": stats.rows_with_targets,
        "requests_cancelled_by_trace": stats.cancelled_rows,
    }


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    duration = format_duration(round(facts["duration_s"] * NS_PER_S))
    peak_at = format_duration(round(facts["peak_at_s"] * NS_PER_S))
    warmup = f", the first {facts['warmup_requests']:,} not judged"
    rows = [
        ("requests", f"{facts['requests']:,}{warmup if facts['warmup_requests'] else ''}"),
        ("duration", duration),
        ("rate", f"{facts['requests_per_s']:.4g} a second"),
        ("busiest second", f"{facts['peak_requests_in_1s']:,} requests, after {peak_at}"),
        ("input tokens", f"{facts['input_tokens']:,}, at most {facts['max_input_tokens']:,}"),
        ("output tokens", f"{facts['output_tokens']:,}, at most {facts['max_output_tokens']:,}"),
        ("classes", _counts(facts["classes"])),
    ]
    if any(facts["models"]):
        rows.append(("models", _counts(facts["models"])))
    for name, key in (
        ("shared prefixes", "requests_with_shared_prefixes"),
        ("own targets", "requests_with_own_targets"),
        ("cancelled", "requests_cancelled_by_trace"),
    ):
        if facts[key]:
            rows.append((name, f"{facts[key]:,} requests"))
    return rows


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name or 'none'} {count:,}" for name, count in counts.items())

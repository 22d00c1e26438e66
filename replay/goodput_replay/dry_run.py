"""The plan of `--dry-run`, as a table or as a JSON object."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from goodput_core.text import printable
from goodput_core.units import NS_PER_S, format_duration
from goodput_replay.runs.formatting import describe_sessions
from goodput_replay.runs.json_results import encode_json
from goodput_replay.runs.summary_builder import summarise_targets

if TYPE_CHECKING:
    from goodput_replay.options import ReplayOptions
    from goodput_replay.plan import PlanStats, RequestPlan
    from goodput_replay.sessions import FollowUps

__all__ = ["print_plan"]


def print_plan(
    options: ReplayOptions, plan: RequestPlan, stats: PlanStats, follow_ups: FollowUps | None
) -> None:
    """Print the plan of `--dry-run`, as a table or as a JSON object."""
    console = Console()
    source = str(plan.trace.path) if options.load is None else options.load.description
    totals = {"trace": source, **_plan_totals(plan, stats)}
    if follow_ups is not None:
        totals["sessions"] = follow_ups.summary
    if options.json:
        sys.stdout.write(encode_json(totals).decode())
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in _plan_rows(totals):
        table.add_row(name, Text(value))
    console.print(table)


def _plan_totals(plan: RequestPlan, stats: PlanStats) -> dict[str, Any]:
    window_ns = plan.window_ns(stats)
    return {
        "requests": stats.rows,
        **({"requests_of_shard": stats.own_rows} if stats.own_rows < stats.rows else {}),
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
        "promises": [msgspec.to_builtins(summarise_targets(slo)) for slo in plan.slo.classes],
        "models": dict(stats.models),
        "requests_with_shared_prefixes": stats.rows_with_hashes,
        "requests_with_own_targets": stats.rows_with_targets,
        "requests_cancelled_by_trace": stats.cancelled_rows,
    }


def _plan_rows(totals: dict[str, Any]) -> list[tuple[str, str]]:
    duration = format_duration(round(totals["duration_s"] * NS_PER_S))
    peak_at = format_duration(round(totals["peak_at_s"] * NS_PER_S))
    warmup = f", the first {totals['warmup_requests']:,} not judged"
    rows = [
        ("requests", f"{totals['requests']:,}{warmup if totals['warmup_requests'] else ''}"),
        ("duration", duration),
        ("rate", f"{totals['requests_per_s']:.4g} a second"),
        ("busiest second", f"{totals['peak_requests_in_1s']:,} requests, after {peak_at}"),
        ("input tokens", f"{totals['input_tokens']:,}, at most {totals['max_input_tokens']:,}"),
        ("output tokens", f"{totals['output_tokens']:,}, at most {totals['max_output_tokens']:,}"),
        ("classes", _format_counts(totals["classes"])),
    ]
    if "sessions" in totals:
        rows.append(("sessions", describe_sessions(totals["sessions"])))
    if any(totals["models"]):
        rows.append(("models", _format_counts(totals["models"])))
    optional = {
        "of this shard": totals.get("requests_of_shard", 0),
        "prefix hashes": totals["requests_with_shared_prefixes"],
        "own targets": totals["requests_with_own_targets"],
        "cancelled": totals["requests_cancelled_by_trace"],
    }
    return rows + [(name, f"{count:,} requests") for name, count in optional.items() if count]


def _format_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{printable(name) or 'none'} {count:,}" for name, count in counts.items())

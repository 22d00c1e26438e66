"""A comparison as tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from goodput_core.text import printable
from goodput_replay.compare.outputs import difference_cells
from goodput_replay.runs.formatting import (
    format_confidence,
    format_count,
    format_ms,
    format_percent,
    format_rate,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from goodput_replay.compare.comparison import (
        ClassComparison,
        ComparisonResult,
        Flip,
        LatencyComparison,
        RunComparison,
    )

__all__ = ["print_comparisons"]

_SHOWN_FLIPS: Final = 10


def print_comparisons(result: ComparisonResult, console: Console) -> None:
    """Print every comparison; plain text if the console is not a terminal."""
    for comparison in result.comparisons:
        _print_comparison(comparison, console)
    console.print(
        Text(
            f"Each bound has {format_confidence(result.confidence)} confidence. Differences of "
            f"attainment are in percentage points. {result.note}"
        )
    )


def _print_comparison(comparison: RunComparison, console: Console) -> None:
    heading = f"{comparison.candidate} against {comparison.baseline}"
    console.print(Text(printable(heading), style="bold"))
    if comparison.paired:
        matched = sum(one.matched for one in comparison.classes)
        text = f"paired by request id: {format_count(matched)} requests"
        if comparison.dropped:
            text += f", {format_count(comparison.dropped)} not judged in both runs"
    else:
        text = f"unpaired, because {comparison.unpaired_because}"
    console.print(Text(printable(text)))
    for reason in comparison.invalid:
        console.print(Text.assemble(("INVALID ", "bold magenta"), printable(reason)))
    for rejection in comparison.rejections:
        console.print(Text(f"note: {printable(rejection)}"))
    console.print(_attainment(comparison))
    console.print(_latencies(comparison))
    if comparison.flips:
        console.print(_flips(comparison))
        rest = len(comparison.flips) - _SHOWN_FLIPS + comparison.other_flips
        if rest > 0:
            console.print(Text(f"and {format_count(rest)} more changed requests; see --json"))


def _attainment(comparison: RunComparison) -> Table:
    headers = ["class", "baseline", "candidate", "difference", "bounds", "goodput"]
    if comparison.paired:
        headers += ["gained", "lost", "lost because of"]
    return _table(
        "attainment", headers, [_attainment_row(comparison, c) for c in comparison.classes]
    )


def _attainment_row(comparison: RunComparison, one: ClassComparison) -> list[str]:
    row = [
        one.name or "–",
        format_percent(one.baseline_attainment),
        format_percent(one.candidate_attainment),
        *difference_cells(one),
        f"{format_rate(one.baseline_goodput_per_s)} → {format_rate(one.candidate_goodput_per_s)}",
    ]
    if comparison.paired:
        reasons = ", ".join(f"{reason} {n:,}" for reason, n in one.lost_by_reason.items())
        row += [format_count(one.gained), format_count(one.lost), reasons or "–"]
    return row


def _latencies(comparison: RunComparison) -> Table:
    rows = [
        [
            one.name or "–",
            f"{latency.metric.upper()} {latency.quantile}",
            format_ms(latency.baseline_ms),
            format_ms(latency.candidate_ms),
            _signed_ms(latency.candidate_ms - latency.baseline_ms),
            _format_bounds(latency),
            "●" if _differs(latency) else "",
        ]
        for one in comparison.classes
        for latency in one.latencies
    ]
    headers = ["class", "latency", "baseline", "candidate", "difference", "bounds", "differs"]
    return _table("latency", headers, rows)


def _flips(comparison: RunComparison) -> Table:
    headers = ["at", "class", "request", "tokens", "changed", "TTFT", "TPOT"]
    rows = [_flip_row(flip) for flip in comparison.flips[:_SHOWN_FLIPS]]
    return _table("changed requests", headers, rows)


def _flip_row(flip: Flip) -> list[str]:
    return [
        f"{flip.at_s:.1f} s",
        flip.slo_class or "–",
        flip.request_id,
        f"{format_count(flip.input_tokens)} → {format_count(flip.output_tokens)}",
        f"{'lost' if flip.lost else 'gained'}: {', '.join(flip.reasons)}"
        + (f" ({flip.detail})" if flip.detail else ""),
        _change(flip.baseline_ttft_ms, flip.candidate_ttft_ms),
        _change(flip.baseline_tpot_ms, flip.candidate_tpot_ms),
    ]


def _table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for number, header in enumerate(headers):
        table.add_column(header, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def _format_bounds(latency: LatencyComparison) -> str:
    if latency.bounds_ms is None:
        return "too few requests"
    low, high = latency.bounds_ms
    return f"{_signed_ms(low)} … {_signed_ms(high)}"


def _differs(latency: LatencyComparison) -> bool:
    return latency.bounds_ms is not None and not (latency.bounds_ms[0] <= 0 <= latency.bounds_ms[1])


def _change(before: float | None, after: float | None) -> str:
    first, second = format_ms(before), format_ms(after)
    unit = second[-3:]
    return f"{first.removesuffix(unit) if unit == ' ms' else first} → {second}"


def _signed_ms(ms: float) -> str:
    return f"{'−' if ms < 0 else '+'}{format_ms(abs(ms))}"

"""Show a description as tables and charts in the terminal, or as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table
from rich.text import Text

from goodput_core.text import printable
from goodput_core.units import NS_PER_S, format_duration
from goodput_traces.format.schema import Clock, HashSemantics

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from goodput_traces.describe.counters import Arrivals, LengthSummary
    from goodput_traces.describe.description import TraceDescription

__all__ = ["print_description", "to_json"]

_LEVELS: Final = " ▁▂▃▄▅▆▇█"
_CHART_ROWS: Final = 5
_CHART_LABEL: Final = 10
_BAR: Final = 40
_BAR_LABEL: Final = 25
_HASHES: Final = {
    HashSemantics.NONE: "none",
    HashSemantics.FULL_BLOCKS: "full blocks only",
    HashSemantics.LAST_PARTIAL: "the last block may be partial",
    HashSemantics.UNSPECIFIED: "not stated",
}


def to_json(path: Path, description: TraceDescription) -> dict[str, Any]:
    """Return the description as JSON values: times in nanoseconds, shares from 0 to 1."""
    values = asdict(description)
    metadata = values["metadata"]
    metadata["clock"] = description.metadata.clock.value
    metadata["hash_semantics"] = description.metadata.hash_semantics.value
    values["prefixes"]["reused"] = description.prefixes.reused
    values["classes"] = dict(description.classes)
    return {"trace": str(path), **values}


def print_description(console: Console, title: str, description: TraceDescription) -> None:
    """Print the description as tables and histograms that fit the console's width."""
    console.print(_facts_table(title, description))
    console.print(_length_table(description))
    if description.arrivals is not None:
        console.print(_draw_arrivals(description.arrivals, console.width))
    console.print(_draw_lengths("prompt tokens", description.prompt, console.width))
    console.print(_draw_lengths("output tokens", description.output, console.width))


def _facts_table(title: str, description: TraceDescription) -> Table:
    table = Table(title=Text(printable(title)), title_justify="left", show_header=False, box=None)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    metadata = description.metadata
    table.add_row("source", Text(printable(metadata.source) or "not stated"))
    table.add_row("licence", Text(printable(metadata.licence) or "not stated"))
    tick = format_duration(metadata.timestamp_resolution_ns)
    if metadata.timestamp_resolution_ns < 1000:
        tick = f"{metadata.timestamp_resolution_ns} ns"
    table.add_row("clock", f"{metadata.clock.value}, ticks of {tick}")
    table.add_row("rows", f"{description.rows:,}")
    if description.arrivals is not None:
        _add_arrival_facts(table, description.arrivals)
    else:
        assert metadata.clock is Clock.SESSION_RELATIVE
        table.add_row("arrivals", "each session has its own clock: no common rate, no replay")
    about = "" if description.sessions_exact else "about "
    table.add_row(
        "sessions",
        f"{about}{description.sessions:,} with {description.session_rows:,} rows"
        if description.sessions
        else "none",
    )
    table.add_row("prefix reuse", _describe_reuse(description))
    if description.floored_output_rows:
        table.add_row("zero outputs", f"{description.floored_output_rows:,} rows, read as 1 token")
    classes = ", ".join(f"{name or '(none)'} {rows:,}" for name, rows in description.classes[:20])
    table.add_row("classes", Text(printable(classes)))
    return table


def _format_start(start_ns: int) -> str:
    return f"{format_duration(start_ns)} after the first arrival" if start_ns else "at the start"


def _add_arrival_facts(table: Table, arrivals: Arrivals) -> None:
    table.add_row("span", format_duration(arrivals.span_ns))
    rate = arrivals.mean_rate_per_s
    table.add_row("mean rate", "all at once" if rate is None else f"{rate:.3g} req/s")
    table.add_row(
        "peak second",
        f"{arrivals.peak_1s:,} requests, {_format_start(arrivals.peak_1s_start_ns)}",
    )
    table.add_row(
        "peak minute",
        f"{arrivals.peak_60s:,} requests ({arrivals.peak_60s / 60:.3g} req/s), "
        f"{_format_start(arrivals.peak_60s_start_ns)}",
    )
    if arrivals.longest_gap_ns:
        table.add_row(
            "longest gap",
            f"{format_duration(arrivals.longest_gap_ns)} without arrivals, "
            f"{_format_start(arrivals.longest_gap_start_ns)}",
        )
    if arrivals.gap_cv is not None:
        cv = arrivals.gap_cv
        kind = "burstier than" if cv > 1.2 else "more even than" if cv < 0.8 else "close to"
        table.add_row("burstiness", f"CV of gaps {cv:.2f}, {kind} a Poisson process (1)")
    if arrivals.tied_rows:
        table.add_row(
            "ties",
            f"{arrivals.tied_rows:,} rows share their arrival time with another, "
            f"{arrivals.distinct_instants:,} distinct arrival times, "
            f"at most {arrivals.largest_tie:,} rows at once",
        )
    else:
        table.add_row("ties", "none")


def _describe_reuse(description: TraceDescription) -> str:
    prefixes = description.prefixes
    if prefixes.reused is None:
        return "no hashes"
    sizes = ", ".join(map(str, prefixes.block_sizes))
    about = "" if prefixes.exact else "about "
    return (
        f"{about}{prefixes.reused:.1%} of {prefixes.blocks:,} blocks of {sizes} tokens seen "
        f"before (hashes: {_HASHES[description.metadata.hash_semantics]})"
    )


def _length_table(description: TraceDescription) -> Table:
    table = Table(title="tokens per request", title_justify="left")
    table.add_column("", no_wrap=True)
    for name in ("p50", "p90", "p99", "max", "total"):
        table.add_column(name, justify="right", overflow="fold")
    for name, lengths in (("prompt", description.prompt), ("output", description.output)):
        table.add_row(
            name,
            *(f"{n:,}" for n in (lengths.p50, lengths.p90, lengths.p99, lengths.max)),
            f"{lengths.total:,}",
        )
    return table


def _draw_arrivals(arrivals: Arrivals, width: int) -> Text:
    """Draw arrivals over time: a column of block characters for each equal part of the span."""
    counts = list(arrivals.histogram)
    if len(counts) + _CHART_LABEL > width:  # two parts per column
        counts = [sum(counts[at : at + 2]) for at in range(0, len(counts), 2)]
    max_count = max(counts)
    eighths = [round(count / max_count * _CHART_ROWS * 8) for count in counts]
    part_ns = arrivals.span_ns // len(counts) + 1
    label = f"{max_count / (part_ns / NS_PER_S):.3g}/s" if arrivals.span_ns else f"{max_count:,}"
    lines = [f"arrivals over time, each column {format_duration(part_ns)}"]
    for row in reversed(range(_CHART_ROWS)):
        cells = "".join(_LEVELS[min(8, max(0, height - 8 * row))] for height in eighths)
        lines.append(f"{label if row == _CHART_ROWS - 1 else '':>8} │{cells}")
    end = format_duration(arrivals.span_ns)
    lines.append(f"{'':>8} └{'0':<{max(1, len(eighths) - len(end))}}{end}")
    return Text("\n".join(lines) + "\n", no_wrap=True)


def _draw_lengths(title: str, lengths: LengthSummary, width: int) -> Text:
    max_rows = max(rows for _, _, rows in lengths.histogram)
    bar_cells = max(8, min(_BAR, width - _BAR_LABEL - len(f"{max_rows:,}")))
    lines = [title]
    for low, high, rows in lengths.histogram:
        label = f"{low:,}" if low == high else f"{low:,} – {high:,}"
        full, eighth = divmod(round(rows / max_rows * bar_cells * 8), 8)
        # Bars end on full or half cells; a count above zero has at least half a cell.
        bar = "█" * full + ("▌" if eighth >= 4 or (rows and not full) else "")
        lines.append(f"{label:>21} │{bar} {rows:,}")
    return Text("\n".join(lines) + "\n", no_wrap=True)

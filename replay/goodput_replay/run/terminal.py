"""A run's summary on a terminal: attainment, latencies, misses, errors, validity, verdict.

Tables keep class names at 60 columns: other columns are dropped or folded first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from rich.box import SIMPLE_HEAD
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from goodput_core.slo.judging import MissReason
from goodput_core.slo.verdict import VerdictKind
from goodput_replay.run.files import REPORT_FILE
from goodput_replay.run.formatting import (
    count_words,
    duration_words,
    emulation_words,
    ms_words,
    percent_words,
    rate_words,
)
from goodput_replay.run.summary import LengthPinning

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from goodput_replay.run.summary import ClassSummary, Quantiles, Summary

__all__ = ["print_summary"]

_NAME_WIDTH: Final = 24
_UNBOUNDED: Final = 10_000

_STYLES: Final = {
    VerdictKind.PASS: "bold green",
    VerdictKind.FAIL: "bold red",
    VerdictKind.INCONCLUSIVE: "bold yellow",
    VerdictKind.INVALID: "bold magenta",
}


def print_summary(summary: Summary, console: Console, *, folder: Path | None = None) -> None:
    """Print a run's summary; plain text if the console is not a terminal.

    Args:
        summary: of the run.
        console: where to print.
        folder: the run's folder, to name its report; None to leave it out.
    """
    console.print(_heading(summary))
    if summary.emulation is not None:
        console.print(Text(emulation_words(summary.emulation)))
    console.print(_attainment(summary, console))
    console.print(_latencies(summary, console))
    if summary.overall.misses:
        console.print(_misses(summary, console))
    if summary.errors:
        console.print(_errors(summary))
    console.print(_validity(summary))
    console.print(
        Text.assemble(
            (summary.verdict.kind.value, _STYLES[summary.verdict.kind]),
            f" ({summary.verdict.reason.value}) ",
            summary.verdict.sentence,
        )
    )
    if folder is not None:
        # A path is copied: it is neither wrapped nor decorated.
        console.print(Text(_where(folder)), soft_wrap=True)


def _heading(summary: Summary) -> Text:
    trace = f"{summary.trace.name}{' (synthetic)' if summary.trace.synthetic else ''}"
    return Text(
        f"{trace}: {count_words(summary.window.rows_planned)} requests over "
        f"{duration_words(summary.window.length_s)}, {rate_words(summary.overall.offered_per_s)} "
        f"offered, {rate_words(summary.overall.served_per_s)} served"
    )


def _attainment(summary: Summary, console: Console) -> Table:
    rows = _rows(summary)
    valid = summary.validity.valid
    columns = [
        _Column("attained", [f"{count_words(one.good)}/{count_words(one.total)}" for one in rows]),
        _Column("share", [percent_words(one.attainment) for one in rows]),
        _Column(
            "at least",
            ["–" if one.interval is None else percent_words(one.interval.lower) for one in rows],
        ),
        _Column("objective", [one.objective or "–" for one in rows]),
        _Column("verdict", [_verdict(one, valid=valid) for one in rows], justify="left"),
        _Column("goodput", [rate_words(one.goodput_per_s) for one in rows]),
    ]
    return _fitted("attainment", summary, columns, ("goodput", "attained", "at least"), console)


def _latencies(summary: Summary, console: Console) -> Table:
    rows = _rows(summary)
    columns = [
        _Column("TTFT p50", [_number(one.ttft_ms, "p50") for one in rows]),
        _Column("TTFT p99", [_number(one.ttft_ms, "p99") for one in rows]),
        _Column("TPOT p50", [_number(one.tpot_ms, "p50") for one in rows]),
        _Column("TPOT p99", [_number(one.tpot_ms, "p99") for one in rows]),
        _Column("TBT p99", [_number(one.tbt_ms, "p99") for one in rows]),
        _Column("E2E p99", [_number(one.e2e_ms, "p99") for one in rows]),
    ]
    optional = ("TPOT p50", "TTFT p50", "E2E p99", "TBT p99")
    return _fitted("latency, milliseconds", summary, columns, optional, console)


def _misses(summary: Summary, console: Console) -> Table:
    reasons = [reason.value for reason in MissReason if reason.value in summary.overall.misses]
    rows = _rows(summary)
    columns = [
        _Column(reason, [count_words(one.misses.get(reason, 0)) for one in rows])
        for reason in reasons
    ]
    table = _table("misses by reason", summary, columns)
    if _fits(table, console):
        return table
    texts = [
        ", ".join(f"{reason} {count_words(n)}" for reason, n in one.misses.items()) or "–"
        for one in rows
    ]
    column = _Column("misses", texts, justify="left", no_wrap=False)
    return _table("misses by reason", summary, [column])


def _errors(summary: Summary) -> Table:
    table = Table(
        title="errors", title_justify="left", title_style="bold", box=None, show_header=False
    )
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for error in summary.errors:
        table.add_row(f"{count_words(error.count)} ×", Text(error.detail or error.outcome))
    if summary.other_errors:
        table.add_row(f"{count_words(summary.other_errors)} ×", "other errors")
    return table


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of a table: its header and one cell per class."""

    name: str
    cells: Sequence[str | Text]
    justify: Literal["left", "right"] = "right"
    no_wrap: bool = True


def _fitted(
    title: str,
    summary: Summary,
    columns: list[_Column],
    optional: Sequence[str],
    console: Console,
) -> Table:
    """Drop `optional` columns, in their order, until the table fits the console."""
    table = _table(title, summary, columns)
    for name in optional:
        if _fits(table, console):
            break
        columns = [column for column in columns if column.name != name]
        table = _table(title, summary, columns)
    return table


def _fits(table: Table, console: Console) -> bool:
    # Measured at any width: at the console's own, rich reports what it would crop to.
    unbounded = console.options.update(width=_UNBOUNDED)
    return Measurement.get(console, unbounded, table).maximum <= console.width


def _table(title: str, summary: Summary, columns: Sequence[_Column]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    names = [Text(one.name or _unnamed(one, summary)) for one in _rows(summary)]
    longest = max((name.cell_len for name in names), default=0)
    if longest <= _NAME_WIDTH:
        table.add_column("class", no_wrap=True)
    else:
        table.add_column("class", overflow="fold", width=_NAME_WIDTH)
    for column in columns:
        table.add_column(
            column.name,
            justify=column.justify,
            no_wrap=column.no_wrap,
            overflow="fold",
        )
    for cells in zip(names, *(column.cells for column in columns), strict=True):
        table.add_row(*cells)
    return table


def _unnamed(one: ClassSummary, summary: Summary) -> str:
    return "all" if one is summary.overall else "–"


def _rows(summary: Summary) -> list[ClassSummary]:
    """Return every class with a request, and all together if there are several."""
    classes = [one for one in summary.classes if one.requests] or list(summary.classes)
    return classes if len(classes) == 1 else [*classes, summary.overall]


def _number(quantiles: Quantiles | None, which: Literal["p50", "p99"]) -> str:
    if quantiles is None:
        return "–"
    ms = quantiles.p50 if which == "p50" else quantiles.p99
    return f"{ms:,.0f}" if ms >= 1000 else f"{ms:.4g}"


def _verdict(one: ClassSummary, *, valid: bool) -> Text:
    # An invalid run has no verdict of a class.
    if one.verdict is None or not valid:
        return Text("–")
    return Text(one.verdict.value, style=_STYLES[one.verdict])


def _validity(summary: Summary) -> Text:
    validity = summary.validity
    lag = "nothing was sent"
    if summary.emulation is not None:
        lag = "in virtual time every request is on schedule"
    elif validity.lag_ms is not None:
        lag = (
            f"send lag p50 {ms_words(validity.lag_ms.p50)}, p99 {ms_words(validity.lag_ms.p99)} "
            f"of {ms_words(validity.lag_p99_limit_ms)} allowed"
        )
    lengths = ""
    if summary.target.pinning is LengthPinning.MAX_TOKENS:
        lengths = "; output lengths were disclosed by max_tokens"
    word, style = ("valid", "green") if validity.valid else ("invalid", "bold magenta")
    unsent = f"{count_words(validity.unsent_rows)} rows unsent"
    return Text.assemble((word, style), f": {lag}; {unsent}{lengths}")


def _where(folder: Path) -> str:
    report = folder / REPORT_FILE
    return f"report: {report}" if report.is_file() else f"run: {folder}"

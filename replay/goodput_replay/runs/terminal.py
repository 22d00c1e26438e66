"""Print a run's summary: attainment, latencies, misses, errors, validity and verdict.

On a terminal of at least 60 columns, class names are never cut off: a name of more than 24 columns
is folded. If a table is too wide, other columns are dropped, or folded into one column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from goodput_core.slo.judging import MissReason
from goodput_core.slo.verdict import VerdictKind
from goodput_core.text import printable
from goodput_replay.runs.files import REPORT_FILE
from goodput_replay.runs.formatting import (
    describe_emulation,
    describe_sessions,
    describe_warmup,
    format_count,
    format_ms,
    format_percent,
    format_rate,
    format_seconds,
)
from goodput_replay.runs.summary import ClassSummary, LengthPinning
from goodput_replay.runs.tables import choose_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rich.console import Console

    from goodput_replay.runs.summary import Quantiles, Summary

__all__ = ["VERDICT_STYLES", "print_summary"]

_Columns = Mapping[str, Callable[[ClassSummary], str | Text]]
"""Functions that format the cells of a table, by header."""

_NAME_WIDTH: Final = 24
_LEFT: Final = ("verdict", "misses")
"""Columns that contain text and are therefore aligned to the left."""

VERDICT_STYLES: Final = {
    VerdictKind.PASS: "bold green",
    VerdictKind.FAIL: "bold red",
    VerdictKind.INCONCLUSIVE: "bold yellow",
    VerdictKind.INVALID: "bold magenta",
}


def print_summary(summary: Summary, console: Console, *, folder: Path | None = None) -> None:
    """Print a run's summary; plain text if the console is not a terminal.

    Args:
        summary: summary of the run.
        console: output.
        folder: the run's folder, to print its path or that of its report; None to omit it.
    """
    console.print(_format_heading(summary))
    if summary.emulation is not None:
        console.print(Text(printable(describe_emulation(summary.emulation))))
    if summary.run.sessions is not None:
        console.print(Text(f"sessions: {describe_sessions(summary.run.sessions)}"))
    console.print(_build_attainment(summary, console))
    console.print(_build_latencies(summary, console))
    if summary.overall.misses:
        console.print(_build_misses(summary, console))
    if summary.errors:
        console.print(_build_errors(summary))
    console.print(_format_validity(summary))
    if summary.retried:
        console.print(
            f"retries: {format_count(summary.retried)} requests were sent more than once",
            highlight=False,
        )
    if warmup := describe_warmup(summary.window):
        console.print(Text(f"warm-up: {printable(warmup)}"))
    if summary.prompt_tokens is not None and summary.prompt_tokens.sentence:
        console.print(f"prompts: {summary.prompt_tokens.sentence}", highlight=False, markup=False)
    for deviation in summary.validity.deviations:
        console.print(f"target: {deviation.sentence}", highlight=False, markup=False)
    console.print(
        Text.assemble(
            (summary.verdict.kind.value, VERDICT_STYLES[summary.verdict.kind]),
            f" ({summary.verdict.reason.value}) ",
            printable(summary.verdict.sentence),
        )
    )
    if folder is not None:
        # Neither wrapped nor styled, so that the path can be copied.
        console.print(Text(printable(_format_location(folder))), soft_wrap=True)


def _format_heading(summary: Summary) -> Text:
    trace = f"{summary.trace.name}{' (synthetic)' if summary.trace.synthetic else ''}"
    if any(text.startswith("--session-arrivals") for text in summary.trace.transforms):
        trace += " (starts of sessions chosen by the replay)"
    tokens = ""
    if summary.run.concurrency is not None:
        trace += f", closed loop of {format_count(summary.run.concurrency)} clients"
        tokens_per_s = summary.overall.output_tokens / summary.window.length_s
        tokens = f", {format_count(round(tokens_per_s))} output tokens/s"
    if summary.run.sessions is not None:
        trace += ", causal sessions"
    return Text(
        f"{printable(trace)}: {format_count(summary.window.rows_planned)} requests over "
        f"{format_seconds(summary.window.length_s)}, {format_rate(summary.overall.offered_per_s)} "
        f"offered, {format_rate(summary.overall.served_per_s)} served{tokens}"
    )


def _build_attainment(summary: Summary, console: Console) -> Table:
    valid = summary.validity.valid
    columns: _Columns = {
        "attained": lambda row: f"{format_count(row.good)}/{format_count(row.total)}",
        "share": lambda row: format_percent(row.attainment),
        "at least": lambda row: format_percent(row.interval.lower if row.interval else None),
        "objective": lambda row: row.objective or "–",
        "verdict": lambda row: _format_verdict(row, valid=valid),
        "goodput": lambda row: format_rate(row.goodput_per_s),
    }
    optional = ("goodput", "attained", "at least")
    if summary.overall.weighted_goodput_per_s is not None:
        columns = {**columns, "weighted": _format_weighted}
    return _fit_table("attainment", summary, columns, optional, console)


def _format_weighted(row: ClassSummary) -> str:
    """Format the weighted goodput of a class, or of all classes."""
    weighted = row.weighted_goodput_per_s
    return "–" if weighted is None else format_rate(weighted)


def _build_latencies(summary: Summary, console: Console) -> Table:
    columns: _Columns = {
        "TTFT p50": lambda row: _format_quantile(row.ttft_ms, "p50"),
        "TTFT p99": lambda row: _format_quantile(row.ttft_ms, "p99"),
        "TPOT p50": lambda row: _format_quantile(row.tpot_ms, "p50"),
        "TPOT p99": lambda row: _format_quantile(row.tpot_ms, "p99"),
        "TBT p99": lambda row: _format_quantile(row.tbt_ms, "p99"),
        "E2E p99": lambda row: _format_quantile(row.e2e_ms, "p99"),
    }
    optional = ("TPOT p50", "TTFT p50", "E2E p99", "TBT p99")
    return _fit_table("latency, milliseconds", summary, columns, optional, console)


def _build_misses(summary: Summary, console: Console) -> Table:
    reasons = [reason.value for reason in MissReason if reason.value in summary.overall.misses]
    columns: _Columns = {reason: partial(_format_misses, reason) for reason in reasons}
    title = "misses by reason"
    folded: _Columns = {"misses": _list_misses}
    forms = (_build_table(title, summary, shown) for shown in (columns, folded))
    return choose_table(forms, console)


def _format_misses(reason: str, row: ClassSummary) -> str:
    return format_count(row.misses.get(reason, 0))


def _list_misses(row: ClassSummary) -> str:
    return ", ".join(f"{reason} {format_count(n)}" for reason, n in row.misses.items()) or "–"


def _build_errors(summary: Summary) -> Table:
    table = Table(
        title="errors", title_justify="left", title_style="bold", box=None, show_header=False
    )
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for error in summary.errors:
        table.add_row(
            f"{format_count(error.count)} ×", Text(printable(error.detail or error.outcome))
        )
    if summary.other_errors:
        table.add_row(f"{format_count(summary.other_errors)} ×", "other errors")
    return table


def _fit_table(
    title: str,
    summary: Summary,
    columns: _Columns,
    optional: Sequence[str],
    console: Console,
) -> Table:
    """Build a table; drop `optional` columns, in their order, until it fits the console."""

    def forms() -> Iterator[Table]:
        shown = dict(columns)
        yield _build_table(title, summary, shown)
        for name in optional:
            del shown[name]
            yield _build_table(title, summary, shown)

    return choose_table(forms(), console)


def _build_table(title: str, summary: Summary, columns: _Columns) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    rows = _select_rows(summary)
    names = [
        Text(printable(row.name) or ("all" if row is summary.overall else "–")) for row in rows
    ]
    if max((name.cell_len for name in names), default=0) <= _NAME_WIDTH:
        table.add_column("class", no_wrap=True)
    else:
        table.add_column("class", overflow="fold", width=_NAME_WIDTH)
    for header in columns:
        table.add_column(
            header,
            justify="left" if header in _LEFT else "right",
            no_wrap=header != "misses",
            overflow="fold",
        )
    for name, row in zip(names, rows, strict=True):
        table.add_row(name, *(cell(row) for cell in columns.values()))
    return table


def _select_rows(summary: Summary) -> list[ClassSummary]:
    """Return every class with a request, and the total if there are several classes."""
    classes = [row for row in summary.classes if row.requests] or list(summary.classes)
    return classes if len(classes) == 1 else [*classes, summary.overall]


def _format_quantile(quantiles: Quantiles | None, level: Literal["p50", "p99"]) -> str:
    if quantiles is None:
        return "–"
    ms = quantiles.p50 if level == "p50" else quantiles.p99
    return f"{ms:,.0f}" if ms >= 1000 else f"{ms:.4g}"


def _format_verdict(row: ClassSummary, *, valid: bool) -> Text:
    # Classes of an invalid run have no verdict.
    if row.verdict is None or not valid:
        return Text("–")
    return Text(row.verdict.value, style=VERDICT_STYLES[row.verdict])


def _format_validity(summary: Summary) -> Text:
    validity = summary.validity
    lag = "no request was sent"
    if summary.emulation is not None:
        lag = "in virtual time every request is on schedule"
    elif validity.lag_ms is not None:
        lag = (
            f"send lag p50 {format_ms(validity.lag_ms.p50)}, p99 {format_ms(validity.lag_ms.p99)} "
            f"of {format_ms(validity.lag_p99_limit_ms)} allowed"
        )
    if stalls := summary.client.stalls:
        stalled_s = sum(stall.stalled_s for stall in stalls)
        lag += f", stalled for {format_seconds(stalled_s)} in total"
    if senders := summary.client.senders:
        lag += f", {len(senders)} senders"
    lengths = ""
    if summary.target.pinning in {LengthPinning.MAX_TOKENS, LengthPinning.LIMIT}:
        lengths = "; output lengths were disclosed by max_tokens"
    word, style = ("valid", "green") if validity.valid else ("invalid", "bold magenta")
    unsent = f"{format_count(validity.unsent_rows)} rows unsent"
    return Text.assemble((word, style), f": {lag}; {unsent}{lengths}")


def _format_location(folder: Path) -> str:
    report = folder / REPORT_FILE
    return f"report: {report}" if report.is_file() else f"run: {folder}"

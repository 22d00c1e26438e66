"""A run's summary on a terminal: what held, whether to trust it, and where the rest is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.box import SIMPLE_HEAD
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

_NAME_WIDTH: Final = 12

_STYLES: Final = {
    VerdictKind.PASS: "bold green",
    VerdictKind.FAIL: "bold red",
    VerdictKind.INCONCLUSIVE: "bold yellow",
    VerdictKind.INVALID: "bold magenta",
}


def print_summary(summary: Summary, console: Console, *, folder: Path | None = None) -> None:
    """Print a run's summary; plain text where the console is no terminal.

    Args:
        summary: of the run.
        console: where to print.
        folder: the run's folder, whose report is named; None: it is not.
    """
    console.print(_heading(summary))
    if summary.emulation is not None:
        console.print(Text(emulation_words(summary.emulation)))
    console.print(_promises(summary))
    console.print(_latencies(summary))
    if summary.overall.misses:
        console.print(_misses(summary))
    console.print(_validity(summary))
    console.print(
        Text.assemble(
            (summary.verdict.kind.value, _STYLES[summary.verdict.kind]),
            f" ({summary.verdict.reason.value}) ",
            summary.verdict.sentence,
        )
    )
    if folder is not None:
        # A path is there to be copied: it is neither wrapped nor decorated.
        console.print(Text(_where(folder)), soft_wrap=True)


def _heading(summary: Summary) -> Text:
    trace = f"{summary.trace.name}{' (synthetic)' if summary.trace.synthetic else ''}"
    return Text(
        f"{trace}: {count_words(summary.window.rows_planned)} requests over "
        f"{duration_words(summary.window.length_s)}, {rate_words(summary.overall.offered_per_s)} "
        f"offered, {rate_words(summary.overall.served_per_s)} served"
    )


def _promises(summary: Summary) -> Table:
    table = _table("promises kept", summary)
    for name in ("attained", "share", "at least", "objective"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("goodput", justify="right", no_wrap=True)
    for one in _rows(summary):
        table.add_row(
            _name(one, summary),
            f"{count_words(one.good)}/{count_words(one.total)}",
            percent_words(one.attainment),
            "–" if one.interval is None else percent_words(one.interval.lower),
            one.objective or "–",
            _verdict(one, valid=summary.validity.valid),
            rate_words(one.goodput_per_s),
        )
    return table


def _latencies(summary: Summary) -> Table:
    table = _table("latency, milliseconds", summary)
    for name in ("TTFT p50", "p99", "TPOT p50", "p99", "TBT p99", "E2E p99"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in _rows(summary):
        table.add_row(
            _name(one, summary),
            *_pair(one.ttft_ms),
            *_pair(one.tpot_ms),
            _pair(one.tbt_ms)[1],
            _pair(one.e2e_ms)[1],
        )
    return table


def _misses(summary: Summary) -> Table:
    reasons = [reason.value for reason in MissReason if reason.value in summary.overall.misses]
    table = _table("misses by reason", summary)
    for reason in reasons:
        table.add_column(reason, justify="right", no_wrap=True)
    for one in _rows(summary):
        table.add_row(
            _name(one, summary), *(count_words(one.misses.get(reason, 0)) for reason in reasons)
        )
    return table


def _table(title: str, summary: Summary) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    longest = max((len(one.name) for one in summary.classes), default=0)
    table.add_column("class", overflow="fold", min_width=min(longest, _NAME_WIDTH))
    return table


def _name(one: ClassSummary, summary: Summary) -> Text:
    return Text(one.name or ("all" if one is summary.overall else "–"))


def _rows(summary: Summary) -> list[ClassSummary]:
    """Every class, and all together where there are several."""
    if len(summary.classes) == 1:
        return list(summary.classes)
    return [*summary.classes, summary.overall]


def _pair(quantiles: Quantiles | None) -> tuple[str, str]:
    if quantiles is None:
        return "–", "–"
    return _number(quantiles.p50), _number(quantiles.p99)


def _number(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 1000 else f"{ms:.4g}"


def _verdict(one: ClassSummary, *, valid: bool) -> Text:
    # What an invalid run would say of a class must not be read as a verdict.
    if one.verdict is None or not valid:
        return Text("–")
    return Text(one.verdict.value, style=_STYLES[one.verdict])


def _validity(summary: Summary) -> Text:
    validity = summary.validity
    lag = "nothing was sent"
    if summary.emulation is not None:
        lag = "nobody was late in virtual time"
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

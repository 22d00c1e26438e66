"""Terminal display of a run: a panel on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

from rich.live import Live
from rich.table import Table
from rich.text import Text

from goodput_core.slo.intervals import requests_needed
from goodput_core.slo.verdict import MIN_BLOCKS, Reason, VerdictKind
from goodput_core.text import printable
from goodput_core.units import NS_PER_S, format_duration
from goodput_replay.live.tally import LINE_EVERY_NS, MIN_CLIENT_REQUESTS
from goodput_replay.runs.formatting import format_percent, format_rate

if TYPE_CHECKING:
    from rich.console import Console

    from goodput_core.slo.attainment import ClassCounts
    from goodput_core.slo.evidence import ClassEvidence
    from goodput_replay.live.tally import RunProgress, RunSoFar

__all__ = ["TerminalView"]

_PANEL_EVERY_NS: Final = NS_PER_S
_NEVER_NS: Final = 1 << 62
_SHOWN_ERRORS: Final = 3
_SHOWN_CLASSES: Final = 8
_TOO_FEW: Final = frozenset({Reason.TOO_FEW_BLOCKS, Reason.TOO_FEW_REQUESTS})
_STYLES: Final = {
    VerdictKind.PASS: "bold green",
    VerdictKind.FAIL: "bold red",
    VerdictKind.INCONCLUSIVE: "bold yellow",
    VerdictKind.INVALID: "bold magenta",
}


class TerminalView:
    """Shows a run until the block ends.

    Args:
        console: console on stderr.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._every_ns = LINE_EVERY_NS
        self._due_ns = LINE_EVERY_NS
        if console.is_terminal:
            self._every_ns = _PANEL_EVERY_NS
            self._due_ns = -_PANEL_EVERY_NS
            self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the panel; later calls do nothing."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._due_ns = _NEVER_NS

    def is_due(self, progress: RunProgress) -> bool:
        """True if the display is to be drawn now; a panel is drawn at once, a line only later."""
        if progress.elapsed_ns < self._due_ns:
            return False
        self._due_ns = progress.elapsed_ns + self._every_ns
        return True

    def draw(self, so_far: RunSoFar) -> None:
        """Draw the run until now."""
        if self._live is not None:
            self._live.update(_build_panel(so_far), refresh=True)
        else:
            line = _format_line(so_far)
            self._console.print(line, soft_wrap=True, highlight=False, markup=False)


def _build_panel(so_far: RunSoFar) -> Table:
    progress, evidence, verdict = so_far.progress, so_far.evidence, so_far.verdict
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row("time", _format_time(progress))
    table.add_row("requests", _format_requests(progress))
    table.add_row("goodput", format_rate(float(evidence.goodput_per_s)))
    shown = list(zip(evidence.counts, evidence.classes, strict=True))
    for counts, measured in shown[:_SHOWN_CLASSES]:
        table.add_row(Text(printable(counts.name) or "all"), _format_attained(counts, measured))
        latencies = _format_latencies(so_far, counts.name)
        if latencies:
            table.add_row("", latencies)
    if len(shown) > _SHOWN_CLASSES:
        table.add_row("", f"and {len(shown) - _SHOWN_CLASSES} more classes")
    table.add_row("misses", _format_misses(evidence.overall))
    for (outcome, _, detail), count in so_far.errors[:_SHOWN_ERRORS]:
        table.add_row("error", Text(f"{count} × {printable(detail or outcome)}", style="red"))
    table.add_row("send lag", _format_lag(so_far))
    table.add_row(
        "no verdict" if verdict.reason is Reason.CLOSED_LOOP else "so far",
        Text.assemble(
            (verdict.kind.value, _STYLES[verdict.kind]),
            f" ({verdict.reason.value}) {printable(verdict.sentence)}",
        ),
    )
    return table


def _format_line(so_far: RunSoFar) -> str:
    progress, overall = so_far.progress, so_far.evidence.overall
    frequent = so_far.errors[:_SHOWN_ERRORS]
    errors = "; ".join(
        f"{count} × {printable(detail or outcome)}" for (outcome, _, detail), count in frequent
    )
    return (
        f"{_format_time(progress)}: {_format_requests(progress)}, "
        f"goodput {format_rate(float(so_far.evidence.goodput_per_s))}, "
        f"attained {_format_share(overall)}, "
        f"misses: {_format_misses(overall)}, "
        f"send lag {_format_lag(so_far)}, {_format_verdict(so_far)}"
        f"{f', errors: {errors}' if errors else ''}"
    )


def _format_verdict(so_far: RunSoFar) -> str:
    verdict = so_far.verdict
    if verdict.reason is Reason.CLOSED_LOOP:
        return "no verdict (closed loop)"
    missing = _format_missing(so_far)
    return f"so far {verdict.kind} ({verdict.reason.value}{f': {missing}' if missing else ''})"


def _format_missing(so_far: RunSoFar) -> str:
    """Return the count that is too low for a verdict, with the required one; empty if none is."""
    verdict = so_far.verdict
    if verdict.reason is Reason.TOO_FEW_REQUESTS and not verdict.classes:
        return f"{so_far.evidence.overall.rows} of {MIN_CLIENT_REQUESTS} requests"
    undecided = {one.name for one in verdict.classes if one.reason in _TOO_FEW}
    for measured in so_far.evidence.classes:
        if measured.name not in undecided:
            continue
        assert measured.objective is not None
        assert measured.interval is not None
        if measured.blocks < MIN_BLOCKS:
            return f"{measured.blocks} of {MIN_BLOCKS} s"
        needed = requests_needed(measured.objective, measured.interval.confidence)
        total = measured.attainment.total
        if total < needed:
            return f"{printable(measured.name)}: {total} of {needed} requests"
        least = min(MIN_BLOCKS, needed)
        return f"{printable(measured.name)}: requests in {measured.busy_s} of {least} seconds"
    return ""


def _format_time(progress: RunProgress) -> str:
    elapsed = max(0, progress.elapsed_ns)
    shown = format_duration(elapsed)
    if progress.duration_ns is None:
        return shown
    remaining = progress.duration_ns - elapsed
    if remaining > 0:
        return f"{shown}, {format_duration(remaining)} left"
    return f"{shown}, waiting for the last responses"


def _format_requests(progress: RunProgress) -> str:
    text = f"sent {progress.sent} of {progress.planned}, {progress.in_flight} in flight"
    return f"done {progress.done}, {text}" if progress.duration_ns is None else text


def _format_attained(counts: ClassCounts, measured: ClassEvidence) -> Text:
    text = Text(_format_share(counts))
    if counts.attainment.good < counts.attainment.total:
        text.stylize("yellow")
    if measured.interval is not None:
        bounds = (measured.interval.lower, measured.interval.upper)
        text.append(f", between {' and '.join(map(format_percent, bounds))}")
    return text


def _format_share(counts: ClassCounts) -> str:
    share = counts.attainment.share
    if share is None:
        return f"- ({counts.rows} unjudged)" if counts.rows else "-"
    return f"{format_percent(float(share))} ({counts.attainment.good} of {counts.attainment.total})"


def _format_latencies(so_far: RunSoFar, name: str) -> str:
    shown = []
    for measure in ("ttft", "tpot"):
        histogram = so_far.latencies.get((measure, name))
        if histogram is not None and histogram.count:
            p50, p99 = (format_duration(histogram.quantile_ns(q)) for q in (0.5, 0.99))
            shown.append(f"{measure.upper()} p50 {p50}, p99 {p99}")
    return "; ".join(shown)


def _format_misses(counts: ClassCounts) -> str:
    return ", ".join(f"{reason} {n}" for reason, n in counts.misses.by_reason.items()) or "none"


def _format_lag(so_far: RunSoFar) -> str:
    lag, limit_ns = so_far.lag, so_far.validity.lag_limit_ns
    return (
        f"p99 {format_duration(lag.quantile_ns(0.99))} of {format_duration(limit_ns)} allowed, "
        f"max {format_duration(lag.max_ns)}"
    )

"""Tables of the measured load generators: medians, ratios with intervals, and aims.

Ratios are paired by repeat, since the runs of a repeat share a trace. The interval is that of
Student's t on the logarithms of the ratios.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Final

from benchmarks.peers.tools import TOOLS

from goodput_core.slo.distributions import student_t_quantile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from benchmarks.peers.measuring import Measurement

    Value = Callable[[Measurement], float | None]

__all__ = ["Ratio", "Section", "highest_sustained", "ratio_of", "sections"]

CONFIDENCE: Final = 0.95
BASE: Final = "replay"
AIM_PER_S: Final = 1500
"""Streamed requests per second that one process of `replay` should sustain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A mean ratio and its interval.

    Args:
        mean: geometric mean.
        low: lower bound; None for a single pair.
        high: upper bound; None for a single pair.
        pairs: number of pairs.
    """

    mean: float
    low: float | None
    high: float | None
    pairs: int

    def __str__(self) -> str:
        bounds = "" if self.low is None else f" ({self.low:.2f}–{self.high:.2f})"
        return f"{self.mean:.2f}{bounds}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A table: its title, the names of its columns, and its rows."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def ratio_of(pairs: Iterable[tuple[float, float]]) -> Ratio | None:
    """Return the ratio of the first to the second numbers of pairs; None without pairs.

    Pairs with a zero are left out, because they have no ratio.
    """
    logs = [math.log(first / second) for first, second in pairs if first > 0 and second > 0]
    if not logs:
        return None
    mean = fmean(logs)
    if len(logs) == 1:
        return Ratio(mean=math.exp(mean), low=None, high=None, pairs=1)
    t = student_t_quantile((1 + CONFIDENCE) / 2, len(logs) - 1)
    half = t * stdev(logs) / math.sqrt(len(logs))
    low, high = math.exp(mean - half), math.exp(mean + half)
    return Ratio(mean=math.exp(mean), low=low, high=high, pairs=len(logs))


def highest_sustained(runs: Iterable[Measurement]) -> tuple[int | None, int | None]:
    """Return the highest rate that a tool sustained, and the next higher one that it did not.

    A rate is sustained if most runs of it and of each lower rate sustained it.
    """
    by_rate = defaultdict(list)
    for run in runs:
        by_rate[run.cell.rate_per_s].append(run.sustained)
    highest = None
    for rate, sustained in sorted(by_rate.items()):
        if 2 * sum(sustained) <= len(sustained):
            return highest, rate
        highest = rate
    return highest, None


def sections(measurements: Sequence[Measurement]) -> list[Section]:
    """Return the tables."""
    runs: dict[tuple[int, str], list[Measurement]] = defaultdict(list)
    for one in measurements:
        runs[one.cell.rate_per_s, one.cell.tool].append(one)
    order = list(TOOLS)
    ordered = {key: runs[key] for key in sorted(runs, key=lambda k: (k[0], order.index(k[1])))}
    return [_values(ordered), _ratios(ordered), _sustained(measurements), _aims(ordered)]


def _values(runs: Mapping[tuple[int, str], list[Measurement]]) -> Section:
    columns = (
        *("rate/s", "tool", "runs", "reached/s", "error p50 ms", "error p99 ms", "error max ms"),
        *("CPU s per 1,000", "CPU s in all", "peak MiB", "lost"),
    )
    rows: list[tuple[str, ...]] = []
    for (rate, tool), group in runs.items():
        timings = [one.timing for one in group if one.timing]
        failures = [one.failure for one in group if one.failure]
        rows.append(
            (
                f"{rate:,}",
                TOOLS[tool].title,
                str(len(group)),
                _spread([t.achieved_per_s for t in timings], "{:,.0f}"),
                _spread([t.error_p50_ms for t in timings]),
                _spread([t.error_p99_ms for t in timings]),
                _spread([t.error_max_ms for t in timings]),
                _spread([one.cpu_s_per_1000 for one in group]),
                _spread([one.cpu_s for one in group], "{:.1f}"),
                _spread([one.peak_mib for one in group], "{:.0f}"),
                f"{sum(one.lost for one in group):,}{' (failed)' if failures else ''}",
            )
        )
    return Section(title="Each tool at each rate", columns=columns, rows=rows)


def _ratios(runs: Mapping[tuple[int, str], list[Measurement]]) -> Section:
    rows = [
        (f"{rate:,}", TOOLS[tool].title, *(_text(_paired(group, base, value)) for value in _VALUES))
        for (rate, tool), group in runs.items()
        if tool != BASE and (base := runs.get((rate, BASE)))
    ]
    title = TOOLS[BASE].title
    measures = ("error p99", "CPU per 1,000", "peak memory")
    columns = ("rate/s", "tool", *(f"{measure} ÷ {title}" for measure in measures))
    return Section(title=f"Ratios to {title}, with 95 % intervals", columns=columns, rows=rows)


def _sustained(measurements: Sequence[Measurement]) -> Section:
    rows = []
    for name, tool in TOOLS.items():
        runs = [one for one in measurements if one.cell.tool == name]
        if runs:
            highest, missed = highest_sustained(runs)
            cells = (f"{rate:,}" if rate else "–" for rate in (highest, missed))
            rows.append((tool.title, *cells))
    columns = ("tool", "highest sustained rate/s", "not sustained/s")
    return Section(title="Highest sustained rate", columns=columns, rows=rows)


def _aims(runs: Mapping[tuple[int, str], list[Measurement]]) -> Section:
    rows: list[tuple[str, ...]] = []

    def compare(what: str, rate: int, name: str, other: str, value: Value) -> None:
        group, base = runs.get((rate, name)), runs.get((rate, other))
        ratio = _paired(group, base, value) if group and base else None
        if ratio:
            rows.append((f"{what} at {rate:,}/s", str(ratio), "≤ 1", _met(ratio.mean <= 1)))

    for rate in (500, 1000):
        compare("CPU of sending ÷ bare loop", rate, BASE, "bare", _cpu)
    compare("error p99 ÷ bare loop", 1000, BASE, "bare", _error_p99)
    compare("error p99 with --ui ÷ without", 1000, "replay-ui", BASE, _error_p99)
    for name in (BASE, "replay-ui"):
        lags = [one.lag_p99_ms for one in runs.get((1000, name), ()) if one.lag_p99_ms is not None]
        if lags:
            title = TOOLS[name].title
            limit = "≤ 10"
            met = _met(median(lags) <= 10)
            rows.append((f"own send lag p99 of {title} at 1,000/s, ms", _spread(lags), limit, met))
    own = [one for (_, tool), group in runs.items() if tool == BASE for one in group]
    if own:
        highest, missed = highest_sustained(own)
        reached = (highest or 0) >= AIM_PER_S
        met = _met(reached) if reached or missed else "not measured"
        rows.append(("highest sustained rate/s", f"{highest or 0:,}", f"≥ {AIM_PER_S:,}", met))
    columns = ("measure", "value", "aim", "met")
    return Section(title=f"Aims of {TOOLS[BASE].title}", columns=columns, rows=rows)


def _cpu(one: Measurement) -> float | None:
    return one.cpu_s_per_1000


def _error_p99(one: Measurement) -> float | None:
    return one.timing.error_p99_ms if one.timing else None


def _memory(one: Measurement) -> float | None:
    return one.peak_mib


def _paired(
    group: Sequence[Measurement], base: Sequence[Measurement], value: Value
) -> Ratio | None:
    bases = {one.cell.repeat: value(one) for one in base}
    return ratio_of(
        (first, second)
        for one in group
        if (first := value(one)) is not None and (second := bases.get(one.cell.repeat)) is not None
    )


def _text(ratio: Ratio | None) -> str:
    return str(ratio) if ratio else "–"


def _met(met: bool) -> str:  # noqa: FBT001 - private, one meaning
    return "yes" if met else "no"


def _spread(values: Iterable[float | None], form: str = "{:.2f}") -> str:
    """Return the median, with the smallest and the largest value in brackets."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return "–"
    middle, low, high = (form.format(value) for value in (median(known), known[0], known[-1]))
    return middle if len(known) == 1 else f"{middle} ({low}–{high})"


_VALUES: Final = (_error_p99, _cpu, _memory)

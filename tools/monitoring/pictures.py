"""Draw the panels from a Prometheus server, for the docs: Grafana itself is not used.

    URL=http://127.0.0.1:9090
    python -m tools.monitoring.pictures $URL NAMESPACE NAME START END FOLDER [ROW ...]

The queries, titles, units and dashed lines are those of the dashboards. One picture per row; all
rows are drawn unless titles select some. With GOODPUT_PICTURES=FOLDER, the end-to-end tests of the
dashboards draw all of them.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode
from urllib.request import urlopen

import matplotlib as mpl
from matplotlib import dates, ticker
from matplotlib.figure import Figure as Canvas
from tools.monitoring.panels import FLEET, SERVICE, Look, PanelUnit

from goodput_core.contract import METRIC_SERVICE_DECISION_TIME

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from tools.monitoring.panels import DashboardSpec, Panel, Query, Row

_COLUMNS = 3
_STEP_S = 2
_COLOURS = ("#1f60c4", "#e0752d", "#37872d", "#8f3bb8", "#c4162a", "#0a8e8e", "#b8860b", "#5a5a5a")
_SUFFIXES = {PanelUnit.SECONDS: " s", PanelUnit.PER_SECOND: "/s"}


class _PanelData:
    """A Prometheus server and the values of Grafana's variables."""

    def __init__(self, url: str, namespace: str, name: str, start_s: float, end_s: float) -> None:
        self._url = url
        self._span = (start_s, end_s)
        self._variables = {
            "$__rate_interval": "30s",
            "$__range": f"{int(end_s - start_s)}s",
            "$namespace": namespace,
            "$llmservice": name,
        }

    def series(self, expr: str) -> list[Any]:
        """Return the series of a query over the time range."""
        start_s, end_s = self._span
        return self._get("query_range", expr, start=start_s, end=end_s, step=_STEP_S)

    def latest(self, expr: str) -> list[Any]:
        """Return the values of a query at the end of the time range."""
        return self._get("query", expr, time=self._span[1])

    def _get(self, path: str, expr: str, **options: float) -> list[Any]:
        for name, value in self._variables.items():
            expr = expr.replace(name, value)
        query = urlencode({"query": expr, **options})
        with urlopen(f"{self._url}/api/v1/{path}?{query}", timeout=30) as response:  # noqa: S310
            found: list[Any] = json.load(response)["data"]["result"]
        return found


def main(words: list[str]) -> None:
    """Draw the rows."""
    url, namespace, name, start, end, folder, *rows = words
    span = (datetime.fromisoformat(start).timestamp(), datetime.fromisoformat(end).timestamp())
    source = _PanelData(url, namespace, name, *span)
    mpl.rcParams.update({"font.size": 8, "axes.titlesize": 9, "axes.edgecolor": "#aaaaaa"})
    for spec, prefix in ((SERVICE, "service"), (FLEET, "services")):
        for row in spec.rows:
            if rows and row.title not in rows:
                continue
            slug = row.title.lower().replace(" ", "-")
            _draw_row(source, spec, row, Path(folder) / f"dashboard-{prefix}-{slug}.png")


def _draw_row(source: _PanelData, spec: DashboardSpec, row: Row, path: Path) -> None:
    lines = -(-len(row.panels) // _COLUMNS)
    canvas = Canvas(figsize=(13.5, 2.7 * lines), layout="constrained")
    grid = canvas.subplots(lines, _COLUMNS, squeeze=False).flatten()
    for axes, panel in zip(grid, row.panels, strict=False):
        axes.set_title(panel.title, loc="left", fontweight="bold")
        if panel.look in {Look.NUMBERS, Look.TABLE}:
            _write(source, axes, panel)
        else:
            _plot(source, spec, axes, panel)
    for axes in grid[len(row.panels) :]:
        axes.set_axis_off()
    canvas.savefig(path, dpi=80)


def _legend(query: Query, labels: dict[str, str]) -> str:
    text = query.legend
    for name, value in labels.items():
        text = text.replace("{{" + name + "}}", value)
    return text


def _format(value: float, unit: PanelUnit) -> str:
    if unit is PanelUnit.SHARE:
        return f"{value:.1%}"
    if unit is PanelUnit.BYTES:
        return f"{value / (1 << 20):.0f} MiB"
    if unit is PanelUnit.TIME:
        return datetime.fromtimestamp(value / 1000, UTC).strftime("%H:%M:%S")
    return f"{value:,.4g}{_SUFFIXES.get(unit, '')}"


def _day(unix_s: float) -> float:
    """Return a time in matplotlib's unit, days."""
    return float(dates.date2num(datetime.fromtimestamp(unix_s, UTC)))


def _write(source: _PanelData, axes: Axes, panel: Panel) -> None:
    axes.set_axis_off()
    rows = [
        (_legend(query, one["metric"]), _format(float(one["value"][1]), panel.unit))
        for query in panel.queries
        for one in source.latest(query.expr)
    ]
    values = panel.look is Look.NUMBERS or panel.unit is not PanelUnit.COUNT
    for number, (name, value) in enumerate(rows[:9]):
        at = 0.92 - 0.11 * number
        axes.text(0.02, at, name, transform=axes.transAxes)
        if values:
            axes.text(0.98, at, value, transform=axes.transAxes, ha="right", fontweight="bold")
    if not rows:
        axes.text(0.02, 0.92, "no data", transform=axes.transAxes, color="#888888")


def _plot(source: _PanelData, spec: DashboardSpec, axes: Axes, panel: Panel) -> None:
    found = [
        (query, _legend(query, one["metric"]), one["values"])
        for query in panel.queries
        for one in source.series(query.expr)
    ]
    base: dict[float, float] = {}
    for number, (query, label, points) in enumerate(found):
        times = [_day(at) for at, _ in points]
        values = [float(value) for _, value in points]
        colour = _COLOURS[number % len(_COLOURS)]
        if panel.look is Look.STACKED:
            below = [base.get(at, 0.0) for at, _ in points]
            values = [low + value for low, value in zip(below, values, strict=True)]
            base |= {at: value for (at, _), value in zip(points, values, strict=True)}
            axes.fill_between(times, below, values, color=colour, alpha=0.5, label=label, lw=0)
        else:
            style = "--" if query.dashed else "-"
            axes.plot(times, values, style, color=colour, label=label, lw=1.3)
    for limit in panel.limits:
        axes.axhline(limit, color="#c4162a", ls=":", lw=1)
    if spec.of_service and panel.title in {"Replicas", "Token budget"}:
        metric = (
            f'{METRIC_SERVICE_DECISION_TIME}{{namespace="$namespace",llmservice="$llmservice"}}'
        )
        begin, end = axes.get_xlim()
        for one in source.series(metric):
            text = f"{one['metric']['knob']}: {one['metric']['reason']}"
            for at in {_day(float(value)) for _, value in one["values"]}:
                if begin <= at <= end:
                    axes.axvline(at, color="#8f3bb8", lw=0.8)
                    axes.annotate(text, (at, 1), xycoords=("data", "axes fraction"), rotation=90,
                                  fontsize=6, va="top", ha="right", color="#8f3bb8")  # fmt: skip
    axes.set_ylim(bottom=0, top=None if panel.largest is None else panel.largest * 1.05)
    axes.yaxis.set_major_formatter(
        ticker.FuncFormatter(lambda value, _: _format(float(value), panel.unit))
    )
    axes.xaxis.set_major_locator(dates.AutoDateLocator(maxticks=4))
    axes.xaxis.set_major_formatter(dates.DateFormatter("%H:%M:%S"))
    axes.grid(color="#eeeeee")
    axes.spines[["top", "right"]].set_visible(False)
    if found:
        axes.legend(fontsize=6, loc="best", ncols=1 if len(found) < 5 else 2, framealpha=0.6)
    else:
        axes.text(0.02, 0.9, "no data", transform=axes.transAxes, color="#888888")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Write the report of a run as one HTML file.

The page needs no network: it contains its styles and drawings, has no scripts, and its content
security policy forbids requests. Texts of a trace or a server are escaped. A run's folder has no
prompts, so the page has none.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from goodput_core.files import write_atomically
from goodput_core.slo.judging import MissReason
from goodput_core.slo.record import Outcome
from goodput_core.slo.targets import parse_objective
from goodput_replay.report.drawings import draw_all
from goodput_replay.report.figures.canvas import COLOURS
from goodput_replay.report.slowest import find_slowest
from goodput_replay.run.columns import count_gaps, load_columns
from goodput_replay.run.files import REPORT_FILE
from goodput_replay.run.formatting import (
    describe_emulation,
    format_confidence,
    format_count,
    format_ms,
    format_percent,
    format_rate,
    format_seconds,
)
from goodput_replay.run.summary import (
    ClassSummary,
    LengthPinning,
    Quantiles,
    SLOSummary,
    Summary,
    read_summary,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from jinja2 import Template


__all__ = ["render", "write_report"]

_PINNING: Final = {
    LengthPinning.HEADER: "pinned, hidden from the scheduler",
    LengthPinning.MAX_TOKENS: "disclosed by max_tokens",
    LengthPinning.NONE: "not pinned",
}
_FILTERS: Final = {
    "confidence": format_confidence,
    "count": format_count,
    "duration_s": format_seconds,
    "emulation": describe_emulation,
    "ms": format_ms,
    "percent": format_percent,
    "rate": format_rate,
}
_SCALE_STARTS: Final = (0.99, 0.95, 0.9, 0.8, 0.5, 0.0)


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the report of the run in `folder` atomically.

    Args:
        folder: folder of a finished run.
        out: file to write; None for `report.html` in the folder.

    Returns:
        The written file.

    Raises:
        InputError: the folder has no readable run.
        OSError: the file could not be written.
    """
    path = folder / REPORT_FILE if out is None else out
    write_atomically(path, render(folder).encode())
    return path


def render(folder: Path) -> str:
    """Return the HTML of the report.

    Raises:
        InputError: the folder has no readable run.
    """
    summary = read_summary(folder)
    columns = load_columns(folder)
    lag = summary.validity.lag_ms
    rows = [*summary.classes, summary.overall]
    return _load_template().render(
        summary=summary,
        started=_format_start(summary.run.started_at),
        title=_make_title(summary),
        cards=[_Card.of(summary, one) for one in summary.classes],
        names=[one.name for one in summary.classes],
        colours=COLOURS,
        lag_p99=None if lag is None else lag.p99,
        lag_max=None if lag is None else lag.max,
        pinning=_PINNING[summary.target.pinning],
        drawings=draw_all(summary, columns, count_gaps(folder)),
        quantiles=list(_make_quantile_rows(summary)),
        rows=rows,
        outcome_names=[o.value for o in Outcome if any(o.value in r.outcomes for r in rows)],
        reason_names=[m.value for m in MissReason if any(m.value in r.misses for r in rows)],
        slowest=find_slowest(folder, columns, start_s=summary.window.start_s),
        command=shlex.join(summary.run.command),
        style=Markup(_read_resource("style.css")),  # noqa: S704 - from this package
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Card:
    """A class on the first screen.

    Args:
        figures: results of the class.
        slo: SLO targets of the class; None if only its rows have targets.
        scale_start: share at the left end of the bar; the right end is 100 %.
        objective: objective of the class; None if it has none.
    """

    figures: ClassSummary
    slo: SLOSummary | None
    scale_start: float
    objective: float | None

    @classmethod
    def of(cls, summary: Summary, figures: ClassSummary) -> _Card:
        slo = next((one for one in summary.promises if one.name == figures.name), None)
        objective = None if figures.objective is None else float(parse_objective(figures.objective))
        shown = [share for share in (figures.attainment, objective) if share is not None]
        if figures.interval is not None:
            shown.append(figures.interval.lower)
        lowest = min(shown, default=0.0)
        start = next(s for s in _SCALE_STARTS if s < lowest or s == 0)
        return cls(figures=figures, slo=slo, scale_start=start, objective=objective)

    def place(self, share: float) -> float:
        """Return the position of a share on the bar, percent of its width."""
        return round(100 * (share - self.scale_start) / (1 - self.scale_start), 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _QuantileRow:
    name: str
    first: bool
    measure: str
    target: int | None
    values: Quantiles


def _make_quantile_rows(summary: Summary) -> Iterator[_QuantileRow]:
    slo_by_class = {slo.name: slo for slo in summary.promises}
    for one in summary.classes:
        slo = slo_by_class.get(one.name)
        ttft, tpot, e2e = (
            (None, None, None) if slo is None else (slo.ttft_ms, slo.tpot_ms, slo.e2e_ms)
        )
        measures = (
            ("TTFT", one.ttft_ms, ttft),
            ("TTFT from send", one.ttft_from_send_ms, None),
            ("TPOT", one.tpot_ms, tpot),
            ("TBT, all gaps", one.tbt_ms, None),
            ("E2E", one.e2e_ms, e2e),
        )
        first = True
        for measure, values, target in measures:
            if values is not None:
                yield _QuantileRow(
                    name=one.name, first=first, measure=measure, target=target, values=values
                )
                first = False


def _make_title(summary: Summary) -> str:
    target = summary.target.service or summary.target.url
    how = "replayed against" if summary.emulation is None else "emulated on"
    return f"{summary.trace.name}, {how} {target}"


def _format_start(text: str) -> str:
    """Format a time as `4 March 2026, 05:06:07 UTC`; return other text unchanged."""
    try:
        at = datetime.fromisoformat(text).astimezone(UTC)
    except ValueError:
        return text
    return f"{at.day} {at:%B %Y, %H:%M:%S} UTC"


def _load_template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(_FILTERS)
    return environment.from_string(_read_resource("template.html.j2"))


def _read_resource(name: str) -> str:
    return files("goodput_replay.report").joinpath(name).read_text(encoding="utf-8")

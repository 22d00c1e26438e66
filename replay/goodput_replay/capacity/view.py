"""What a search found, for a person and for programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from goodput_core.errors import ExitCode
from goodput_core.units import format_number
from goodput_replay.capacity.probing import Tried
from goodput_replay.capacity.search import Level, boundary

if TYPE_CHECKING:
    from collections.abc import Sequence
    from fractions import Fraction

__all__ = ["Capacity", "as_json", "conclude", "table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The answer.

    Args:
        level: whether the rate is shown to hold or only seems to.
        best: the probe with the highest rate that holds; None: none does.
        above: the probe with the lowest rate above it that does not; None: none was found.
        holes: probes that miss an objective although a higher rate holds.
    """

    level: Level
    best: Tried | None
    above: Tried | None
    holes: tuple[Tried, ...]

    @property
    def exit_code(self) -> ExitCode:
        """0: shown to hold; 1: no rate holds; 2: it only seems to."""
        if self.best is None:
            return ExitCode.FAIL
        return ExitCode.PASS if self.level is Level.SHOWN else ExitCode.INCONCLUSIVE

    @property
    def sentence(self) -> str:
        """The answer in words."""
        if self.best is None:
            return "no rate that was tried keeps every class's objective"
        rate = format_number(self.best.summary.overall.offered_per_s)
        scale = float(self.best.probe.scale)
        verb = "holds" if self.level is Level.SHOWN else "seems to hold, but is not shown to"
        words = [f"{rate} requests/s ({scale:g} times the trace's rate) {verb}; {self._next()}"]
        if self.level is Level.SEEMS:
            words.append(self.best.summary.verdict.sentence.removesuffix("."))
        if self.holes:
            broken = ", ".join(
                f"{format_number(t.summary.overall.offered_per_s)}/s" for t in self.holes
            )
            words.append(
                f"A lower rate, {broken}, did not hold: there is no sharp limit; see whether "
                "another --seed, or a longer --window, says the same"
            )
        return ". ".join(words)

    def _next(self) -> str:
        if self.above is None:
            return "no higher rate was tried"
        verb = "does not" if self.above.probe.level is Level.BROKEN else "is not shown to"
        summary = self.above.summary
        return f"{format_number(summary.overall.offered_per_s)}/s {verb} ({summary.verdict.kind})"


def conclude(tried: Sequence[Tried]) -> Capacity:
    """The answer from all probes."""
    by_scale: dict[Fraction, Tried] = {t.probe.scale: t for t in tried}
    level, best, above = boundary([t.probe for t in tried])
    holes = tuple(
        t
        for t in tried
        if best is not None and t.probe.scale < best and t.probe.level is Level.BROKEN
    )
    return Capacity(
        level=level,
        best=None if best is None else by_scale[best],
        above=None if above is None else by_scale[above],
        holes=holes,
    )


def table(tried: Sequence[Tried]) -> Table:
    """All probes by their rate."""
    view = Table(title="probes", title_justify="left", title_style="", box=None, pad_edge=False)
    for name in ("scale", "offered/s", "goodput/s"):
        view.add_column(name, justify="right")
    names = [c.name for c in tried[0].summary.classes if c.objective is not None]
    for name in names:
        view.add_column(name or "all", justify="right")
    view.add_column("verdict")
    for one in sorted(tried, key=lambda t: t.probe.scale):
        summary = one.summary
        shares = {c.name: c.attainment for c in summary.classes}
        cells = ["–" if (share := shares.get(name)) is None else f"{share:.2%}" for name in names]
        verdict = summary.verdict
        view.add_row(
            f"{float(one.probe.scale):g}",
            format_number(summary.overall.offered_per_s),
            format_number(summary.overall.goodput_per_s),
            *cells,
            f"{verdict.kind} ({verdict.reason})",
        )
    return view


def as_json(capacity: Capacity, tried: Sequence[Tried]) -> dict[str, Any]:
    """The answer and the probes, rates in requests per second."""
    return {
        "sentence": capacity.sentence,
        "shown": capacity.best is not None and capacity.level is Level.SHOWN,
        "capacity": None if capacity.best is None else _probe(capacity.best),
        "does_not_hold": None if capacity.above is None else _probe(capacity.above),
        "lower_that_do_not_hold": [_probe(one) for one in capacity.holes],
        "probes": [_probe(one) for one in sorted(tried, key=lambda t: t.probe.scale)],
    }


def _probe(one: Tried) -> dict[str, Any]:
    summary = one.summary
    return {
        "rate_scale": float(one.probe.scale),
        "offered_per_s": summary.overall.offered_per_s,
        "goodput_per_s": summary.overall.goodput_per_s,
        "attainment": {c.name: c.attainment for c in summary.classes},
        "verdict": summary.verdict.kind.value,
        "reason": summary.verdict.reason.value,
        "run": str(one.folder),
    }

"""`replay capacity`: the highest rate at which every objective holds."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.table import Table

from goodput_core.cli import CommandParser, argument_type, parse_whole
from goodput_core.errors import ExitCode, InputError, Interrupted, UsageError
from goodput_core.units import NS_PER_S, format_duration, format_number
from goodput_replay.sweep.probe import (
    PlanLength,
    ProbeRun,
    can_be_sent,
    replays,
    survey_plan,
    try_rate,
)
from goodput_replay.sweep.search import RateLevel, SearchLimits, beyond, boundary, next_scale
from goodput_traces.transforms import parse_factor

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Capacity", "as_json", "conclude", "main", "make_parser", "table"]

# A limit counts requests after the rate is scaled: rates would not be nested any more.
_NOT_HERE: Final = {"--limit": "cut the trace by time with --window, so that rates stay nested"}
_WIDEST: Final = 1000
_OURS: Final = ("--rate-scale", "--gate", "--dry-run", "--no-report", "--force", "--abort-on")


def main(argv: Sequence[str]) -> int:
    """Search, and say what holds.

    Args:
        argv: the arguments after `replay capacity`.

    Returns:
        0: a rate is shown to hold; 1: none that was tried does; 2: one only seems to; 3: a probe
        was invalid, because the client could not keep up.

    Raises:
        GoodputError: the search could not begin, or a replay failed.
        Interrupted: by a signal; what was found until then has been printed.
    """
    given, rest = make_parser().parse_known_args(argv)
    for option in _OURS:
        if any(text == option or text.startswith(f"{option}=") for text in rest):
            raise UsageError(f"replay capacity: {option} is the search's own; leave it out")
    for option, instead in _NOT_HERE.items():
        if any(text == option or text.startswith(f"{option}=") for text in rest):
            raise UsageError(f"replay capacity: {option}: {instead}")
    console = Console(stderr=True)
    limits = SearchLimits(
        start=given.start, precision=given.precision, most=given.most, probes=given.probes
    )
    out: Path = given.out or Path("runs") / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-capacity"
    if out.exists():
        raise UsageError(f"--out {out}: exists already; name another folder, or remove it")
    tried: list[ProbeRun] = []
    with replays() as run:
        _announce(survey_plan(run, rest), rest, given.probes, console)
        try:
            while (scale := next_scale([t.probe for t in tried], limits)) is not None:
                folder = out / f"scale-{float(scale):.6g}"
                try:
                    with console.status(f"{float(scale):g} times the trace's rate …"):
                        one = try_rate(run, rest, scale, folder)
                except UsageError as error:
                    probes = [t.probe for t in tried]
                    if not beyond(scale, probes) or can_be_sent(run, rest, scale):
                        raise
                    console.print(f"not tried: {error}", highlight=False, soft_wrap=True)
                    limits = limits.without(scale, probes)
                    continue
                _check(one, illustrative=given.illustrative)
                tried.append(one)
                _tell(one, console)
                if not one.summary.validity.valid:
                    break
        except Interrupted:
            # What was found so far took as long as it took.
            if tried:
                _conclude(tried, console, out, as_text=not given.json)
            raise
    return _conclude(tried, console, out, as_text=not given.json)


def _announce(plan: PlanLength, rest: Sequence[str], probes: int, console: Console) -> None:
    """In real time, say how long it takes before it does."""
    if any(text == "--emulate" or text.startswith("--emulate=") for text in rest):
        return
    length = format_duration(round(plan.duration_s) * NS_PER_S)
    console.print(
        f"each rate takes {length} of real time and more; usually six to ten are tried, and "
        f"{probes} at most",
        highlight=False,
    )


def _check(one: ProbeRun, *, illustrative: bool) -> None:
    emulation = one.summary.emulation
    if emulation is not None and emulation.illustrative and not illustrative:
        raise InputError(
            f"device {emulation.device}: its figures illustrate a publication and fit no device "
            "one can buy; add --illustrative if its capacity is what you want"
        )


def _tell(one: ProbeRun, console: Console) -> None:
    summary = one.summary
    console.print(
        f"{float(one.probe.scale):8.4g} × the trace's rate, "
        f"{summary.overall.offered_per_s:8.4g}/s: {summary.verdict.kind}"
        + (" (seems to hold)" if one.probe.level is RateLevel.SEEMS else ""),
        highlight=False,
    )


def _conclude(tried: Sequence[ProbeRun], console: Console, out: Path, *, as_text: bool) -> int:
    invalid = next((t for t in tried if not t.summary.validity.valid), None)
    if invalid is not None:
        console.print(
            f"error: at {float(invalid.probe.scale):g} times the trace's rate the run is invalid: "
            f"{invalid.summary.validity.sentence}",
            highlight=False,
        )
    capacity = conclude([t for t in tried if t is not invalid])
    if as_text:
        # The table has a width of its own: a terminal wraps it, nothing is cut off.
        screen = Console(width=_WIDEST)
        if len(tried) > (invalid is not None):
            screen.print(table([t for t in tried if t is not invalid]))
        screen.print(f"\n{capacity.sentence}\nruns: {out}", highlight=False, soft_wrap=True)
    else:
        answer = as_json(capacity, [t for t in tried if t is not invalid])
        sys.stdout.write(json.dumps(answer, indent=2) + "\n")
    return ExitCode.INVALID if invalid is not None else capacity.exit_code


def make_parser() -> CommandParser:
    """Build the parser of `replay capacity`."""
    parser = CommandParser(
        "replay capacity",
        summary="Find the highest rate of a trace at which every class keeps its objective, by "
        "replaying it at rates between which the search closes in. All other options are those "
        "of `replay`.",
        usage="replay capacity --trace TRACE (--emulate MANIFEST | --target URL | -f MANIFEST) "
        "[OPTION ...]",
        allow_abbrev=False,
        examples=(
            "replay capacity --trace sample --emulate examples/chat.yaml",
            "replay capacity --trace prod.parquet --emulate examples/chat.yaml --precision 2",
            "replay capacity --trace sample --target http://127.0.0.1:8000 --slo examples/slo.yaml",
            "replay capacity --trace prod.parquet -f examples/chat.yaml --window 10m..15m --most 4",
        ),
    )
    parser.add_argument(
        "--precision",
        metavar="PERCENT",
        type=argument_type(_percent, "percentage"),
        default=Fraction(1, 20),
        help="the gap between a rate that holds and one that does not, at most (default: 5)",
    )
    parser.add_argument(
        "--start",
        metavar="SCALE",
        type=argument_type(parse_factor, "scale"),
        default=Fraction(1),
        help="times the trace's rate to try first (default: 1)",
    )
    parser.add_argument(
        "--most",
        metavar="SCALE",
        type=argument_type(parse_factor, "scale"),
        default=Fraction(256),
        help="never more than so many times the trace's rate (default: 256)",
    )
    parser.add_argument(
        "--probes",
        metavar="N",
        type=argument_type(lambda text: parse_whole(text, 1, 1000, "a number"), "number"),
        default=24,
        help="at most N rates (default: 24)",
    )
    parser.add_argument(
        "-o", "--out", metavar="DIR", type=Path, help="the folder of the probes' runs"
    )
    parser.add_argument(
        "--illustrative",
        action="store_true",
        help="answer for a device profile whose figures are only illustrative, too",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _percent(text: str) -> Fraction:
    try:
        value = Fraction(Decimal(text.removesuffix("%"))) / 100
    except (ArithmeticError, ValueError) as error:
        raise ValueError(f"{text[:40]!r} is not a percentage; write for example 2") from error
    if not Fraction(1, 1000) <= value <= 1:
        raise ValueError(f"{text[:40]!r} is out of bounds; give 0.1 to 100")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Result of a capacity search.

    Args:
        level: whether the rate is shown to hold or only seems to hold.
        best: probe with the highest rate that holds; None if none holds.
        above: probe with the lowest higher rate that does not hold; None if none was found.
        holes: probes that miss an objective although a higher rate holds.
    """

    level: RateLevel
    best: ProbeRun | None
    above: ProbeRun | None
    holes: tuple[ProbeRun, ...]

    @property
    def exit_code(self) -> ExitCode:
        """0: shown to hold; 1: no rate holds; 2: it only seems to."""
        if self.best is None:
            return ExitCode.FAIL
        return ExitCode.PASS if self.level is RateLevel.SHOWN else ExitCode.INCONCLUSIVE

    @property
    def sentence(self) -> str:
        """The answer in words."""
        if self.best is None:
            return "no rate that was tried keeps every class's objective"
        rate = format_number(self.best.summary.overall.offered_per_s)
        scale = float(self.best.probe.scale)
        verb = "holds" if self.level is RateLevel.SHOWN else "seems to hold, but is not shown to"
        words = [f"{rate} requests/s ({scale:g} times the trace's rate) {verb}; {self._next()}"]
        if self.level is RateLevel.SEEMS:
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
        verb = "does not" if self.above.probe.level < RateLevel.SEEMS else "is not shown to"
        summary = self.above.summary
        return f"{format_number(summary.overall.offered_per_s)}/s {verb} ({summary.verdict.kind})"


def conclude(tried: Sequence[ProbeRun]) -> Capacity:
    """The answer from all probes."""
    by_scale: dict[Fraction, ProbeRun] = {t.probe.scale: t for t in tried}
    level, best, above = boundary([t.probe for t in tried])
    holes = tuple(
        t
        for t in tried
        if best is not None and t.probe.scale < best and t.probe.level < RateLevel.SEEMS
    )
    return Capacity(
        level=level,
        best=None if best is None else by_scale[best],
        above=None if above is None else by_scale[above],
        holes=holes,
    )


def table(tried: Sequence[ProbeRun]) -> Table:
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


def as_json(capacity: Capacity, tried: Sequence[ProbeRun]) -> dict[str, Any]:
    """The answer and the probes, rates in requests per second."""
    return {
        "sentence": capacity.sentence,
        "shown": capacity.best is not None and capacity.level is RateLevel.SHOWN,
        "capacity": None if capacity.best is None else _probe(capacity.best),
        "does_not_hold": None if capacity.above is None else _probe(capacity.above),
        "lower_that_do_not_hold": [_probe(one) for one in capacity.holes],
        "probes": [_probe(one) for one in sorted(tried, key=lambda t: t.probe.scale)],
    }


def _probe(one: ProbeRun) -> dict[str, Any]:
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

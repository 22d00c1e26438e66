"""`replay capacity`: find the highest rate at which every class meets its objective."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from goodput_core.cli import CommandParser, argument_type, parse_whole
from goodput_core.errors import ExitCode, InputError, Interrupted, UsageError
from goodput_core.text import printable
from goodput_core.units import NS_PER_S, format_duration, format_number
from goodput_replay.runs.formatting import session_mode
from goodput_replay.runs.tables import choose_table, open_console
from goodput_replay.sweep.search import RateLevel, SearchLimits, beyond, boundary, next_scale
from goodput_traces.transforms import parse_factor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from goodput_replay.sweep.probe import ProbePlan, ProbeRun  # noqa: TC004 - loads the schema of a summary

__all__ = ["Capacity", "conclude", "main", "make_parser", "tables"]

_SET_BY_SEARCH: Final = "is set by the search; remove it"
_NOT_COMBINABLE: Final = "cannot be combined with a search; remove it"
_REJECTED: Final = {
    "--rate-scale": _SET_BY_SEARCH,
    "--dry-run": _SET_BY_SEARCH,
    "--no-report": _SET_BY_SEARCH,
    "--gate": _NOT_COMBINABLE,
    "--force": _NOT_COMBINABLE,
    "--abort-on": _NOT_COMBINABLE,
    # A limit is applied after the rate is scaled.
    "--limit": "would keep different requests at different rates; limit the trace by time with "
    "--window",
}


def main(argv: Sequence[str]) -> int:
    """Search for the capacity and print it.

    Args:
        argv: arguments after `replay capacity`.

    Returns:
        0 if a rate is shown to be sustained, 2 if one only seems to be, 1 if none even seems to be,
        3 if a probe was invalid because the client could not keep up.

    Raises:
        GoodputError: the search could not begin, or a replay failed.
        Interrupted: by a signal, after the results so far were printed.
    """
    arguments, replay_arguments = make_parser().parse_known_args(argv)
    from goodput_replay.sweep.probe import replays  # noqa: PLC0415 - loads the schema of a summary

    for option, problem in _REJECTED.items():
        if _has(replay_arguments, option):
            raise UsageError(f"replay capacity: {option} {problem}")
    if arguments.start is not None and arguments.start > arguments.most:
        raise UsageError(
            f"replay capacity: --start {float(arguments.start):g} is above --most "
            f"{float(arguments.most):g}; lower --start, or raise --most"
        )
    console = Console(stderr=True)
    limits = SearchLimits(
        start=Fraction(1) if arguments.start is None else arguments.start,
        precision=arguments.precision,
        most=arguments.most,
        probes=arguments.probes,
    )
    out: Path = arguments.out or Path("runs") / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-capacity"
    if out.exists():
        raise UsageError(f"--out {out}: exists already; name another folder, or remove it")
    probes: list[ProbeRun] = []
    with replays(replay_arguments) as run:
        plan = run.plan()
        if not plan.has_objective:
            raise UsageError(
                "replay capacity: no class with requests has an objective, by which rates are "
                "judged; add one, such as 'objective: 99%', to its targets"
            )
        if not _has(replay_arguments, "--emulate"):
            console.print(
                f"each rate {_describe_length(plan)}; usually six to ten are "
                f"tried, and at most {arguments.probes}",
                highlight=False,
                soft_wrap=True,
            )
        try:
            while (scale := next_scale(probes, limits)) is not None:
                try:
                    with console.status(f"{float(scale):g} times the trace's rate …"):
                        probe = run.try_rate(scale, out / f"scale-{float(scale):.6g}")
                except UsageError as error:
                    if not beyond(scale, probes) or run.can_send(scale):
                        raise
                    _print_line(f"not tried: {error}", console)
                    limits = limits.without(scale, probes)
                    continue
                _check_device(probe, illustrative=arguments.illustrative)
                probes.append(probe)
                _print_probe(probe, console)
                if not probe.summary.validity.valid:
                    break
        except Interrupted:
            if probes:
                _print_result(probes, plan, console, out, json_output=arguments.json)
            raise
    return _print_result(probes, plan, console, out, json_output=arguments.json)


def _describe_length(plan: ProbePlan) -> str:
    length = format_duration(round(plan.duration_s) * NS_PER_S)
    if plan.causal:
        return (
            "takes as long as its sessions, which depends on the responses (in the trace: "
            f"{length})"
        )
    return f"takes at least {length} of real time"


def _has(arguments: Sequence[str], option: str) -> bool:
    return any(text == option or text.startswith(f"{option}=") for text in arguments)


def _check_device(probe: ProbeRun, *, illustrative: bool) -> None:
    emulation = probe.summary.emulation
    if emulation is not None and emulation.illustrative and not illustrative:
        raise InputError(
            f"the device profile {emulation.device} is illustrative: its figures fit no device on "
            "the market; add --illustrative to find its capacity anyway"
        )


def _print_probe(probe: ProbeRun, console: Console) -> None:
    summary = probe.summary
    console.print(
        f"{float(probe.scale):8.4g} × the trace's rate, "
        f"{summary.overall.offered_per_s:8.4g}/s: {summary.verdict.kind}"
        + (" (seems sustained)" if probe.level is RateLevel.SEEMS else ""),
        highlight=False,
    )


def _print_line(text: str, console: Console) -> None:
    console.print(printable(text), highlight=False, markup=False, soft_wrap=True)


def _print_result(
    probes: Sequence[ProbeRun], plan: ProbePlan, console: Console, out: Path, *, json_output: bool
) -> int:
    """Print the capacity and the valid probes, and return the exit code."""
    valid = [probe for probe in probes if probe.summary.validity.valid]
    capacity = conclude(valid)
    for probe in probes:
        if not probe.summary.validity.valid:
            _print_line(
                f"error: at {float(probe.scale):g} times the trace's rate the run is invalid: "
                f"{probe.summary.validity.sentence}",
                console,
            )
    if json_output:
        from goodput_replay.runs.json_results import encode_json  # noqa: PLC0415 - loads msgspec
        from goodput_replay.sweep.capacity_result import describe_capacity  # noqa: PLC0415

        sys.stdout.write(encode_json(describe_capacity(capacity, valid, plan)).decode())
    else:
        screen = open_console()
        if valid:
            screen.print(choose_table(tables(valid), screen))
        screen.print()
        screen.print(printable(capacity.sentence), highlight=False, markup=False)
        _print_line(f"runs: {out}", screen)
    return capacity.exit_code if len(valid) == len(probes) else ExitCode.INVALID


def make_parser() -> CommandParser:
    """Build the parser of `replay capacity`."""
    parser = CommandParser(
        "replay capacity",
        summary="Find the highest rate of a trace at which every class meets its objective, by "
        "replaying it at different rates. The options of `replay` also apply.",
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
    add = parser.add_argument
    add(
        "--precision",
        metavar="PERCENT",
        type=argument_type(_percent, "percentage"),
        default=Fraction(1, 20),
        help="largest gap between the sustained rate and the next higher one (default: 5)",
    )
    add(
        "--start",
        metavar="SCALE",
        type=argument_type(parse_factor, "scale"),
        help="first rate, as a factor of the trace's rate (default: 1)",
    )
    add(
        "--most",
        metavar="SCALE",
        type=argument_type(parse_factor, "scale"),
        default=Fraction(256),
        help="highest rate, as a factor of the trace's rate (default: 256)",
    )
    add(
        "--probes",
        metavar="N",
        type=argument_type(lambda text: parse_whole(text, 1, 1000, "a number"), "number"),
        default=24,
        help="maximum number of tried rates (default: 24)",
    )
    add("-o", "--out", metavar="DIR", type=Path, help="folder of the runs, one per rate")
    add("--illustrative", action="store_true", help="accept an illustrative device profile")
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _percent(text: str) -> Fraction:
    try:
        value = Fraction(Decimal(text.removesuffix("%"))) / 100
    except (ArithmeticError, ValueError) as error:
        raise ValueError(f"{text[:40]!r} is not a percentage; write 2, for example") from error
    if not Fraction(1, 1000) <= value <= 1:
        raise ValueError(f"{text[:40]!r} is out of bounds; give 0.1 to 100")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Result of a capacity search.

    Args:
        level: SHOWN if the rate of `best` is shown to be sustained, otherwise SEEMS (also without
            a `best`).
        best: probe with the highest sustained rate; None if no rate even seems sustained.
        above: probe with the lowest higher rate that is not sustained; None if there is none.
        missed_below: probes with a lower rate than `best` that missed an objective.
    """

    level: RateLevel
    best: ProbeRun | None
    above: ProbeRun | None
    missed_below: tuple[ProbeRun, ...]

    @property
    def exit_code(self) -> ExitCode:
        """0 if a rate is shown to be sustained, 2 if one only seems to be, otherwise 1."""
        if self.best is None:
            return ExitCode.FAIL
        return ExitCode.PASS if self.level is RateLevel.SHOWN else ExitCode.INCONCLUSIVE

    @property
    def sentence(self) -> str:
        """The result in words."""
        if self.best is None:
            return "no tried rate meets every class's objective"
        shown = self.level is RateLevel.SHOWN
        scale = float(self.best.scale)
        verb = "is sustained" if shown else "seems to be sustained, but is not shown to be"
        load = f"{scale:g} times the trace's rate"
        if self.best.summary.run.sessions is not None:
            load += ", causal sessions"
        words = [f"{_per_s(self.best)} ({load}) {verb}; {self._next()}"]
        if not shown:
            words.append(self.best.summary.verdict.sentence.removesuffix("."))
        if self.missed_below:
            subject = "Lower rates were" if len(self.missed_below) > 1 else "A lower rate was"
            rates = ", ".join(map(_per_s, self.missed_below))
            words.append(
                f"{subject} not sustained ({rates}), so the limit is not sharp; repeat the search "
                "with other values of --seed, or with a longer --window"
            )
        return ". ".join(words)

    def _next(self) -> str:
        if self.above is None:
            return "no higher rate was tried"
        verb = "is not" if self.above.level < RateLevel.SEEMS else "is not shown to be"
        return f"{_per_s(self.above)} {verb} ({self.above.summary.verdict.kind})"


def _per_s(probe: ProbeRun) -> str:
    return f"{format_number(probe.summary.overall.offered_per_s)} requests/s"


def conclude(probes: Sequence[ProbeRun]) -> Capacity:
    """Derive the capacity from valid probes."""
    by_scale = {probe.scale: probe for probe in probes}
    level, best, above = boundary(probes)
    missed_below = tuple(
        probe
        for probe in probes
        if best is not None and probe.scale < best and probe.level < RateLevel.SEEMS
    )
    return Capacity(
        level=level,
        best=None if best is None else by_scale[best],
        above=None if above is None else by_scale[above],
        missed_below=missed_below,
    )


def tables(probes: Sequence[ProbeRun]) -> Iterator[Table]:
    """Yield tables of all probes in the order of their rates, the widest first.

    The last one has one column for all classes, which wraps, so class names are never cut off.
    """
    yield _table(probes)
    yield _table(probes, goodput=False)
    yield _table(probes, goodput=False, reason=False)
    yield _table(probes, goodput=False, reason=False, class_columns=False)


def _table(
    probes: Sequence[ProbeRun],
    *,
    goodput: bool = True,
    reason: bool = True,
    class_columns: bool = True,
) -> Table:
    causal = session_mode(probes[0].summary.run) == "causal"
    title = "probes with causal sessions" if causal else "probes"
    view = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False)
    for name in ("scale", "offered/s", "goodput/s") if goodput else ("scale", "offered/s"):
        view.add_column(name, justify="right", no_wrap=True)
    names = [c.name for c in probes[0].summary.classes if c.objective is not None]
    shown = [printable(name) or "all" for name in names]
    if class_columns:
        for name in shown:
            view.add_column(Text(name), justify="right", no_wrap=True)
    else:
        view.add_column("attained", overflow="fold")
    view.add_column("verdict", no_wrap=True)
    for probe in sorted(probes, key=lambda probe: probe.scale):
        overall, verdict = probe.summary.overall, probe.summary.verdict
        attained = {c.name: c.attainment for c in probe.summary.classes}
        shares = ["–" if (one := attained.get(name)) is None else f"{one:.2%}" for name in names]
        if not class_columns:
            lines = (f"{share} {name}" for share, name in zip(shares, shown, strict=True))
            shares = ["\n".join(lines)]
        cells = [
            f"{float(probe.scale):g}",
            format_number(overall.offered_per_s),
            *([format_number(overall.goodput_per_s)] if goodput else []),
            *shares,
            f"{verdict.kind} ({verdict.reason})" if reason else str(verdict.kind),
        ]
        view.add_row(*map(Text, cells))
    return view

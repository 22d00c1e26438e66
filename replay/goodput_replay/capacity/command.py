"""`replay capacity`: the highest rate at which every objective holds."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console

from goodput_core.cli import CommandParser, argument_type, parse_whole
from goodput_core.errors import ExitCode, InputError, Interrupted, UsageError
from goodput_core.units import NS_PER_S, format_duration
from goodput_replay.capacity.probing import (
    PlanLength,
    Tried,
    can_be_sent,
    survey_plan,
    try_rate,
)
from goodput_replay.capacity.replays import replays
from goodput_replay.capacity.search import Level, Limits, beyond, next_scale
from goodput_replay.capacity.view import as_json, conclude, table
from goodput_traces.transforms import parse_factor

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

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
    given, rest = _parser().parse_known_args(argv)
    for option in _OURS:
        if any(text == option or text.startswith(f"{option}=") for text in rest):
            raise UsageError(f"replay capacity: {option} is the search's own; leave it out")
    for option, instead in _NOT_HERE.items():
        if any(text == option or text.startswith(f"{option}=") for text in rest):
            raise UsageError(f"replay capacity: {option}: {instead}")
    console = Console(stderr=True)
    limits = Limits(
        start=given.start, precision=given.precision, most=given.most, probes=given.probes
    )
    out: Path = given.out or Path("runs") / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-capacity"
    if out.exists():
        raise UsageError(f"--out {out}: exists already; name another folder, or remove it")
    tried: list[Tried] = []
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


def _check(one: Tried, *, illustrative: bool) -> None:
    emulation = one.summary.emulation
    if emulation is not None and emulation.illustrative and not illustrative:
        raise InputError(
            f"device {emulation.device}: its figures illustrate a publication and fit no device "
            "one can buy; add --illustrative if its capacity is what you want"
        )


def _tell(one: Tried, console: Console) -> None:
    summary = one.summary
    console.print(
        f"{float(one.probe.scale):8.4g} × the trace's rate, "
        f"{summary.overall.offered_per_s:8.4g}/s: {summary.verdict.kind}"
        + (" (seems to hold)" if one.probe.level is Level.SEEMS else ""),
        highlight=False,
    )


def _conclude(tried: Sequence[Tried], console: Console, out: Path, *, as_text: bool) -> int:
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


def _parser() -> CommandParser:
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
            "replay capacity --trace prod.parquet --emulate chat.yaml --precision 2",
            "replay capacity --trace prod.parquet --target http://127.0.0.1:8000 --slo slo.yaml",
            "replay capacity --trace prod.parquet -f chat.yaml --window 10m..15m --most 4",
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
    parser.add_argument("--out", metavar="DIR", type=Path, help="where the probes' runs go")
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

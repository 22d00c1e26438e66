"""Arguments of `goodput policies`; the comparison is imported after parsing."""

from __future__ import annotations

import os
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from goodput_core.cli import CommandParser, argument_type, parse_whole
from goodput_core.spec.choices import Policy, Preemption, RouterPolicy
from goodput_core.units import NS_PER_S, parse_duration, parse_size
from goodput_traces.transforms import parse_factor, parse_session_arrivals, parse_window

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from enum import StrEnum

__all__ = ["main", "make_parser"]


def main(argv: Sequence[str]) -> int:
    """Compare candidates and recommend one; see `comparison.compare`.

    Args:
        argv: the arguments after `goodput policies`.
    """
    arguments = make_parser().parse_args(argv)
    from goodput_replay.sweep.comparison import compare  # noqa: PLC0415 - numpy, pyarrow

    return compare(arguments)


def make_parser() -> CommandParser:
    """Build the parser of `goodput policies`."""
    parser = CommandParser(
        "goodput policies",
        summary="Serve a trace in virtual time with every combination of the given policies, "
        "budgets, replica counts and placements; show attainment and cost, and recommend one.",
        examples=(
            "goodput policies --trace sample -f examples/chat.yaml",
            "goodput policies --trace prod.parquet -f examples/chat.yaml --replicas 1,2",
            "goodput policies --trace sample -f examples/chat.yaml --budgets 512,2048",
            "goodput policies --trace prod.parquet -f examples/chat.yaml --plot picture.png",
            "goodput policies --trace sample -f examples/chat.yaml --policies slo,sarathi --json",
        ),
    )
    add = parser.add_argument
    add("--trace", required=True, help="a Parquet trace, or `sample`")
    add(
        "-f",
        "--file",
        metavar="MANIFEST",
        type=Path,
        required=True,
        help="manifest of the LLMService",
    )
    add(
        "--device",
        metavar="PROFILE",
        help="emulate this device in place of the manifest's model.source",
    )
    lists: tuple[tuple[str, str, Callable[[str], Any], str], ...] = (
        ("policies", "P", partial(_parse_choice, Policy), "scheduling policies (default: all)"),
        (
            "budgets",
            "N",
            lambda text: parse_whole(text, 1, 1_048_576, "a token budget"),
            "token budgets (default: the manifest's)",
        ),
        (
            "replicas",
            "N",
            lambda text: parse_whole(text, 1, 1000, "a number of replicas"),
            "numbers of replicas (default: the manifest's)",
        ),
        (
            "preemptions",
            "M",
            partial(_parse_choice, Preemption),
            "preemption modes (default: the manifest's)",
        ),
        (
            "placements",
            "P",
            partial(_parse_choice, RouterPolicy),
            "placement policies of the router (default: the manifest's)",
        ),
    )
    for name, metavar, parse, help_text in lists:
        value = argument_type(partial(_parse_list, parse), name)
        add(f"--{name}", metavar=f"{metavar},…", type=value, help=help_text)
    add(
        "--topology",
        metavar="FILE",
        action="append",
        default=[],
        help="add candidates with the two pools or the migration of this file; repeatable",
    )
    add(
        "--window",
        metavar="FROM..TO",
        type=argument_type(parse_window, "window"),
        help="part of the trace, for example 10m..20m",
    )
    add(
        "--session-arrivals",
        metavar="PROCESS",
        type=argument_type(parse_session_arrivals, "PROCESS"),
        help="for a trace whose sessions share no clock: when sessions start, such as "
        "poisson:0.2/s",
    )
    add(
        "--sessions",
        choices=["independent", "causal"],
        default="independent",
        help="independent arrivals at the times of the trace, or causal sessions, whose requests "
        "wait for the one before them, as in replay (default: independent)",
    )
    add(
        "--max-decoded-size",
        metavar="SIZE",
        type=argument_type(parse_size, "size"),
        help="maximum decoded size of the trace, for example 4GiB (default: 256 times the file's "
        "size, at least 256MiB)",
    )
    add(
        "--rate-scale",
        metavar="FACTOR",
        type=argument_type(parse_factor, "factor"),
        default=Fraction(1),
        help="factor of the request rate; bursts are preserved",
    )
    add(
        "--class-by",
        metavar="RULE",
        action="append",
        default=[],
        help="set the SLO class by a rule, as in replay; repeatable",
    )
    add(
        "--limit",
        metavar="N",
        type=argument_type(lambda text: parse_whole(text, 1, 999_999_999, "a limit"), "limit"),
        help="only the first N requests",
    )
    add(
        "--timeout",
        metavar="TIME",
        type=argument_type(parse_duration, "time"),
        default=600 * NS_PER_S,
        help="time limit of a request (default: 10m)",
    )
    add(
        "--seed",
        metavar="N",
        type=argument_type(lambda text: parse_whole(text, 0, 999_999_999, "a seed"), "seed"),
        default=0,
        help="random seed of placement, --rate-scale and --session-arrivals (default: 0)",
    )
    add(
        "--jobs",
        metavar="N",
        type=argument_type(lambda text: parse_whole(text, 1, 256, "a number"), "number"),
        default=os.cpu_count() or 1,
        help="number of processes (default: one per core)",
    )
    add(
        "--plot",
        metavar="FILE",
        type=Path,
        help="draw the comparison: .png, .svg or .pdf (needs the extra `plot`)",
    )
    add("--illustrative", action="store_true", help="accept an illustrative device profile")
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _parse_list(parse: Callable[[str], Any], text: str) -> tuple[Any, ...]:
    """Parse comma-separated values; a repeated value counts once."""
    return tuple(dict.fromkeys(parse(word.strip()) for word in text.split(",")))


def _parse_choice(kind: type[StrEnum], text: str) -> StrEnum:
    if text not in set(kind):
        raise ValueError(f"{text[:40]!r} is not one of {', '.join(sorted(kind))}")
    return kind(text)

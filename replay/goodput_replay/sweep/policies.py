"""Arguments of `goodput policies`; the comparison is imported after parsing."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from goodput_core.cli import CommandParser, argument_type, parse_whole
from goodput_core.spec.choices import Policy, Preemption, RouterPolicy
from goodput_core.units import NS_PER_S, parse_duration, parse_size
from goodput_traces.transforms import parse_factor, parse_window

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["main", "make_parser"]

_Choice = TypeVar("_Choice", Policy, Preemption, RouterPolicy)


def main(argv: Sequence[str]) -> int:
    """Compare candidates and recommend one; see `comparison.compare`.

    Args:
        argv: the arguments after `goodput policies`.
    """
    given = make_parser().parse_args(argv)
    from goodput_replay.sweep.comparison import compare  # noqa: PLC0415 - numpy, pyarrow

    return compare(given)


def make_parser() -> CommandParser:
    """Build the parser of `goodput policies`."""
    parser = CommandParser(
        "goodput policies",
        summary="Serve a trace in virtual time with every combination of the given policies, "
        "budgets, replicas and placements; show attainment and cost, and recommend one.",
        examples=(
            "goodput policies --trace sample -f examples/chat.yaml",
            "goodput policies --trace prod.parquet -f examples/chat.yaml --replicas 1,2",
            "goodput policies --trace sample -f examples/chat.yaml --budgets 512,2048",
            "goodput policies --trace prod.parquet -f examples/chat.yaml --plot it.png",
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
    add(
        "--policies",
        metavar="P,…",
        type=argument_type(_parse_choices(Policy), "policies"),
        help="scheduling policies (default: all)",
    )
    add(
        "--budgets",
        metavar="N,…",
        type=argument_type(_parse_numbers(1, 1_048_576, "a token budget"), "budgets"),
        help="token budgets (default: the manifest's)",
    )
    add(
        "--replicas",
        metavar="N,…",
        type=argument_type(_parse_numbers(1, 1000, "a number of replicas"), "replicas"),
        help="numbers of replicas (default: the manifest's)",
    )
    add(
        "--preemptions",
        metavar="M,…",
        type=argument_type(_parse_choices(Preemption), "preemptions"),
        help="preemption modes (default: the manifest's)",
    )
    add(
        "--placements",
        metavar="P,…",
        type=argument_type(_parse_choices(RouterPolicy), "placements"),
        help="placement policies of the router (default: the manifest's)",
    )
    add(
        "--topology",
        metavar="FILE",
        action="append",
        default=[],
        help="add candidates with the pools or the migration of this file; repeatable",
    )
    add(
        "--window",
        metavar="FROM..TO",
        type=argument_type(parse_window, "window"),
        help="part of the trace, for example 10m..20m",
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
        help="random seed of placement and of --rate-scale (default: 0)",
    )
    add(
        "--jobs",
        metavar="N",
        type=argument_type(lambda text: parse_whole(text, 1, 256, "a number"), "number"),
        default=os.cpu_count() or 1,
        help="number of processes (default: one per core)",
    )
    add("--plot", metavar="FILE", type=Path, help="draw the comparison: .png, .svg or .pdf")
    add("--illustrative", action="store_true", help="accept an illustrative device profile")
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _parse_choices(kind: type[_Choice]) -> Callable[[str], tuple[_Choice, ...]]:
    def parse(text: str) -> tuple[_Choice, ...]:
        found = []
        for word in text.split(","):
            match = next((one for one in kind if one == word.strip()), None)
            if match is None:
                known = ", ".join(sorted(kind))
                raise ValueError(f"{word.strip()[:40]!r} is not one of {known}")
            found.append(match)
        return tuple(dict.fromkeys(found))

    return parse


def _parse_numbers(low: int, high: int, what: str) -> Callable[[str], tuple[int, ...]]:
    def parse(text: str) -> tuple[int, ...]:
        return tuple(
            dict.fromkeys(parse_whole(word.strip(), low, high, what) for word in text.split(","))
        )

    return parse

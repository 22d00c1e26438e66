"""Options of `replay` for a load without a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_core.cli import argument_type
from goodput_core.units import parse_some_duration
from goodput_replay.load import parse_lengths, parse_rate, parse_spacing

if TYPE_CHECKING:
    from goodput_core.cli import CommandParser

__all__ = ["add_load"]


def add_load(parser: CommandParser) -> None:
    """Add the options of a synthetic load."""
    group = parser.add_argument_group("load without a trace")
    group.add_argument(
        "--rate",
        metavar="RATE",
        type=argument_type(parse_rate, "RATE"),
        help="mean arrivals, such as 5/s or 90/m",
    )
    group.add_argument(
        "--duration",
        dest="duration_ns",
        metavar="TIME",
        type=argument_type(parse_some_duration, "TIME"),
        help="span of the arrivals, such as 5m",
    )
    for name, what in (("input", "prompt"), ("output", "output")):
        group.add_argument(
            f"--{name}-tokens",
            metavar="N[~P%]",
            type=argument_type(parse_lengths, "N"),
            help=f"{what} tokens: a fixed number, or log-normal numbers with this mean and a "
            "standard deviation of P percent",
        )
    group.add_argument(
        "--arrivals",
        dest="spacing",
        metavar="ARRIVALS",
        type=argument_type(parse_spacing, "ARRIVALS"),
        help="poisson, constant, or gamma:CV for bursts, CV being the coefficient of variation of "
        "the times between arrivals (default: poisson)",
    )

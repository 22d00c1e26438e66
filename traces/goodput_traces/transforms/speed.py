"""Time warp: the same arrivals, closer together or further apart.

This changes how bursty the traffic is per second; to send more of the same traffic, scale its
rate instead (`goodput_traces.transforms.scale`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from goodput_traces.row import TraceRow

__all__ = ["parse_factor", "warp_time"]

_FACTOR: Final = re.compile(r"\d{1,6}(\.\d{1,9})?(/\d{1,6})?", re.ASCII)
_LEAST: Final = Fraction(1, 10_000)
_MOST: Final = Fraction(10_000)


def parse_factor(text: str) -> Fraction:
    """An exact positive factor: `2`, `0.5`, `3/2`.

    Raises:
        ValueError: not a number from 1/10000 to 10000.
    """
    if not _FACTOR.fullmatch(text.strip()) or text.strip().endswith("/0"):
        raise ValueError(f"{text!r} is not a factor; write for example 2, 0.5 or 3/2")
    whole, _, below = text.strip().partition("/")
    divisor = Fraction(below or 1)
    if divisor == 0:
        raise ValueError(f"{text!r} divides by zero; write for example 2, 0.5 or 3/2")
    factor = Fraction(whole) / divisor
    if not _LEAST <= factor <= _MOST:
        raise ValueError(f"{text!r} is out of bounds; a factor lies between 0.0001 and 10000")
    return factor


def warp_time(rows: Iterable[TraceRow], speed: Fraction, *, zero_ns: int) -> Iterator[TraceRow]:
    """Move every arrival towards (above 1) or away from (below 1) the replay's zero.

    Exact: integer arithmetic, rounded down, so ties stay ties and order is kept. Promises,
    patience and recorded outcomes are not arrivals and stay as they are.

    Args:
        rows: in order of arrival.
        speed: above 1 is faster.
        zero_ns: the instant that does not move.
    """
    up, down = speed.numerator, speed.denominator
    for row in rows:
        since = row.timestamp_start_unix_ns - zero_ns
        yield replace(row, timestamp_start_unix_ns=zero_ns + since * down // up)

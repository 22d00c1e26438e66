"""Nearest-rank quantiles: always a measured value, at a rank computed in integers.

Reports, TBT targets and the client's send lag use this definition. An interpolated quantile, or a
rank computed in floats, could differ by one rank exactly at the target.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["P50", "P90", "P95", "P99", "quantile", "quantiles"]

P50: Final = Fraction(50, 100)
P90: Final = Fraction(90, 100)
P95: Final = Fraction(95, 100)
P99: Final = Fraction(99, 100)


def quantiles(values: Iterable[int], qs: Sequence[Fraction]) -> tuple[int, ...]:
    """Return the nearest-rank quantiles of `values`, all from one sort.

    Args:
        values: at least one measurement, in any order and any unit.
        qs: shares from 0 to 1, as exact fractions; 0 is the smallest value.

    Returns:
        For each q the smallest value v such that at least q of all values are ≤ v.

    Raises:
        ValueError: no values, or a share outside 0 … 1.

    Source: Hyndman and Fan, "Sample Quantiles in Statistical Packages", 1996, definition 1.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("a quantile needs at least one value")
    return tuple(ordered[_rank(q, len(ordered)) - 1] for q in qs)


def quantile(values: Iterable[int], q: Fraction) -> int:
    """Return one nearest-rank quantile; see `quantiles`."""
    return quantiles(values, (q,))[0]


def _rank(q: Fraction, count: int) -> int:
    """Return ⌈q·count⌉, at least 1."""
    if not 0 <= q <= 1:
        raise ValueError(f"{q} is not a share; a quantile lies between 0 and 1")
    return max(1, -(-q.numerator * count // q.denominator))

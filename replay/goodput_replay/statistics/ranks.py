"""Nearest-rank quantiles of arrays.

The quantiles are those of `goodput_core.quantiles`, which sorts Python numbers: forty bytes each,
which a run of millions of requests cannot afford.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from fractions import Fraction

    from numpy.typing import NDArray

__all__ = ["nearest_ranks"]


def nearest_ranks(values: NDArray[np.int64], qs: Sequence[Fraction]) -> list[int]:
    """Return the smallest value with at least a share q of all values at or below it, for each q.

    Args:
        values: integers, shape [num_values], at least one.
        qs: shares above 0, at most 1.

    Raises:
        ValueError: there is no value.
    """
    count = len(values)
    if not count:
        raise ValueError("a quantile needs at least one value")
    ranks = [max(1, -(-q.numerator * count // q.denominator)) - 1 for q in qs]
    ordered = np.partition(values, ranks)
    return [int(ordered[rank]) for rank in ranks]

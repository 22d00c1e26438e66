"""Per-second cells of (good, total): what is resampled instead of single requests.

Requests of the same second share a queue, so they are kept together; a cell knows how many of
its requests attained, never which.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from goodput_core.slo.attainment import Attainment
from goodput_core.units import NS_PER_S

__all__ = ["Cells", "count_cells"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cells:
    """One class's judged requests by the second in which they were scheduled.

    Args:
        good: requests that attained, int64 `[num_cells]`.
        total: requests that attained or missed, int64 `[num_cells]`.
    """

    good: NDArray[np.int64]
    total: NDArray[np.int64]

    @property
    def attainment(self) -> Attainment:
        """All cells together."""
        return Attainment(good=int(self.good.sum()), total=int(self.total.sum()))


def count_cells(
    since_start_ns: NDArray[np.int64], attained: NDArray[np.bool_], window_ns: int
) -> Cells:
    """Count judged requests into the seconds of their window.

    Args:
        since_start_ns: scheduled arrivals since the window's start, int64 `[num_requests]`, ≥ 0;
            those at the window's very end or later count into its last second.
        attained: whether each attained, bool `[num_requests]`.
        window_ns: the window's length; its last second may be a part of one.
    """
    num_cells = max(1, -(-window_ns // NS_PER_S))
    second = np.minimum(since_start_ns // NS_PER_S, num_cells - 1)
    return Cells(
        good=np.bincount(second[attained], minlength=num_cells),
        total=np.bincount(second, minlength=num_cells),
    )

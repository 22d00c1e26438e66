"""Confidence bounds of one run's attainment, by resampling blocks of its seconds.

Requests of one overload miss together; bounds that take them for independent are several times
too narrow. Blocks longer than any backlog are close to independent of each other, so they can
be resampled. Why the blocks are as long as they are, and what the bounds were measured to
cover, stands in docs/verdicts.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from goodput_core.slo.intervals import DEFAULT_CONFIDENCE, Interval, IntervalMethod, wilson
from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from goodput_replay.statistics.cells import Cells

__all__ = ["block_length", "design_effect", "resampled_interval"]

# Few enough that a block outlasts dependence which no backlog shows (slow decoding, a noisy
# neighbour), enough to see how blocks differ; measured in benchmarks/interval_coverage.py.
_BLOCKS: Final = 30
_RESAMPLES: Final = 2_000


def block_length(num_cells: int, backlog_ns: int) -> int:
    """Seconds in a block: a thirtieth of the window, and longer than the longest backlog.

    A backlog that is no multiple of a second touches one second more than it lasts, so its
    length is rounded up and one is added.
    """
    share = -(-num_cells // _BLOCKS)
    return share if backlog_ns == 0 else max(share, -(-backlog_ns // NS_PER_S) + 1)


def design_effect(cells: Cells, block_cells: int) -> float:
    """How many times larger the variance of the attainment is than for independent requests.

    The variance is that of blocks of seconds at every offset, the window taken as a circle. The
    block with most misses beyond its share is counted once more: a window holds few overloads,
    and one in which they happened to be short would otherwise promise too much.

    Args:
        cells: at least one request.
        block_cells: 1 … `num_cells`.

    Returns:
        At least 1; exactly 1 where all requests attained or all missed, and where three blocks
        or fewer cannot tell.

    Source: Politis and Romano, "A circular block-resampling procedure for stationary data",
    1992; Kish, "Survey Sampling", 1965, for the effect.
    """
    good, total = cells.attainment.good, cells.attainment.total
    num_cells = len(cells.total)
    if good in {0, total} or 3 * block_cells >= num_cells:
        return 1.0
    surplus = _block_sums(cells.good - good / total * cells.total, block_cells)
    blocks = num_cells / block_cells
    # Surpluses add up to zero over the window, which takes one block's worth of freedom, and
    # the variance of Student's t, for a spread that is itself estimated, takes two more.
    variance = blocks * float(np.mean(surplus**2)) / (1 - 3 / blocks)
    variance += float(min(surplus.min(), 0.0)) ** 2
    independent = good * (total - good) / total
    return max(1.0, variance / independent)


def resampled_interval(
    cells: Cells,
    *,
    block_cells: int,
    rng: np.random.Generator,
    confidence: float = DEFAULT_CONFIDENCE,
    classes: int = 1,
    worth: float | None = None,
) -> Interval:
    """One-sided bounds: quantiles of resampled attainments, or Wilson's where those are wider.

    Args:
        cells: at least one request.
        block_cells: seconds in a block, 1 … `num_cells`.
        rng: draws the blocks.
        confidence: of each bound.
        classes: how many classes may share the error of the upper bound.
        worth: independent requests that the sample is worth at most; None: all of them.

    Source: Künsch, "The Jackknife and the Bootstrap for General Stationary Observations", 1989.
    """
    total = cells.attainment.total
    effective = total / design_effect(cells, block_cells)
    floor = wilson(
        cells.attainment.good,
        total,
        effective=effective if worth is None else min(effective, worth),
        confidence=confidence,
        classes=classes,
        method=IntervalMethod.BLOCKS,
    )
    shares = _resampled_shares(cells, block_cells, rng)
    risks = [(1 - confidence) / share for share in range(1, classes + 1)]
    low, *highs = np.quantile(
        shares, [1 - confidence, *(1 - risk for risk in risks)], method="inverted_cdf"
    )
    return Interval(
        lower=min(floor.lower, float(low)),
        uppers=tuple(max(a, float(b)) for a, b in zip(floor.uppers, highs, strict=True)),
        confidence=confidence,
        effective=floor.effective,
        method=IntervalMethod.BLOCKS,
    )


def _resampled_shares(
    cells: Cells, block_cells: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Attainments of windows glued together from random blocks, those without a request left out.

    The last block is cut so that every glued window is as long as the real one.
    """
    num_cells = len(cells.total)
    blocks, rest = divmod(num_cells, block_cells)
    starts = rng.integers(num_cells, size=(_RESAMPLES, blocks))
    good = _block_sums(cells.good, block_cells)[starts].sum(axis=1)
    total = _block_sums(cells.total, block_cells)[starts].sum(axis=1)
    if rest:
        last = rng.integers(num_cells, size=_RESAMPLES)
        good += _block_sums(cells.good, rest)[last]
        total += _block_sums(cells.total, rest)[last]
    filled = total > 0
    shares: NDArray[np.float64] = good[filled] / total[filled]
    return shares


def _block_sums(
    values: NDArray[np.int64] | NDArray[np.float64], length: int
) -> NDArray[np.float64]:
    """The sum of each block of `length` values, one block from every offset, wrapping around."""
    wrapped = np.concatenate((values, values[:length])).astype(np.float64)
    sums = np.concatenate(([0.0], np.cumsum(wrapped)))
    return sums[length : length + len(values)] - sums[: len(values)]

"""The former interval: resampled blocks of seconds, or Wilson's bounds if they are wider.

It exists for comparison only; the product does not use it. The window is divided into blocks of
seconds, each a thirtieth of the window or longer than the longest backlog. The bounds are quantiles
of 2,000 windows drawn from these blocks. They are never narrower than Wilson's bounds at the sample
size divided by the design effect of the blocks. A backlog over a twentieth of the window rules out
PASS.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Final

import numpy as np

from goodput_core.slo.verdict import VerdictKind

if TYPE_CHECKING:
    from fractions import Fraction

    from numpy.typing import NDArray

__all__ = ["ResampledVerdict", "resampled_verdict"]

_BLOCKS: Final = 30
_RESAMPLES: Final = 2_000
_LEAST_BLOCKS: Final = 20
_BACKLOG_SHARE: Final = 20
_Z: Final = NormalDist().inv_cdf(0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResampledVerdict:
    """Bounds of 95 % confidence each, and the verdict at an objective."""

    lower: float
    upper: float
    kind: VerdictKind


def resampled_verdict(
    good: NDArray[np.int64],
    total: NDArray[np.int64],
    waits_s: NDArray[np.float64],
    objective: Fraction,
    rng: np.random.Generator,
) -> ResampledVerdict:
    """Judge one class.

    Args:
        good: requests that met their targets, int64 `[seconds]`.
        total: requests judged, int64 `[seconds]`.
        waits_s: overdue time and first-token time of each late request, seconds, float64
            `[num_late, 2]`.
        objective: share of requests that must attain.
        rng: source of the drawn blocks.
    """
    seconds = len(total)
    backlog_s = _longest_backlog_s(waits_s)
    length = -(-seconds // _BLOCKS)
    if backlog_s:
        length = max(length, math.ceil(backlog_s) + 1)
    pass_excluded = backlog_s * _BACKLOG_SHARE > seconds or seconds // length < _LEAST_BLOCKS
    length = min(length, seconds)
    effective = int(total.sum()) / _design_effect(good, total, length)
    lower, upper = _wilson(int(good.sum()), int(total.sum()), effective)
    shares = _resampled_shares(good, total, length, rng)
    low, high = np.quantile(shares, [0.05, 0.95], method="inverted_cdf")
    lower, upper = min(lower, float(low)), max(upper, float(high))
    needed = _Z**2 * float(objective / (1 - objective))
    kind = VerdictKind.INCONCLUSIVE
    if upper < objective:
        kind = VerdictKind.FAIL
    elif not pass_excluded and effective >= needed and lower >= objective:
        kind = VerdictKind.PASS
    return ResampledVerdict(lower=lower, upper=upper, kind=kind)


def _longest_backlog_s(waits_s: NDArray[np.float64]) -> float:
    """Return the longest period in which some request was overdue for its first token."""
    longest = start = reach = 0.0
    for begin, end in sorted(map(tuple, waits_s.tolist())):
        if begin > reach:
            start = begin
        reach = max(reach, end)
        longest = max(longest, reach - start)
    return longest


def _design_effect(good: NDArray[np.int64], total: NDArray[np.int64], length: int) -> float:
    sums, counts = int(good.sum()), int(total.sum())
    if sums in {0, counts} or 3 * length >= len(total):
        return 1.0
    surplus = _block_sums(good - sums / counts * total, length)
    blocks = len(total) / length
    variance = blocks * float(np.mean(surplus**2)) / (1 - 3 / blocks)
    variance += float(min(surplus.min(), 0.0)) ** 2
    return max(1.0, variance / (sums * (counts - sums) / counts))


def _resampled_shares(
    good: NDArray[np.int64], total: NDArray[np.int64], length: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    seconds = len(total)
    blocks, rest = divmod(seconds, length)
    starts = rng.integers(seconds, size=(_RESAMPLES, blocks))
    goods = _block_sums(good, length)[starts].sum(axis=1)
    totals = _block_sums(total, length)[starts].sum(axis=1)
    if rest:
        last = rng.integers(seconds, size=_RESAMPLES)
        goods += _block_sums(good, rest)[last]
        totals += _block_sums(total, rest)[last]
    filled = totals > 0
    shares: NDArray[np.float64] = goods[filled] / totals[filled]
    return shares


def _block_sums(
    values: NDArray[np.int64] | NDArray[np.float64], length: int
) -> NDArray[np.float64]:
    """Return the sum of the `length` values from every offset, wrapping around."""
    wrapped = np.concatenate((values, values[:length])).astype(np.float64)
    sums = np.concatenate(([0.0], np.cumsum(wrapped)))
    return sums[length : length + len(values)] - sums[: len(values)]


def _wilson(good: int, total: int, size: float) -> tuple[float, float]:
    share, square = good / total, _Z**2 / size
    spread = _Z * math.sqrt(share * (1 - share) / size + square / (4 * size))
    lower = (share + square / 2 - spread) / (1 + square)
    upper = (share + square / 2 + spread) / (1 + square)
    return max(0.0, min(lower, share)), min(1.0, max(upper, share))

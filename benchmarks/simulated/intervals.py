"""The product's interval of one run, computed for many windows at once.

`goodput_core.slo` has no numpy and judges one window at a time, which takes a hundred times as
long. A test proves that both give the same bounds and verdicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from benchmarks.simulated.processes import Counts, Floats
from scipy import special, stats

from goodput_core.slo.attainment import SecondCounts
from goodput_core.slo.intervals import (
    DEFAULT_CONFIDENCE,
    WindowEstimate,
    count_blocks,
    requests_needed,
)
from goodput_core.slo.verdict import MIN_BLOCKS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from fractions import Fraction

    from benchmarks.simulated.processes import Windows
    from numpy.typing import NDArray

__all__ = [
    "Bounds",
    "Scales",
    "block_sums",
    "bounds",
    "failing",
    "has_long_gap",
    "missed_share",
    "offset_sums",
    "passing",
]

_BLOCK_COUNTS: Final = (60, 30, 15, 8)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bounds:
    """Bounds of the attainment in each window.

    Args:
        total: requests, int64 `[windows]`.
        seconds: length of the windows.
        busy: number of seconds with a request, int64 `[windows]`.
        lower: lower bounds, float64 `[windows]`.
        upper: upper bounds, float64 `[windows]`.
    """

    total: Counts
    seconds: int
    busy: Counts
    lower: Floats
    upper: Floats


class Scales:
    """The misses of many windows, cut into blocks at several scales.

    Args:
        windows: the counts, of which every window has a request.
        outage_s: declared longest outage.
        runs: number of runs whose counts were added up.
    """

    def __init__(self, windows: Windows, *, outage_s: int = 0, runs: int = 1) -> None:
        self.seconds = windows.total.shape[1]
        # `block_scales` leaves out long periods without requests, of another length in each window.
        self.with_gaps = {
            row: WindowEstimate(
                SecondCounts(
                    good=(windows.total[row] - windows.missed[row]).tolist(),
                    total=windows.total[row].tolist(),
                ),
                outage_s=outage_s,
                runs=runs,
            )
            for row in np.flatnonzero(has_long_gap(windows.total)).tolist()
        }
        self.total = windows.total.sum(axis=1)
        self.busy = np.count_nonzero(windows.total, axis=1)
        self.missed = windows.missed.sum(axis=1)
        self.missed_share = missed_share(windows.total, outage_s) / runs
        self.independent = self.missed * (1 - self.missed / self.total)
        mixed = (self.missed > 0) & (self.missed < self.total)
        share = (self.missed / self.total)[:, None]
        residual = windows.missed - share * windows.total
        cumulated = np.cumsum(residual, axis=-1)
        self.scales: list[tuple[int, Floats, Floats]] = []
        for blocks, scale, sums in block_sums(residual, outage_s=outage_s):
            spread = sums.var(axis=-1, ddof=1) * blocks * scale
            worst = offset_sums(cumulated, self.seconds // blocks).max(axis=-1)
            self.scales.append((blocks, np.where(mixed, spread, 0.0), np.where(mixed, worst, 0.0)))


def has_long_gap(total: Counts) -> NDArray[np.bool_]:
    """Return True for each window with a period without requests that is left out.

    Args:
        total: requests, int64 `[..., seconds]`.

    Returns:
        bool `[...]`.
    """
    longest = max(1, total.shape[-1] // _BLOCK_COUNTS[0]) + 1
    if longest > total.shape[-1]:
        return np.zeros(total.shape[:-1], dtype=np.bool_)
    arrived = np.cumsum(total, axis=-1)
    before = np.concatenate([np.zeros_like(arrived[..., :1]), arrived[..., :-longest]], axis=-1)
    found: NDArray[np.bool_] = (arrived[..., longest - 1 :] == before).any(axis=-1)
    return found


def block_sums(residual: Floats, *, outage_s: int = 0) -> Iterator[tuple[int, float, Floats]]:
    """Divide windows into blocks at each scale.

    Args:
        residual: float64 `[..., seconds]`.
        outage_s: declared longest outage.

    Yields:
        The number of blocks, the length of the window in multiples of all blocks, and the sum of
        each block, float64 `[..., blocks]`.
    """
    seconds = residual.shape[-1]
    finest = count_blocks(seconds)
    counts = [finest, *(b for b in _BLOCK_COUNTS if b < finest)]
    if outage_s * counts[-1] > seconds:
        counts.append(max(2, seconds // outage_s))
    for blocks in counts:
        length = seconds // blocks
        whole = residual[..., : blocks * length]
        yield (
            blocks,
            seconds / (blocks * length),
            whole.reshape(*residual.shape[:-1], blocks, length).sum(axis=-1),
        )


def offset_sums(cumulated: Floats, length: int) -> Floats:
    """Return the sums of `length` residuals from each offset, wrapping around.

    Args:
        cumulated: cumulated sums of residuals that add up to 0, float64 `[..., seconds]`.
        length: length of a block in seconds.

    Returns:
        float64 `[..., seconds]`.
    """
    return np.roll(cumulated, -length, axis=-1) - cumulated


def missed_share(total: Counts, outage_s: int) -> Floats:
    """Return the share of requests that miss if there was one visible outage on average.

    Args:
        total: requests, int64 `[..., seconds]`.
        outage_s: length of the outage.

    Returns:
        float64 `[...]`.
    """
    length = min(outage_s, total.shape[-1])
    if not length:
        return np.zeros(total.shape[:-1])
    sums = np.cumsum(np.concatenate([total, total[..., :length]], axis=-1), axis=-1)
    shows = sums[..., length:] > sums[..., :-length]
    share: Floats = outage_s / shows.sum(axis=-1)
    return share


def bounds(scales: Scales) -> Bounds:
    """Return both bounds of each window at the default confidence."""
    confidence = DEFAULT_CONFIDENCE
    total, missed = scales.total, scales.missed
    least = np.maximum(1.0, scales.missed_share * total)
    most, fewest = np.zeros(len(total)), np.full(len(total), np.inf)
    for blocks, spread, worst in scales.scales:
        inflation = (stats.t.ppf(confidence, blocks - 1) / stats.norm.ppf(confidence)) ** 2
        variance = np.maximum(spread * inflation, scales.independent)
        unseen = np.maximum(worst, least)
        most = np.maximum(most, _gamma(confidence, missed + unseen, variance + unseen**2))
        fewest = np.minimum(fewest, _gamma(1 - confidence, missed, variance))
    share = 1 - missed / total
    exact_lower = special.betaincinv(np.maximum(total - missed, 1), missed + 1, 1 - confidence)
    exact_upper = special.betaincinv(total - missed + 1, np.maximum(missed, 1), confidence)
    lower = np.minimum(np.clip(1 - most / total, 0, share), exact_lower)
    upper = np.maximum(np.maximum(1 - fewest / total, exact_upper), share)
    lower = np.where(missed < total, lower, 0.0)
    upper = np.where(missed > 0, upper, 1.0)
    for row, estimate in scales.with_gaps.items():
        interval = estimate.interval(confidence)
        lower[row], upper[row] = interval.lower, interval.upper
    return Bounds(total=total, seconds=scales.seconds, busy=scales.busy, lower=lower, upper=upper)


def passing(found: Bounds, objective: Fraction) -> NDArray[np.bool_]:
    """Return True for each window whose verdict is PASS, bool `[windows]`."""
    needed = requests_needed(objective)
    enough = (found.total >= needed) & (found.busy >= min(MIN_BLOCKS, needed))
    if count_blocks(found.seconds) < MIN_BLOCKS:
        enough &= False
    passed: NDArray[np.bool_] = enough & (found.lower >= float(objective))
    return passed


def failing(found: Bounds, objective: Fraction) -> NDArray[np.bool_]:
    """Return True for each window whose verdict is FAIL, bool `[windows]`."""
    failed: NDArray[np.bool_] = found.upper < float(objective)
    return failed


def _gamma(p: float, mean: Floats | Counts, variance: Floats) -> Floats:
    """Return the p-quantiles of gamma distributions with these means and variances."""
    safe = np.where(variance > 0, variance, 1.0)
    mean = np.maximum(mean, 1e-300)
    quantile = safe / mean * special.gammaincinv(mean**2 / safe, p)
    return np.where(variance > 0, quantile, mean)

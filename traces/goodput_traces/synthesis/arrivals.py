"""A model of arrivals: a curve of the rate, and bursts at every scale below its steps.

The span is divided into about 64 steps. The number of arrivals in a step is a Poisson number, whose
mean follows the source. Below a step, time is halved again and again. The share of a cell's
arrivals that falls in one half is either `(1 + s) / 2` or `(1 − s) / 2`, with equal probability.
The number `s²` is 0 for a Poisson process and 1 if all arrivals of a cell fall in the same half, as
in a tie. It is negative for arrivals that are more even than a Poisson process. It depends on the
width of the cell and on its arrivals: in an on/off source, cells with few arrivals are at the
border of a burst, and cells with many are within it.

A source whose gaps hardly differ from their neighbours, such as a load generator with a constant
rate, has no random numbers below the curve: an arrival is drawn whenever the curve's area has grown
by one.

The estimate of `s²` uses pairs of arrivals, so it does not depend on the rate: a source of which
only a share is known has the same estimate, and the model can be drawn at any other rate.

Source: Riedi, Crouse, Ribeiro and Baraniuk, "A multifractal wavelet model with application to
network traffic", IEEE Transactions on Information Theory 45, 1999, here with multipliers of two
values that depend on the number of arrivals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from goodput_core.units import NS_PER_S
from goodput_traces.synthesis.draws import draw_binomial, draw_poisson

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

__all__ = ["ArrivalModel", "find_tick", "fit_arrivals", "poisson_arrivals"]

_Int64 = np.ndarray[Any, np.dtype[np.int64]]
_Floats = np.ndarray[Any, np.dtype[np.float64]]
_STEPS: Final = 64
_MIN_TICK_NS: Final = 1_000
_MIN_STEP_NS: Final = NS_PER_S
_MAX_STEP_ARRIVALS: Final = 65_536
_POISSON_SCALES: Final = 26
# Neighbouring gaps of a regular source differ by at most this share of the mean gap, or two ticks.
_MAX_UNEVENNESS: Final = 0.05
_REGULAR_SHARE: Final = 0.95
_MIN_GAPS: Final = 20
_MIN_GAP_TICKS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalModel:
    """Fitted arrivals; times count from the first arrival of the source.

    Args:
        tick_ns: width of the smallest cells; every arrival is a multiple of it.
        step_ns: width of a step of the curve, a power of two times `tick_ns`.
        means: expected number of arrivals in each step, at the source's rate.
        even: True if steps vary less than Poisson numbers; their numbers are then not random.
        spreads: `s²` of each scale, from half a step down to the tick, by the number of binary
            digits of the arrivals in a cell.
        regular: True if neighbouring gaps are equal; `even` and `spreads` are not used then.
        share: share of the source's arrivals from which `spreads` was estimated.
        last_step_share: share of the last step that the source covers.
    """

    tick_ns: int
    step_ns: int
    means: tuple[float, ...]
    even: bool
    spreads: tuple[tuple[float, ...], ...]
    regular: bool = False
    share: float = 1.0
    last_step_share: float = 1.0

    def draw(self, rng: Random, duration_ns: int, factor: float) -> Iterator[tuple[int, int]]:
        """Yield arrivals in order, each with the step of the source from which its rate comes.

        After its end, the curve is repeated from its start.

        Args:
            rng: source of random numbers.
            duration_ns: end of the arrivals, which is not part of them.
            factor: rate of the arrivals divided by that of the source.
        """
        if self.regular:
            yield from self._draw_regular(rng, duration_ns, factor)
            return
        for start_ns in range(0, duration_ns, self.step_ns):
            step = start_ns // self.step_ns % len(self.means)
            mean = self.means[step] * factor
            count = int(mean + rng.random()) if self.even else draw_poisson(rng, mean)
            for arrival_ns in self._split(rng, start_ns, count, factor / self.share):
                if arrival_ns >= duration_ns:
                    break
                yield arrival_ns, step

    def _draw_regular(
        self, rng: Random, duration_ns: int, factor: float
    ) -> Iterator[tuple[int, int]]:
        """Yield an arrival whenever the area below the curve has grown by one."""
        missing = rng.random()  # area until the next arrival
        for start_ns in range(0, duration_ns, self.step_ns):
            step = start_ns // self.step_ns % len(self.means)
            mean = self.means[step] * factor
            while missing < mean:
                ticks = int(missing / mean * self.step_ns) // self.tick_ns
                arrival_ns = start_ns + ticks * self.tick_ns
                if arrival_ns >= duration_ns:
                    return
                yield arrival_ns, step
                missing += 1
            missing -= mean

    def _split(self, rng: Random, start_ns: int, count: int, factor: float) -> Iterator[int]:
        """Yield the arrivals of one step, in order."""
        cells = [(start_ns, count, 0)]  # start, arrivals, scale; the earliest cell is last
        while cells:
            cell_ns, arrivals, scale = cells.pop()
            if arrivals == 0:
                continue
            width_ns = self.step_ns >> scale
            if arrivals == 1:
                yield cell_ns + int(rng.random() * (width_ns // self.tick_ns)) * self.tick_ns
            elif scale == len(self.spreads):
                yield from [cell_ns] * arrivals
            else:
                spreads = self.spreads[scale]
                digits = max(2, round(arrivals / factor)).bit_length()
                left = _draw_left(rng, arrivals, spreads[min(digits, len(spreads) - 1)])
                cells.append((cell_ns + width_ns // 2, arrivals - left, scale + 1))
                cells.append((cell_ns, left, scale + 1))


def _draw_left(rng: Random, arrivals: int, spread: float) -> int:
    """Draw the number of arrivals in the left half of a cell."""
    if spread >= 0:
        sign = 1 if rng.random() < 0.5 else -1
        return draw_binomial(rng, arrivals, 0.5 * (1 + sign * math.sqrt(spread)))
    if rng.random() < -spread * (arrivals - 1):
        return arrivals // 2 + (arrivals % 2 and rng.random() < 0.5)
    return draw_binomial(rng, arrivals, 0.5)


def fit_arrivals(times_ns: _Int64, span_ns: int, resolution_ns: int, share: float) -> ArrivalModel:
    """Fit the model.

    Args:
        times_ns: sorted arrivals from 0 on, at least one; possibly a random share of all.
        span_ns: time from the first to the last arrival of the source, above 0.
        resolution_ns: tick of the source's timestamps.
        share: share of the source's arrivals that `times_ns` has.
    """
    tick_ns = find_tick(times_ns, resolution_ns)
    times_ns = (times_ns + tick_ns // 2) // tick_ns * tick_ns
    steps = max(_STEPS, math.ceil(len(times_ns) / share / _MAX_STEP_ARRIVALS))
    scales = max(0, round(math.log2(max(_MIN_STEP_NS, span_ns / steps) / tick_ns)))
    step_ns = tick_ns << scales
    counts = np.bincount(times_ns // step_ns).astype(np.float64)
    last_step_share = max(0.1, (span_ns + tick_ns - (len(counts) - 1) * step_ns) / step_ns)
    counts[-1] /= last_step_share
    mean = float(counts.mean())
    variance = float(counts.var(ddof=1)) if len(counts) > 1 else mean
    means = _remove_noise(counts) / share
    return ArrivalModel(
        tick_ns=tick_ns,
        step_ns=step_ns,
        means=tuple(means.tolist()),
        even=bool(variance < mean),
        spreads=tuple(_fit_spreads(times_ns, step_ns >> scale) for scale in range(scales)),
        regular=_is_regular(times_ns, tick_ns),
        share=share,
        last_step_share=last_step_share,
    )


def poisson_arrivals(rate_per_s: float) -> ArrivalModel:
    """Return a Poisson process."""
    step_ns = _MIN_TICK_NS << _POISSON_SCALES
    return ArrivalModel(
        tick_ns=_MIN_TICK_NS,
        step_ns=step_ns,
        means=(rate_per_s * step_ns / NS_PER_S,),
        even=False,
        spreads=((0.0, 0.0, 0.0),) * _POISSON_SCALES,
    )


def _is_regular(times_ns: _Int64, tick_ns: int) -> bool:
    """True if nearly all gaps are like the gap before them, as far as the tick shows it."""
    gaps_ns = np.diff(times_ns)
    mean_ns = float(gaps_ns.mean()) if len(gaps_ns) >= _MIN_GAPS else 0.0
    if mean_ns < _MIN_GAP_TICKS * tick_ns:
        return False
    limit_ns = max(2 * tick_ns, _MAX_UNEVENNESS * mean_ns)
    return bool(np.mean(np.abs(np.diff(gaps_ns)) <= limit_ns) >= _REGULAR_SHARE)


def _remove_noise(counts: _Floats) -> _Floats:
    """Return the curve from which counts were drawn as Poisson numbers.

    The differences of neighbouring parts contain the same noise at every scale, from two steps to
    the complete curve. At each scale, they are reduced by the share of the noise, or removed if
    they are hardly more than noise.
    """
    size = 1 << max(0, len(counts) - 1).bit_length()
    sums: _Floats = np.concatenate((counts, np.full(size - len(counts), counts.mean())))
    known, kept = len(counts), []
    while len(sums) > 1:
        left, right = sums[::2], sums[1::2]
        sums, differences, known = left + right, left - right, known // 2
        noise = float(sums[:known].sum())
        power = float(np.square(differences[:known]).sum())
        if known and power <= noise * (1 + math.sqrt(2 / known)):
            differences = np.zeros_like(differences)
        elif known:
            differences *= math.sqrt(1 - noise / power)
        kept.append(differences)
    for differences in reversed(kept):
        sums = np.stack(((sums + differences) / 2, (sums - differences) / 2), axis=1).ravel()
    return np.maximum(0.0, sums[: len(counts)])


def _fit_spreads(times_ns: _Int64, width_ns: int) -> tuple[float, ...]:
    """Return `s²` of the cells of one width, by the number of binary digits of their arrivals.

    For a cell with `n` arrivals, `l` of them in the left half, the expected value of
    `(2 l − n)²` is `n + n (n − 1) s²`.
    """
    halves, arrivals = np.unique(times_ns // (width_ns // 2), return_counts=True)
    cells, at = np.unique(halves >> 1, return_inverse=True)
    total = np.bincount(at, weights=arrivals, minlength=len(cells))
    balance = np.bincount(at, weights=np.where(halves & 1, -arrivals, arrivals))
    digits = np.frexp(total)[1]
    pairs = np.bincount(digits, weights=total * (total - 1))
    excess = np.bincount(digits, weights=balance**2 - total)
    spreads = np.divide(excess, pairs, out=np.zeros_like(pairs), where=pairs > 0)
    return tuple(np.clip(spreads, -1.0, 1.0).tolist()) + (0.0,) * (3 - len(spreads))


def find_tick(times_ns: _Int64, resolution_ns: int) -> int:
    """Return the tick of sorted times, which can be coarser than the source states.

    If nearly all times are multiples of the usual gap between two different times, as in a source
    that rounds times to three seconds, this gap is the tick.
    """
    stated_ns = max(resolution_ns, _MIN_TICK_NS)
    instants = np.unique(times_ns)
    if len(instants) < 10 or len(instants) > len(times_ns) // 2:
        return stated_ns
    gap_ns = float(np.median(np.diff(instants)))
    for _ in range(3):  # a multiple that is counted over the whole span is more exact
        multiples = np.round(instants / gap_ns)
        gap_ns = float(instants @ multiples / (multiples @ multiples))
    errors = np.abs(instants - np.round(instants / gap_ns) * gap_ns)
    is_grid = np.quantile(errors, 0.99) < 0.02 * gap_ns
    return max(stated_ns, round(gap_ns)) if is_grid else stated_ns

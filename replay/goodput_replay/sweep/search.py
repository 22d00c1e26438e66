"""The search for the highest sustained rate: which rate to try next, given the probes so far.

A PASS shows that a rate scale is sustained. A scale *seems* sustained if the observed attainment of
every class reaches its objective, but the data are too few for a PASS. Above a scale whose verdict
is FAIL, no scale counts as seeming sustained, as a higher rate contains all requests of a lower
rate.

The search doubles or halves the scale until one scale is sustained and a higher one is not, then
bisects. Attainment need not be monotone in the rate, so the search also tries one rate below the
sustained one and one above the next, if none was tried there. This module does not run replays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from fractions import Fraction
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Probe", "RateLevel", "SearchLimits", "beyond", "boundary", "next_scale"]

_FURTHER_UP: Final = Fraction(3, 2)
_FURTHER_DOWN: Final = Fraction(1, 2)


class RateLevel(IntEnum):
    """How well a tried rate meets the objectives, from worst to best."""

    FAILED = 0
    """The verdict is FAIL: some class is shown to miss its objective."""
    BELOW = 1
    """The observed attainment of some class misses its objective, but the verdict is not FAIL."""
    SEEMS = 2
    """The observed attainment of every class reaches its objective, but the verdict is not PASS."""
    SHOWN = 3
    """The verdict is PASS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A tried rate.

    Args:
        scale: factor of the trace's rate.
        level: result of the probe.
    """

    scale: Fraction
    level: RateLevel


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    """Bounds and precision of the search.

    Args:
        start: first scale.
        least, most: minimum and maximum scale.
        precision: largest gap between the two scales of the result, relative to the sustained one.
        probes: maximum number of probes.
    """

    start: Fraction = Fraction(1)
    least: Fraction = Fraction(1, 64)
    most: Fraction = Fraction(256)
    precision: Fraction = Fraction(1, 20)
    probes: int = 24

    def without(self, scale: Fraction, probes: Sequence[Probe]) -> SearchLimits:
        """Return limits that end at the outermost tried scale on the side of `scale`.

        Args:
            scale: a scale that cannot be tried, below or above all tried scales.
            probes: probes so far, at least one.
        """
        lowest = min(p.scale for p in probes)
        if scale < lowest:
            return replace(self, least=lowest)
        return replace(self, most=max(p.scale for p in probes))


def boundary(
    probes: Sequence[Probe],
) -> tuple[RateLevel, Fraction | None, Fraction | None]:
    """Return the level of the result, the sustained scale, and the next higher scale.

    Returns:
        `SHOWN` if any probe has this level, otherwise `SEEMS`; the highest scale that is sustained
        at this level, None if there is none; and the lowest higher scale that is not, None if
        there is none.
    """
    level = RateLevel.SHOWN if any(p.level is RateLevel.SHOWN for p in probes) else RateLevel.SEEMS
    failed = min((p.scale for p in probes if p.level is RateLevel.FAILED), default=None)
    sustained = [
        p.scale
        for p in probes
        if p.level is RateLevel.SHOWN or (p.level >= level and (failed is None or p.scale < failed))
    ]
    best = max(sustained, default=None)
    above = [
        p.scale for p in probes if p.scale not in sustained and (best is None or p.scale > best)
    ]
    return level, best, min(above, default=None)


def beyond(scale: Fraction, probes: Sequence[Probe]) -> bool:
    """True if a scale is below or above all tried scales; False if none was tried."""
    scales = [p.scale for p in probes]
    return bool(scales) and not min(scales) <= scale <= max(scales)


def next_scale(probes: Sequence[Probe], limits: SearchLimits) -> Fraction | None:
    """Return the scale to try next; None if the search is over.

    Args:
        probes: in any order.
        limits: bounds and precision.
    """
    if not probes:
        return min(limits.start, limits.most)
    if len(probes) >= limits.probes:
        return None
    _, best, above = boundary(probes)
    if best is None:
        lowest = min(p.scale for p in probes)
        return max(lowest / 2, limits.least) if lowest > limits.least else None
    if above is None:
        return min(best * 2, limits.most) if best < limits.most else None
    if above - best > best * limits.precision:
        return (best + above) / 2
    if all(p.scale >= best for p in probes) and best > limits.least:
        return max(best * _FURTHER_DOWN, limits.least)
    if all(p.scale <= above for p in probes) and above < limits.most:
        return min(above * _FURTHER_UP, limits.most)
    return None

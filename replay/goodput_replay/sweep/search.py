"""Where to look next for the highest rate that holds: a pure function of what was tried.

A rate scale is *shown* to hold by a PASS, and *seems* to by an estimate that reaches every
objective where the data are too few to show it. The search doubles or halves until it has one
that holds and a higher one that does not, then halves the gap. A response need not be monotone,
so the answer never rests on one rate to either side alone: one further out is tried where none
was. It knows nothing of replays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from fractions import Fraction
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Level", "Limits", "Probe", "beyond", "boundary", "next_scale"]

_FURTHER_UP: Final = Fraction(3, 2)
_FURTHER_DOWN: Final = Fraction(1, 2)


class Level(IntEnum):
    """What a probe says of its rate."""

    BROKEN = 0
    """Some class misses its objective, by its estimate at least."""
    SEEMS = 1
    """Every class reaches its objective by its estimate; it is not shown."""
    SHOWN = 2
    """The verdict is PASS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One rate that was tried.

    Args:
        scale: of the trace's rate.
        level: what it says.
    """

    scale: Fraction
    level: Level


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far and how fine to search.

    Args:
        start: the first scale.
        least, most: no scale below or above these.
        precision: the gap to stop at, over the scale that holds.
        probes: at most so many.
    """

    start: Fraction = Fraction(1)
    least: Fraction = Fraction(1, 64)
    most: Fraction = Fraction(256)
    precision: Fraction = Fraction(1, 20)
    probes: int = 24

    def without(self, scale: Fraction, probes: Sequence[Probe]) -> Limits:
        """Limits that leave out a scale which cannot be tried, and all that lie beyond it.

        Args:
            scale: `beyond` those that were tried.
            probes: what was tried, at least one.
        """
        lowest = min(p.scale for p in probes)
        if scale < lowest:
            return replace(self, least=lowest)
        return replace(self, most=max(p.scale for p in probes))


def boundary(probes: Sequence[Probe]) -> tuple[Level, Fraction | None, Fraction | None]:
    """The level that the search is about, the highest scale that has it, the next one without.

    As long as nothing is shown to hold, the search is about what seems to.
    """
    level = Level.SHOWN if any(p.level is Level.SHOWN for p in probes) else Level.SEEMS
    holds = [p.scale for p in probes if p.level >= level]
    best = max(holds, default=None)
    above = [p.scale for p in probes if p.level < level and (best is None or p.scale > best)]
    return level, best, min(above, default=None)


def beyond(scale: Fraction, probes: Sequence[Probe]) -> bool:
    """Whether a scale lies below or above all that were tried; False: nothing was tried."""
    scales = [p.scale for p in probes]
    return bool(scales) and not min(scales) <= scale <= max(scales)


def next_scale(probes: Sequence[Probe], limits: Limits) -> Fraction | None:
    """The scale to try next; None: the search is over.

    Args:
        probes: what was tried, in any order.
        limits: how far and how fine.
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

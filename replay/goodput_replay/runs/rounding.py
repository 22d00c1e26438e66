"""Rounding of the numbers in a summary.

Attainments and lower bounds are truncated and upper bounds are raised, so that a missed objective
never looks met.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Final

from goodput_core.units import NS_PER_MS, NS_PER_S

__all__ = ["cut_share", "round_up", "seconds", "to_ms"]

_SHARE_SCALE: Final = 1_000_000


def to_ms(ns: int) -> float:
    """Return milliseconds, rounded to a microsecond."""
    return round(ns / NS_PER_MS, 3)


def seconds(ns: int) -> float:
    """Return seconds, rounded to a microsecond."""
    return round(ns / NS_PER_S, 6)


def cut_share(share: Fraction | float) -> float:
    """Truncate to six decimals; the result never exceeds the share."""
    return math.floor(Fraction(share) * _SHARE_SCALE) / _SHARE_SCALE


def round_up(share: Fraction | float) -> float:
    """Round up to six decimals; the result is never below the share."""
    return math.ceil(Fraction(share) * _SHARE_SCALE) / _SHARE_SCALE

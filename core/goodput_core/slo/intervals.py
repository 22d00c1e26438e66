"""One-sided confidence bounds of an attainment: Wilson's, at an effective sample size.

Requests of one overload miss together, so a thousand of them may be worth only a few dozen
independent ones; the caller says how many. Where blocks of seconds can be resampled, that is
done elsewhere (it needs numpy); Wilson is what those bounds may never be narrower than.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import NormalDist
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from fractions import Fraction

__all__ = ["DEFAULT_CONFIDENCE", "Interval", "IntervalMethod", "requests_needed", "wilson"]

DEFAULT_CONFIDENCE: Final = 0.95


class IntervalMethod(StrEnum):
    """Where an interval's bounds come from."""

    BLOCKS = "blocks"
    """Resampled blocks of seconds, never narrower than Wilson at the effective sample size."""
    WILSON = "wilson"
    """Wilson at the stated sample size."""
    BACKLOGS = "backlogs"
    """Wilson with each backlog, and each second outside of one, as a single observation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Two one-sided bounds of an attainment, each holding with the stated confidence.

    Args:
        lower: the attainment is at least this.
        uppers: the attainment is at most `uppers[0]`; `uppers[k]` is the same bound when its
            chance of error is shared by k + 1 classes (Holm's step-down tests need these).
        confidence: of each bound alone, 0.5 … 1: the two together hold less often.
        effective: independent requests that the sample is worth.
        method: where the bounds come from.

    Raises:
        ValueError: not 0 ≤ lower ≤ uppers[0] ≤ uppers[1] ≤ … ≤ 1.
    """

    lower: float
    uppers: tuple[float, ...]
    confidence: float
    effective: float
    method: IntervalMethod

    def __post_init__(self) -> None:
        bounds = (0.0, self.lower, *self.uppers, 1.0)
        if not self.uppers or any(a > b for a, b in pairwise(bounds)):
            raise ValueError(f"bounds {bounds} of an attainment are not in order")

    @property
    def upper(self) -> float:
        """The upper bound for this class alone."""
        return self.uppers[0]


def wilson(
    good: int,
    total: int,
    *,
    effective: float | None = None,
    confidence: float = DEFAULT_CONFIDENCE,
    classes: int = 1,
    method: IntervalMethod = IntervalMethod.WILSON,
) -> Interval:
    """Wilson's score bounds of good/total.

    Args:
        good: requests that attained.
        total: requests judged; with 0 nothing is known and the bounds are 0 and 1.
        effective: independent requests that `total` is worth, above 0; None: all of them.
        confidence: of each one-sided bound, at least 0.5 and below 1.
        classes: how many classes may share the error of the upper bound.
        method: what the effective sample size rests on.

    Source: Wilson, "Probable Inference, the Law of Succession, and Statistical Inference",
    JASA 1927.
    """
    if not 0.5 <= confidence < 1:
        raise ValueError(f"a confidence of {confidence} is out of bounds; 0.5 ≤ confidence < 1")
    if effective is not None and effective <= 0 < total:
        raise ValueError(f"{total} requests cannot be worth {effective} independent ones")
    size = 0.0 if total == 0 else float(total if effective is None else effective)
    risk = 1 - confidence
    return Interval(
        lower=_wilson_bound(good, total, size, -_z(risk)),
        uppers=tuple(
            _wilson_bound(good, total, size, _z(risk / share)) for share in range(1, classes + 1)
        ),
        confidence=confidence,
        effective=size,
        method=method,
    )


def requests_needed(objective: Fraction, confidence: float = DEFAULT_CONFIDENCE) -> int:
    """The fewest independent requests that could show the objective, were all of them to attain.

    Wilson's lower bound of n out of n is n / (n + z²): 99 % at 95 % confidence needs 268.
    """
    z = _z(1 - confidence)
    return max(1, math.ceil(z * z * float(objective / (1 - objective))))


def _z(risk: float) -> float:
    return -NormalDist().inv_cdf(risk)


def _wilson_bound(good: int, total: int, size: float, z: float) -> float:
    """The bound on z's side: below the share for a negative z, above it for a positive one."""
    if total == 0:
        return 0.0 if z < 0 else 1.0
    if good == (0 if z < 0 else total):
        return good / total
    share = good / total
    square = z * z / size
    spread = z * math.sqrt(share * (1 - share) / size + square / (4 * size))
    bound = (share + square / 2 + spread) / (1 + square)
    # Rounding must not carry a bound past the share it bounds.
    return max(0.0, min(bound, share)) if z < 0 else min(1.0, max(bound, share))

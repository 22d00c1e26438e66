"""Confidence levels of several looks at growing evidence, so that looking twice stays honest.

A comparison that is repeated until it passes will pass by chance. If the looks are fixed in
advance, the permitted error probability can be spent over them. The O'Brien–Fleming form spends
little early, so that the last look is almost as sharp as a single one.

Source: Lan and DeMets, "Discrete sequential boundaries for clinical trials", Biometrika, 1983, for
the spending function; Armitage, McPherson and Rowe, "Repeated significance tests on accumulating
data", Journal of the Royal Statistical Society A, 1969, for the integration.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from goodput_core.slo.distributions import normal_quantile
from goodput_core.slo.intervals import LEAST_CONFIDENCE

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["look_confidences"]

_POINTS: Final = 201
_REACH: Final = 8.0
_STEPS: Final = 40


def look_confidences(looks: Sequence[int], confidence: float) -> tuple[float, ...]:
    """Return the one-sided confidence to use at each look.

    With these levels, a true limit is crossed at any of the looks with a probability of at most
    1 − `confidence`. The levels hold for normal sums of independent replicates. For few
    replicates they are used as the levels of t bounds.

    Args:
        looks: number of replicates at each look, increasing, the last one the maximum.
        confidence: one-sided confidence of all looks together, at least 0.5 and below 1.

    Raises:
        ValueError: the looks do not increase, or the confidence is out of bounds.
    """
    if not looks or looks[0] < 1 or any(a >= b for a, b in pairwise(looks)):
        raise ValueError(f"looks at {list(looks)} replicates do not increase")
    if not LEAST_CONFIDENCE <= confidence < 1:
        raise ValueError(f"a confidence of {confidence} is out of bounds; 0.5 ≤ confidence < 1")
    return _levels(tuple(looks), confidence)


@lru_cache(maxsize=32)
def _levels(looks: tuple[int, ...], confidence: float) -> tuple[float, ...]:
    error, last = 1 - confidence, looks[-1]
    limit = normal_quantile(1 - error / 2)
    spent = [2 * _tail(limit / math.sqrt(look / last)) for look in looks]
    spent[-1] = error
    bounds = [-normal_quantile(spent[0])]
    # Density of the sum of replicates that has not crossed a bound, at equal distances.
    sums = _grid(looks[0], bounds[0])
    density = [_normal_density(x, looks[0]) for x in sums]
    for (before, look), (so_far, total) in zip(pairwise(looks), pairwise(spent), strict=True):
        bounds.append(_find_bound(sums, density, look - before, look, total - so_far))
        if look < last:
            at = _grid(look, bounds[-1])
            density = [_spread(sums, density, look - before, x) for x in at]
            sums = at
    return tuple(1 - _tail(bound) for bound in bounds)


def _find_bound(
    sums: Sequence[float], density: Sequence[float], added: int, look: int, error: float
) -> float:
    """Return the standardised bound that the sum crosses at this look with probability `error`."""
    low, high = 0.0, _REACH
    weights = _simpson(sums)
    masses = [d * w for d, w in zip(density, weights, strict=True)]
    for _ in range(_STEPS):
        middle = (low + high) / 2
        edge = middle * math.sqrt(look)
        crossed = math.fsum(
            mass * _tail((edge - x) / math.sqrt(added))
            for mass, x in zip(masses, sums, strict=True)
        )
        if crossed > error:
            low = middle
        else:
            high = middle
    return high


def _spread(sums: Sequence[float], density: Sequence[float], added: int, at: float) -> float:
    """Return the density of the sum after more replicates."""
    weights = _simpson(sums)
    return math.fsum(
        d * w * _normal_density(at - x, added)
        for d, w, x in zip(density, weights, sums, strict=True)
    )


def _grid(look: int, bound: float) -> list[float]:
    """Return an odd number of points from far below 0 up to the bound, on the scale of sums."""
    scale = math.sqrt(look)
    low, high = -_REACH * scale, bound * scale
    return [low + (high - low) * i / (_POINTS - 1) for i in range(_POINTS)]


def _simpson(points: Sequence[float]) -> list[float]:
    """Return the weights of Simpson's rule."""
    step = (points[-1] - points[0]) / (len(points) - 1)
    inner = [4 if i % 2 else 2 for i in range(1, len(points) - 1)]
    return [step / 3 * weight for weight in (1, *inner, 1)]


def _tail(x: float) -> float:
    """Return the probability that a standard normal variable exceeds `x`."""
    return math.erfc(x / math.sqrt(2)) / 2


def _normal_density(x: float, variance: float) -> float:
    return math.exp(-x * x / (2 * variance)) / math.sqrt(2 * math.pi * variance)

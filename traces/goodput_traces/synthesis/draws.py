"""Random numbers of some distributions, from uniform draws alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from random import Random

__all__ = ["draw_binomial", "draw_exponential", "draw_normal", "draw_poisson"]

_LARGE_MEAN: Final = 64.0


def draw_exponential(rng: Random, mean: float) -> float:
    """Draw an exponential number."""
    return -mean * math.log(1.0 - rng.random())


def draw_normal(rng: Random) -> float:
    """Draw a standard normal number by the Box-Muller transform, from two uniform draws."""
    radius = math.sqrt(-2.0 * math.log(1.0 - rng.random()))
    return radius * math.cos(2.0 * math.pi * rng.random())


def draw_poisson(rng: Random, mean: float) -> int:
    """Draw a Poisson number; a large mean is approximated by the normal distribution."""
    if mean > _LARGE_MEAN:
        return max(0, round(mean + math.sqrt(mean) * draw_normal(rng)))
    limit, product, count = math.exp(-mean), rng.random(), 0
    while product > limit:
        product *= rng.random()
        count += 1
    return count


def draw_binomial(rng: Random, trials: int, probability: float) -> int:
    """Draw the number of successes of independent trials; many are approximated by the normal."""
    if probability in {0.0, 1.0}:
        return trials if probability else 0
    variance = trials * probability * (1.0 - probability)
    if variance > _LARGE_MEAN:
        number = round(trials * probability + math.sqrt(variance) * draw_normal(rng))
        return min(trials, max(0, number))
    return sum(rng.random() < probability for _ in range(trials))

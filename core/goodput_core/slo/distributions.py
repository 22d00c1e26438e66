"""Quantiles of the chi-square, beta and Student t distributions, with real parameters.

The intervals of an attainment are computed from these quantiles. The base install has no scipy, and
the standard library has only `lgamma` and the normal distribution. The quantiles are accurate to
nine digits; the tests compare them with scipy's.

Source: Press et al., "Numerical Recipes", 3rd edition, chapter 6 (incomplete gamma and beta
functions); Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.4.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["beta_quantile", "chi_square_quantile", "normal_quantile", "student_t_quantile"]

_NORMAL: Final = NormalDist()
_EPSILON: Final = 1e-13
_TINY: Final = 1e-300
_SMALL: Final = 1e-20
_LAST_STEP: Final = 1e-6  # relative; the remaining error is about the square of the last step
_STIRLING: Final = 10.0  # minimum argument of Stirling's series
_MAX_TERMS: Final = 200_000
_MAX_STEPS: Final = 200
_MANY_DEGREES: Final = 4_000.0


def normal_quantile(p: float) -> float:
    """Return the p-quantile of the standard normal distribution, 0 < p < 1."""
    return _NORMAL.inv_cdf(p)


def chi_square_quantile(p: float, degrees: float) -> float:
    """Return the p-quantile of the chi-square distribution.

    Args:
        p: 0 < p < 1.
        degrees: degrees of freedom, any real number above 0.
    """
    if degrees > _MANY_DEGREES:
        return _expanded_chi_square(normal_quantile(p), degrees)
    shape = degrees / 2
    log_gamma = math.lgamma(shape)

    def density(x: float) -> float:
        return math.exp((shape - 1) * math.log(x) - x - log_gamma)

    # Start from Wilson and Hilferty's cube, or near zero from a power law.
    z = normal_quantile(p)
    cube = 1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))
    near_zero = math.exp((math.log(p) + math.lgamma(shape + 1)) / shape)
    if near_zero < _SMALL:
        return 2 * near_zero  # the further terms of the series are negligible
    guess = shape * cube**3 if cube > 0 and degrees > 1 else near_zero
    high = shape + 40 * math.sqrt(shape) + 100  # above the quantile of any p below 1
    return 2 * _invert(lambda x: _lower_gamma(shape, x), density, p, guess, high)


def beta_quantile(p: float, a: float, b: float) -> float:
    """Return the p-quantile of the beta distribution.

    Args:
        p: 0 < p < 1.
        a: first parameter of the distribution, above 0.
        b: second parameter of the distribution, above 0.
    """
    if _incomplete_beta(a, b, 0.5) < p:  # the quantile is above 1/2: compute its distance from 1
        return 1 - _small_beta_quantile(1 - p, b, a)
    return _small_beta_quantile(p, a, b)


@lru_cache(maxsize=1024)
def student_t_quantile(p: float, degrees: float) -> float:
    """Return the p-quantile of Student's t distribution.

    Args:
        p: 0 < p < 1.
        degrees: degrees of freedom, above 0.
    """
    if p == 0.5:
        return 0.0
    if p < 0.5:
        return -student_t_quantile(1 - p, degrees)
    x = beta_quantile(2 * (1 - p), degrees / 2, 0.5)
    return math.sqrt(degrees * (1 - x) / x)


def _small_beta_quantile(p: float, a: float, b: float) -> float:
    """Return a quantile of the beta distribution that is not above 1/2."""

    def density(x: float) -> float:
        return _beta_scale(a, b, x) / (x * (1 - x)) if 0 < x < 1 else 0.0

    mean = a / (a + b)
    spread = math.sqrt(mean * (1 - mean) / (a + b + 1))
    guess = mean + normal_quantile(p) * spread
    return _invert(lambda x: _incomplete_beta(a, b, x), density, p, guess, 1.0)


def _invert(
    cdf: Callable[[float], float],
    density: Callable[[float], float],
    p: float,
    guess: float,
    high: float,
) -> float:
    """Solve cdf(x) = p on [0, high] by Newton steps; bisect if a step leaves the bracket."""
    low = 0.0
    x = guess if low < guess < high else high / 2
    for _ in range(_MAX_STEPS):
        error = cdf(x) - p
        if error > 0:
            high = x
        else:
            low = x
        slope = density(x)
        next_x = x - error / slope if slope > 0 else math.inf
        if abs(next_x - x) <= _LAST_STEP * x:
            return next_x
        if not low < next_x < high:
            # Bisect on a logarithmic scale: x may be many powers of ten below `high`.
            next_x = math.sqrt(low * high) if low > 0 else high / 16
        x = next_x
    return x


def _expanded_chi_square(z: float, degrees: float) -> float:
    """Return the quantile at the normal quantile z, for many degrees of freedom.

    Source: Goldberg and Levine, "Approximate Formulas for the Percentage Points and
    Normalization of t and χ²", 1946: the Cornish–Fisher expansion.
    """
    root = math.sqrt(2 * degrees)
    return (
        degrees
        + root * z
        + 2 / 3 * (z**2 - 1)
        + (z**3 - 7 * z) / (9 * root)
        - (6 * z**4 + 14 * z**2 - 32) / (405 * degrees)
        + (9 * z**5 + 256 * z**3 - 433 * z) / (4860 * degrees * root)
    )


def _lower_gamma(shape: float, x: float) -> float:
    """Return the regularised lower incomplete gamma function P(shape, x)."""
    if x <= 0:
        return 0.0
    log_scale = shape * math.log(x) - x - math.lgamma(shape)
    if log_scale < -745:  # below the smallest float
        return 0.0 if x < shape else 1.0
    if x < shape + 1:
        term = total = 1 / shape
        for n in range(1, _MAX_TERMS):
            term *= x / (shape + n)
            total += term
            if term < total * _EPSILON:
                break
        return total * math.exp(log_scale)
    # Lentz's continued fraction of the upper function, whose denominators are never zero here.
    b = x + 1 - shape
    c, d = 1 / _TINY, 1 / b
    fraction = d
    for n in range(1, _MAX_TERMS):
        a = n * (shape - n)
        b += 2
        d = 1 / (a * d + b)
        c = b + a / c
        change = c * d
        fraction *= change
        if -_EPSILON < change - 1 < _EPSILON:
            break
    return 1 - fraction * math.exp(log_scale)


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b)."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    scale = _beta_scale(a, b, x)
    if x > (a + 1) / (a + b + 2):
        return 1 - scale * _beta_fraction(b, a, 1 - x) / b
    return scale * _beta_fraction(a, b, x) / a


def _beta_scale(a: float, b: float, x: float) -> float:
    """Return x^a · (1 − x)^b / B(a, b), accurate for large a and b by Stirling's series."""
    if min(a, b) < _STIRLING:
        log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
        return math.exp(a * math.log(x) + b * math.log1p(-x) - log_beta)
    mode = a / (a + b)
    log_ratio = a * math.log1p((x - mode) / mode) + b * math.log1p((mode - x) / (1 - mode))
    remainder = _stirling(a) + _stirling(b) - _stirling(a + b)
    return math.sqrt(a * b / (2 * math.pi * (a + b))) * math.exp(log_ratio - remainder)


def _beta_fraction(a: float, b: float, x: float) -> float:
    """Evaluate Lentz's continued fraction of the incomplete beta function."""
    c = 1.0
    d = fraction = 1 / _nonzero(1 - (a + b) * x / (a + 1))
    for n in range(1, _MAX_TERMS):
        even = n * (b - n) * x / ((a + 2 * n - 1) * (a + 2 * n))
        odd = -(a + n) * (a + b + n) * x / ((a + 2 * n) * (a + 2 * n + 1))
        change = 1.0
        for term in (even, odd):
            d = 1 / _nonzero(1 + term * d)
            c = _nonzero(1 + term / c)
            change = c * d
            fraction *= change
        if abs(change - 1) < _EPSILON:
            break
    return fraction


def _stirling(x: float) -> float:
    """Return the remainder of Stirling's formula for lgamma(x), x at least 10."""
    square = x * x
    return (1 / 12 - (1 / 360 - 1 / 1260 / square) / square) / x


def _nonzero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY

"""Recursive least squares: a line through what is seen, brought up to date with each new point."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["RecursiveLine"]

_FORGET: Final = 0.97
"""Weight of all earlier points when a new one surprises; else nothing is forgotten."""
_SURPRISE: Final = 0.05
_MOST_UNSURE: Final = 1e4


class RecursiveLine:
    """y = Σ coefficient · feature, for features of about one.

    Points that are predicted well are not forgotten in favour of new ones: a device that does
    the same thing for hours would otherwise make the line forget all else. No prediction uses a
    negative coefficient.

    Args:
        prior: coefficients before anything was seen.

    Source: Haykin, "Adaptive Filter Theory", chapter 10, with forgetting by surprise.
    """

    __slots__ = ("_covariance", "coefficients")

    def __init__(self, prior: Sequence[float]) -> None:
        self.coefficients = list(prior)
        n = len(self.coefficients)
        self._covariance = [[float(i == j) * 10 for j in range(n)] for i in range(n)]

    def predict(self, features: Sequence[float]) -> float:
        """The line's value, each coefficient at least zero."""
        total = 0.0
        for coefficient, feature in zip(self.coefficients, features, strict=True):
            if coefficient > 0:
                total += coefficient * feature
        return total

    def learn(self, features: Sequence[float], value: float) -> None:
        """One more point."""
        raw = sum(c * f for c, f in zip(self.coefficients, features, strict=True))
        error = value - raw
        forget = _FORGET if abs(error) > _SURPRISE * abs(value) else 1.0
        covariance = self._covariance
        gain = [sum(p * f for p, f in zip(row, features, strict=True)) for row in covariance]
        scale = forget + sum(f * g for f, g in zip(features, gain, strict=True))
        for i, g in enumerate(gain):
            self.coefficients[i] += g * error / scale
        n = len(gain)
        if sum(covariance[i][i] for i in range(n)) > _MOST_UNSURE:
            forget = 1.0
        for i in range(n):
            row, share = covariance[i], gain[i] / scale
            for j in range(n):
                row[j] = (row[j] - share * gain[j]) / forget

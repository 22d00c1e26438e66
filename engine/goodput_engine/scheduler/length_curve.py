"""The survival curve of the output lengths of one group of requests, for the predictor."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LengthCurve", "prompt_bin"]

_BINS_PER_DOUBLING: Final = 8
_DOUBLINGS: Final = 20
_PROMPT_DOUBLINGS_PER_BIN: Final = 2
_TYPICAL_TOKENS: Final = 256
"""Before anything is known, an output of n tokens is expected to have n + 256 more."""
_PRIOR_ENDS: Final = 1 / 32
"""In each bin of lengths, the parent curve counts as this many ends."""
_PRIOR_EXACT: Final = 0.5
"""The parent's share of outputs as long as their limits counts as this many outputs."""
_EXACT: Final = 0.2
"""Share before anything is known: most limits only protect from an endless output."""
_PROTECTION: Final = 1 / math.log(32_768)
"""Density of such limits over the logarithm of tokens, up to 32,768 tokens."""
_MAX_REMEMBERED: Final = 8192
_MAX_EXPECTED: Final = 16
"""Requests of a class whose end-to-end targets are taken as evidence before an output ends."""
_NO_HAZARD: Final = 1e-9
_NO_SURVIVORS: Final = 1e-12


@lru_cache(maxsize=_MAX_REMEMBERED)
def _bin(tokens: float) -> int:
    return int(math.log2(tokens + 1) * _BINS_PER_DOUBLING + 1e-9)


def prompt_bin(tokens: int) -> int:
    """Return the bin of a prompt's size; sizes of a bin differ by less than a factor of four."""
    return tokens.bit_length() // _PROMPT_DOUBLINGS_PER_BIN


_BINS: Final = _BINS_PER_DOUBLING * _DOUBLINGS
_EDGES: Final = [2 ** (k / _BINS_PER_DOUBLING) - 1 for k in range(_BINS + 1)]
_WIDTHS: Final = [high - low for low, high in pairwise(_EDGES)]
_LAST: Final = len(_WIDTHS) - 1


def _unknown(typical_tokens: float) -> list[float]:
    """Return the hazards by which an output of n tokens is expected to have n + typical more."""
    return [2 / (typical_tokens + (low + high) / 2) for low, high in pairwise(_EDGES)]


_UNKNOWN: Final = _unknown(_TYPICAL_TOKENS)


class LengthCurve:
    """The survival curve of one group of outputs, with a constant hazard in each bin.

    Args:
        parent: the curve to which this one shrinks; None for that of an unknown load.
    """

    __slots__ = (
        "_ages",
        "_area",
        "_at_limit",
        "_ends",
        "_expected",
        "_exposure",
        "_falling",
        "_hazard",
        "_is_fitted",
        "_known",
        "_lineage",
        "_outputs",
        "_parent",
        "_reached",
        "_survivors",
        "num_ended",
    )

    def __init__(self, parent: LengthCurve | None) -> None:
        self._parent = parent
        older = () if parent is None else parent._lineage  # noqa: SLF001
        self._lineage: tuple[LengthCurve, ...] = (*older, self)
        """The curves to which this one shrinks, the most general first, and this one."""
        self._ends = [0.0] * len(_WIDTHS)
        """Outputs that ended in each bin before their limits."""
        self._exposure = [0.0] * len(_WIDTHS)
        """Outputs that reached each bin; one that was censored in it counts for the part before."""
        self.num_ended = 0.0
        """Outputs that have ended; the earlier ones count less."""
        self._outputs = self._at_limit = 0.0
        """Outputs whose clients stated a limit, and those of them that reached it."""
        self._ages: Sequence[int] = ()
        """Ages of running outputs for the next fit."""
        self._is_fitted = False
        self._expected: list[int] = []
        """Tokens for which the end-to-end targets of the first requests left time."""
        self._hazard: list[float] = []
        """Chance to end with the next token, in each bin."""
        self._survivors: list[float] = []
        """Share of outputs that are longer than each edge."""
        self._area: list[float] = []
        """Area under the curve up to each edge."""
        self._falling: list[float] = []
        """The survivors, negated: an ascending order, which can be searched."""
        self._reached: dict[int, tuple[float, float]] = {}
        """Area up to a length, and share of longer outputs, computed since the last fit."""
        self._known: dict[tuple[int, int, float, bool], int] = {}
        """Predictions since the last fit, by bin, limit, share (-1: the mean), and if the client
        stated the limit."""

    # --- learn -------------------------------------------------------------------------------
    def add(self, tokens: int, *, at_limit: bool, stated: bool) -> None:
        """Add a finished output."""
        self.num_ended += 1
        self._outputs += stated
        if at_limit:
            self.censor(tokens)
            self._at_limit += stated
        else:
            at = min(_bin(tokens - 0.5), _LAST)
            for k in range(at + 1):
                self._exposure[k] += 1
            self._ends[at] += 1

    def censor(self, tokens: int) -> None:
        """Add an output that would have been longer."""
        _expose(self._exposure, tokens)

    def halve(self) -> None:
        """Halve the weight of all outputs so far."""
        self._ends = [ends / 2 for ends in self._ends]
        self._exposure = [tokens / 2 for tokens in self._exposure]
        self.num_ended /= 2
        self._outputs /= 2
        self._at_limit /= 2

    def expire(self, ages: Sequence[int]) -> None:
        """Let the curve be estimated again, with the ages of running outputs, at its next use."""
        self._ages = ages
        self._is_fitted = False
        self._known.clear()

    def expect(self, tokens: int) -> None:
        """Add the tokens for which the end-to-end target of a request leaves time."""
        if len(self._expected) < _MAX_EXPECTED:
            self._expected.append(max(1, tokens))
            self._is_fitted = False
            self._known.clear()

    def hazard(self) -> list[float]:
        """Return the chance to end with the next token, in each bin, after the latest evidence."""
        if not self._is_fitted:
            self._fit()
            self._is_fitted = True
        return self._hazard

    def _prior(self) -> list[float]:
        """Return the hazards near which the curve stays without evidence."""
        if self._expected:
            typical = statistics.geometric_mean(self._expected)
            if typical < _TYPICAL_TOKENS:
                return _unknown(typical)
        return _UNKNOWN if self._parent is None else self._parent.hazard()

    def _fit(self) -> None:
        exposure = list(self._exposure)
        # Running outputs by the bin that they have reached.
        reached = [0] * len(exposure)
        for age in self._ages:
            reached[_expose_last(exposure, age)] += 1
        longer = 0
        for k in range(_LAST, -1, -1):
            exposure[k] += longer
            longer += reached[k]
        self._hazard = []
        bins = zip(self._ends, exposure, self._prior(), _WIDTHS, strict=True)
        for ends, outputs, expected, width in bins:
            chance = -math.expm1(-max(expected, _NO_HAZARD) * width)
            chance = (ends + _PRIOR_ENDS) / (outputs + _PRIOR_ENDS / chance)
            chance = min(chance, 1 - _PRIOR_ENDS / (outputs + 1))
            self._hazard.append(-math.log1p(-chance) / width)
        survivors, area = 1.0, 0.0
        self._survivors, self._area = [survivors], [area]
        for hazard, width in zip(self._hazard, _WIDTHS, strict=True):
            left = math.exp(-hazard * width)
            area += survivors * (1 - left) / hazard
            survivors *= left
            self._survivors.append(survivors)
            self._area.append(area)
        self._falling = [-share for share in self._survivors]
        self._reached.clear()

    # --- predict -----------------------------------------------------------------------------
    def mean(self, age: int, limit: int, *, stated: bool) -> int:
        """Return the mean length of an output that is longer than `age`.

        Args:
            age: its tokens so far.
            limit: its limit.
            stated: True if the limit is the client's, which may be the exact length.
        """
        key = (_bin(age), limit, -1, stated)
        total = self._known.get(key)
        if total is None:
            total = self._remember(key, self._mean(age, limit, stated=stated))
        return min(limit, max(age + 1, total))

    def quantile(self, age: int, limit: int, share: float, *, stated: bool) -> int:
        """Return the quantile of the length of an output that is longer than `age`."""
        key = (_bin(age), limit, share, stated)
        total = self._known.get(key)
        if total is None:
            total = self._remember(key, self._quantile(age, limit, share, stated=stated))
        return min(limit, max(age + 1, total))

    def chance_within(self, age: int, limit: int, tokens: int, *, stated: bool) -> float:
        """Return the chance that an output that is longer than `age` has at most `tokens`."""
        if tokens >= limit:
            return 1.0
        survivors = self._at(age)[1]
        if tokens <= age or survivors < _NO_SURVIVORS:
            return 0.0
        exact = self._exact(survivors, limit) if stated else 0.0
        return (1 - exact) * (1 - self._at(tokens)[1] / survivors)

    def _remember(self, key: tuple[int, int, float, bool], total: int) -> int:
        if len(self._known) >= _MAX_REMEMBERED:
            self._known.clear()
        self._known[key] = total
        return total

    def _mean(self, age: int, limit: int, *, stated: bool) -> int:
        area, survivors = self._at(age)
        if survivors < _NO_SURVIVORS:
            return min(limit, 2 * age)
        exact = self._exact(survivors, limit) if stated else 0.0
        longer = (self._at(limit)[0] - area) / survivors
        return age + round((1 - exact) * longer + exact * (limit - age))

    def _quantile(self, age: int, limit: int, share: float, *, stated: bool) -> int:
        survivors = self._at(age)[1]
        exact = self._exact(survivors, limit) if stated else 0.0
        if exact >= 1 - share:
            return limit
        left = survivors * (1 - share - exact) / (1 - exact)
        if left <= 0:
            return limit
        at = min(max(bisect_left(self._falling, -left) - 1, 0), _LAST)
        return math.ceil(_EDGES[at] + math.log(self._survivors[at] / left) / self._hazard[at])

    def _at(self, tokens: int) -> tuple[float, float]:
        """Return the area up to a length, and the share of outputs that are longer."""
        hazards, reached = self.hazard(), self._reached
        found = reached.get(tokens)
        if found is None:
            at = min(_bin(tokens), _LAST)
            hazard, survivors = hazards[at], self._survivors[at]
            left = math.exp(-hazard * (tokens - _EDGES[at]))
            found = self._area[at] + survivors * (1 - left) / hazard, survivors * left
            if len(reached) < _MAX_REMEMBERED:
                reached[tokens] = found
        return found

    def _exact(self, survivors: float, limit: int) -> float:
        """Return the chance that the limit of an output is its exact length.

        Args:
            survivors: share of the other outputs that are as long as this one already is.
            limit: the limit.
        """
        share = self._exact_share(limit)
        return share / (share + (1 - share) * survivors)

    def _exact_share(self, limit: int) -> float:
        """Return the share of limits of this size that are exact."""
        share = _exact_unknown(limit)
        for curve in self._lineage:
            at_limit, outputs = curve._at_limit, curve._outputs  # noqa: SLF001
            share = (at_limit + _PRIOR_EXACT * share) / (outputs + _PRIOR_EXACT)
        return share


@lru_cache(maxsize=_MAX_REMEMBERED)
def _exact_unknown(limit: int) -> float:
    """Return the share of limits of this size that are exact, before anything is known."""
    # On the curve of an unknown load, (t / (n + t))² of the outputs are longer than n.
    density = 2 * limit * _TYPICAL_TOKENS**2 / (limit + _TYPICAL_TOKENS) ** 3
    exact, other = _EXACT * density, (1 - _EXACT) * _PROTECTION
    return exact / (exact + other)


def _expose(exposure: list[float], tokens: int) -> None:
    """Add a censored output to the bins through which it went."""
    for k in range(_expose_last(exposure, tokens)):
        exposure[k] += 1


def _expose_last(exposure: list[float], tokens: int) -> int:
    """Add a censored output to the last bin that it reached; return this bin."""
    at = min(_bin(tokens), _LAST)
    exposure[at] += min(1.0, (tokens - _EDGES[at]) / _WIDTHS[at])
    return at

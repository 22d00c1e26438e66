"""Prediction of output lengths.

`LearnedLengths` learns from finished requests, as is possible in a server. `KnownLengths` is an
oracle, which shows how much perfect prediction could gain. The oracle exists only in virtual time,
and nothing else in the scheduler has access to true lengths.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["KnownLengths", "LearnedLengths", "LengthPredictor", "PredictionError"]

_BINS_PER_DOUBLING: Final = 8
_DOUBLINGS: Final = 20
_HALF_LIFE: Final = 1024
"""After this many outputs, the weight of all earlier ones is halved."""
_MAX_CURVES: Final = 256
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionError:
    """Error of predictions, each made from the outputs that finished before its request.

    Args:
        judged: number of outputs since the start.
        mean_abs_log_ratio: mean of |ln(predicted / true)| over recent outputs; 0 before the first
            one. 0.69 is a factor of two.
    """

    judged: int = 0
    mean_abs_log_ratio: float = 0.0


class LengthPredictor(Protocol):
    """Predicts the total output tokens of a request."""

    @property
    def revision(self) -> int:
        """Counter that rises when predictions may have changed for another reason than a token."""
        ...

    @property
    def error(self) -> PredictionError:
        """Error over all classes."""
        ...

    def output_tokens(self, request: ScheduledRequest) -> int:
        """Return the mean total: more than the tokens so far, and within the limit."""
        ...

    def quantile(self, request: ScheduledRequest, share: float) -> int:
        """Return a total that is exceeded with chance 1 − share; bounds as for the mean."""
        ...

    def chance_within(self, request: ScheduledRequest, tokens: int) -> float:
        """Return the chance that the total is at most this many tokens."""
        ...

    def has_learned(self, request: ScheduledRequest) -> bool:
        """Return True if an output of the request's class was learned."""
        ...

    def expect(self, request: ScheduledRequest, tokens: int) -> None:
        """Note for how many output tokens the end-to-end target of a new request leaves time."""
        ...

    def learn(self, request: ScheduledRequest, running: Iterable[ScheduledRequest]) -> None:
        """Learn from a finished request.

        Args:
            request: the request.
            running: the other requests that have started; their lengths are longer than their
                outputs so far.
        """
        ...

    def censor(self, request: ScheduledRequest) -> None:
        """Learn from a cancelled request that its length is larger than its output so far."""
        ...


class LearnedLengths:
    """Predicts lengths by a survival curve for each class and size of prompts.

    The curve of a class is estimated as by Kaplan and Meier: an output that ended at its limit, was
    cancelled, or still runs, only shows that the length is larger. A curve with little evidence
    stays near its parent: the class for a size of prompts, all requests for a class, and for all
    requests a curve on which an output is expected to last about as long again. Clients hardly set
    an end-to-end target that an idle engine would miss. If the targets of a class leave time for
    fewer tokens than the outputs of an unknown load have, its curve stays near one with a mean of
    as many tokens instead.

    Beside the curve stands the share of clients that state the exact length as their limit: an
    output that reaches its limit is evidence for it. Without evidence, a limit that is a likely
    length is likelier exact. After each 1,024 outputs the weight of the earlier ones is halved.
    Lengths are stored in logarithmic bins, and the number of curves is limited, so memory is
    bounded.

    Source: Kaplan and Meier, "Nonparametric estimation from incomplete observations", JASA 1958.
    The conditional mean is the criterion of "shortest expected remaining processing time" (Sevcik,
    "Scheduling for minimum total loss using service time distributions", JACM 1974).
    """

    __slots__ = ("_all", "_curves", "_errors", "_since_fit", "_weight", "judged", "revision")

    def __init__(self) -> None:
        self._all = _LengthCurve(None)
        self._curves: dict[tuple[str, int], _LengthCurve] = {}
        self.judged = 0
        self.revision = 0
        self._since_fit = 0
        self._errors = 0.0
        self._weight = 0.0

    @property
    def error(self) -> PredictionError:
        """Error over all classes."""
        mean = self._errors / self._weight if self._weight else 0.0
        return PredictionError(judged=self.judged, mean_abs_log_ratio=mean)

    def output_tokens(self, request: ScheduledRequest) -> int:
        """Return the mean total: more than the tokens so far, and within the limit."""
        return self._curve(request).mean(
            request.sampled_tokens,
            request.output_limit,
            stated=request.max_output_tokens is not None,
        )

    def quantile(self, request: ScheduledRequest, share: float) -> int:
        """Return a total that is exceeded with chance 1 − share; bounds as for the mean."""
        return self._curve(request).quantile(
            request.sampled_tokens,
            request.output_limit,
            share,
            stated=request.max_output_tokens is not None,
        )

    def chance_within(self, request: ScheduledRequest, tokens: int) -> float:
        """Return the chance that the total is at most this many tokens."""
        return self._curve(request).chance_within(
            request.sampled_tokens,
            request.output_limit,
            tokens,
            stated=request.max_output_tokens is not None,
        )

    def has_learned(self, request: ScheduledRequest) -> bool:
        """Return True if an output of the request's class was learned."""
        curve = self._curves.get((request.slo_class, -1))
        return curve is not None and curve.has_learned

    def expect(self, request: ScheduledRequest, tokens: int) -> None:
        """Note for how many output tokens the end-to-end target of a new request leaves time."""
        curve = self._curves.get((request.slo_class, -1))
        if curve is None and len(self._curves) < _MAX_CURVES:
            curve = self._curves[request.slo_class, -1] = _LengthCurve(self._all)
        if curve is not None and not curve.has_learned:
            curve.expect(tokens)

    def learn(self, request: ScheduledRequest, running: Iterable[ScheduledRequest]) -> None:
        """Measure the error of the prediction, then learn the true length."""
        tokens, limit = request.output_tokens, request.output_limit
        if self.judged and self.judged % _HALF_LIFE == 0:
            self._errors /= 2
            self._weight /= 2
            for curve in (self._all, *self._curves.values()):
                curve.halve()
        stated = request.max_output_tokens is not None
        self._errors += abs(math.log(self._curve(request).mean(0, limit, stated=stated) / tokens))
        self._weight += 1
        for curve in self._curves_of(request):
            curve.add(tokens, at_limit=tokens >= limit, stated=stated)
        self.judged += 1
        self._since_fit += 1
        if self._since_fit * 8 >= min(self.judged, _HALF_LIFE):
            self._since_fit = 0
            self.revision += 1
            self._fit(running)

    def censor(self, request: ScheduledRequest) -> None:
        """Learn from a cancelled request that its length is larger than its output so far."""
        for curve in self._curves_of(request):
            curve.censor(request.output_tokens)

    def _curve(self, request: ScheduledRequest) -> _LengthCurve:
        """Return the most specific curve that exists."""
        curves, name = self._curves, request.slo_class
        curve = curves.get((name, _prompt_bin(request.input_tokens)))
        return curve if curve is not None else curves.get((name, -1), self._all)

    def _curves_of(self, request: ScheduledRequest) -> list[_LengthCurve]:
        """Return all curves that learn from a request; create those that are missing."""
        found = [self._all]
        for key in (
            (request.slo_class, -1),
            (request.slo_class, _prompt_bin(request.input_tokens)),
        ):
            curve = self._curves.get(key)
            if curve is None and len(self._curves) < _MAX_CURVES:
                curve = self._curves[key] = _LengthCurve(found[-1])
            if curve is None:
                break
            found.append(curve)
        return found

    def _fit(self, running: Iterable[ScheduledRequest]) -> None:
        """Let every curve be estimated again at its next use."""
        ages: dict[_LengthCurve, list[int]] = {}
        for request in running:
            if request.sampled_tokens:
                for curve in self._curves_of(request):
                    ages.setdefault(curve, []).append(request.sampled_tokens)
        for curve in (self._all, *self._curves.values()):
            curve.expire(ages.get(curve, ()))


class KnownLengths:
    """The oracle of true lengths, in virtual time.

    Args:
        length_of: returns the true number of output tokens of a request by its rid.
    """

    revision: int = 0
    error: PredictionError = PredictionError()

    def __init__(self, length_of: Callable[[int], int]) -> None:
        self._length_of = length_of

    def output_tokens(self, request: ScheduledRequest) -> int:
        """Return the true number of output tokens, within the limit."""
        return min(self._length_of(request.rid), request.output_limit)

    def quantile(self, request: ScheduledRequest, share: float) -> int:  # noqa: ARG002 - it is known
        """Return the true number of output tokens, within the limit."""
        return self.output_tokens(request)

    def chance_within(self, request: ScheduledRequest, tokens: int) -> float:
        """Return 1 if the true number is at most this many tokens, else 0."""
        return float(self.output_tokens(request) <= tokens)

    def has_learned(self, request: ScheduledRequest) -> bool:  # noqa: ARG002 - all are known
        """Return True."""
        return True

    def expect(self, request: ScheduledRequest, tokens: int) -> None:
        """Ignore a target."""

    def learn(self, request: ScheduledRequest, running: Iterable[ScheduledRequest]) -> None:
        """Ignore a finished request."""

    def censor(self, request: ScheduledRequest) -> None:
        """Ignore a cancelled request."""


def _bin(tokens: float) -> int:
    return int(math.log2(tokens + 1) * _BINS_PER_DOUBLING + 1e-9)


def _prompt_bin(tokens: int) -> int:
    return tokens.bit_length() // _PROMPT_DOUBLINGS_PER_BIN


_BINS: Final = _BINS_PER_DOUBLING * _DOUBLINGS
_EDGES: Final = [2 ** (k / _BINS_PER_DOUBLING) - 1 for k in range(_BINS + 1)]
_WIDTHS: Final = [high - low for low, high in pairwise(_EDGES)]
_LAST: Final = len(_WIDTHS) - 1


def _unknown(typical_tokens: float) -> list[float]:
    """Return the hazards by which an output of n tokens is expected to have n + typical more."""
    return [2 / (typical_tokens + (low + high) / 2) for low, high in pairwise(_EDGES)]


_UNKNOWN: Final = _unknown(_TYPICAL_TOKENS)


class _LengthCurve:
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
        "_hazard",
        "_is_fitted",
        "_known",
        "_outputs",
        "_parent",
        "_survivors",
        "has_learned",
    )

    def __init__(self, parent: _LengthCurve | None) -> None:
        self._parent = parent
        self._ends = [0.0] * len(_WIDTHS)
        """Outputs that ended in each bin before their limits."""
        self._exposure = [0.0] * len(_WIDTHS)
        """Outputs that reached each bin; one that was censored in it counts for the part before."""
        self.has_learned = False
        """True if an output has ended."""
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
        self._known: dict[tuple[int, int, float, bool], int] = {}
        """Predictions since the last fit, by bin, limit, share (-1: the mean), and if the client
        stated the limit."""

    # --- learn -------------------------------------------------------------------------------
    def add(self, tokens: int, *, at_limit: bool, stated: bool) -> None:
        """Add a finished output."""
        self.has_learned = True
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
        for age in self._ages:
            _expose(exposure, age)
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
        at = min(max(bisect_left(self._survivors, -left, key=float.__neg__) - 1, 0), _LAST)
        return math.ceil(_EDGES[at] + math.log(self._survivors[at] / left) / self._hazard[at])

    def _at(self, tokens: int) -> tuple[float, float]:
        """Return the area up to a length, and the share of outputs that are longer."""
        at = min(_bin(tokens), _LAST)
        hazard, survivors = self.hazard()[at], self._survivors[at]
        left = math.exp(-hazard * (tokens - _EDGES[at]))
        return self._area[at] + survivors * (1 - left) / hazard, survivors * left

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
        if self._parent is None:
            # On the curve of an unknown load, (t / (n + t))² of the outputs are longer than n.
            density = 2 * limit * _TYPICAL_TOKENS**2 / (limit + _TYPICAL_TOKENS) ** 3
            exact, other = _EXACT * density, (1 - _EXACT) * _PROTECTION
            prior = exact / (exact + other)
        else:
            prior = self._parent._exact_share(limit)  # noqa: SLF001
        return (self._at_limit + _PRIOR_EXACT * prior) / (self._outputs + _PRIOR_EXACT)


def _expose(exposure: list[float], tokens: int) -> None:
    """Add a censored output to the bins through which it went."""
    at = min(_bin(tokens), _LAST)
    for k in range(at):
        exposure[k] += 1
    exposure[at] += min(1.0, (tokens - _EDGES[at]) / _WIDTHS[at])

"""Prediction of output lengths.

`LearnedLengths` learns from finished requests, as is possible in a server. `KnownLengths` is an
oracle, which shows how much perfect prediction could gain. The oracle exists only in virtual time,
and nothing else in the scheduler has access to true lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from goodput_engine.scheduler.length_curve import LengthCurve, prompt_bin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["KnownLengths", "LearnedLengths", "LengthPredictor", "PredictionError"]

_HALF_LIFE: Final = 1024
"""After this many outputs, the weight of all earlier ones is halved."""
_MAX_CURVES: Final = 256


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

    def num_learned(self, request: ScheduledRequest) -> float:
        """Return the number of outputs that were learned of the request's class."""
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
        self._all = LengthCurve(None)
        self._curves: dict[tuple[str, int], LengthCurve] = {}
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

    def num_learned(self, request: ScheduledRequest) -> float:
        """Return the number of outputs that were learned of the request's class."""
        curve = self._curves.get((request.slo_class, -1))
        return 0.0 if curve is None else curve.num_ended

    def expect(self, request: ScheduledRequest, tokens: int) -> None:
        """Note for how many output tokens the end-to-end target of a new request leaves time."""
        curve = self._curves.get((request.slo_class, -1))
        if curve is None and len(self._curves) < _MAX_CURVES:
            curve = self._curves[request.slo_class, -1] = LengthCurve(self._all)
        if curve is not None and not curve.num_ended:
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

    def _curve(self, request: ScheduledRequest) -> LengthCurve:
        """Return the most specific curve that exists."""
        curves, name = self._curves, request.slo_class
        curve = curves.get((name, prompt_bin(request.input_tokens)))
        return curve if curve is not None else curves.get((name, -1), self._all)

    def _curves_of(self, request: ScheduledRequest) -> list[LengthCurve]:
        """Return all curves that learn from a request; create those that are missing."""
        found = [self._all]
        for key in (
            (request.slo_class, -1),
            (request.slo_class, prompt_bin(request.input_tokens)),
        ):
            curve = self._curves.get(key)
            if curve is None and len(self._curves) < _MAX_CURVES:
                curve = self._curves[key] = LengthCurve(found[-1])
            if curve is None:
                break
            found.append(curve)
        return found

    def _fit(self, running: Iterable[ScheduledRequest]) -> None:
        """Let every curve be estimated again at its next use."""
        ages: dict[LengthCurve, list[int]] = {}
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

    def num_learned(self, request: ScheduledRequest) -> float:  # noqa: ARG002 - all are known
        """Return infinity."""
        return math.inf

    def expect(self, request: ScheduledRequest, tokens: int) -> None:
        """Ignore a target."""

    def learn(self, request: ScheduledRequest, running: Iterable[ScheduledRequest]) -> None:
        """Ignore a finished request."""

    def censor(self, request: ScheduledRequest) -> None:
        """Ignore a cancelled request."""

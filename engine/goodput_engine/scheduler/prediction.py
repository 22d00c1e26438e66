"""Prediction of output lengths.

`LearnedLengths` learns from finished requests, as is possible in a server. `KnownLengths` is an
oracle, which shows how much perfect prediction could gain. The oracle exists only in virtual time,
and nothing else in the scheduler has access to true lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["KnownLengths", "LearnedLengths", "LengthPredictor", "PredictionError"]

_BINS_PER_DOUBLING: Final = 8
_HALF_LIFE: Final = 1024
"""After this many outputs, the weight of all earlier ones is halved."""
_MIN_OUTPUTS: Final = 8
"""For a class with fewer outputs, the outputs of all classes are used."""
_MAX_CLASSES: Final = 64


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
        """Return the predicted total: more than the tokens so far, and within the limit."""
        ...

    def learn(self, request: ScheduledRequest) -> None:
        """Learn from a finished request."""
        ...


class LearnedLengths:
    """Predicts the mean length of the outputs that were longer than a request's output so far.

    Only outputs of the request's class are used. If the class has too few, the outputs of all
    classes are used. If these are too few as well, the prediction is the request's limit. After
    each 1,024 outputs the weight of the earlier ones is halved. Lengths are stored in logarithmic
    bins, and the number of classes is limited, so memory is bounded.

    Source: the conditional mean is the criterion of "shortest expected remaining processing time"
    (Sevcik, "Scheduling for minimum total loss using service time distributions", JACM 1974).
    """

    __slots__ = ("_all", "_classes")

    def __init__(self) -> None:
        self._all = _Lengths()
        self._classes: dict[str, _Lengths] = {}

    @property
    def revision(self) -> int:
        """Counter that rises after an eighth more outputs, at the latest after 128."""
        return self._all.revision + sum(lengths.revision for lengths in self._classes.values())

    @property
    def error(self) -> PredictionError:
        """Error over all classes."""
        return self._all.error

    @property
    def errors(self) -> Mapping[str, PredictionError]:
        """Error by class."""
        return {name: lengths.error for name, lengths in self._classes.items()}

    def output_tokens(self, request: ScheduledRequest) -> int:
        """Return the predicted total: more than the tokens so far, and within the limit."""
        return self._predict(request, request.sampled_tokens)

    def learn(self, request: ScheduledRequest) -> None:
        """Measure the error of the prediction, then learn the true length."""
        tokens = request.output_tokens
        error = abs(math.log(self._predict(request, 0) / tokens))
        lengths = self._classes.get(request.slo_class)
        if lengths is None and len(self._classes) < _MAX_CLASSES:
            lengths = self._classes[request.slo_class] = _Lengths()
        if lengths is not None:
            lengths.add(tokens, error)
        self._all.add(tokens, error)

    def _predict(self, request: ScheduledRequest, so_far: int) -> int:
        """Predict the output length of a request with this many output tokens so far."""
        lengths = self._classes.get(request.slo_class)
        if lengths is None or lengths.error.judged < _MIN_OUTPUTS:
            lengths = self._all
        if lengths.error.judged < _MIN_OUTPUTS:
            return request.output_limit
        return min(max(lengths.expected(so_far), so_far + 1), request.output_limit)


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

    def learn(self, request: ScheduledRequest) -> None:
        """Ignore a finished request."""


class _Lengths:
    """Lengths of finished outputs, as weights and sums in logarithmic bins."""

    __slots__ = (
        "_errors",
        "_judged",
        "_means",
        "_since_revision",
        "_sums",
        "_weight",
        "_weights",
        "revision",
    )

    def __init__(self) -> None:
        self.revision = 0
        self._judged = 0
        self._since_revision = 0
        self._errors = 0.0
        self._weight = 0.0
        self._weights: list[float] = []
        self._sums: list[float] = []
        # For each bin, the mean of the lengths in it and in the bins above, at the last revision.
        self._means: list[float] = []

    @property
    def error(self) -> PredictionError:
        mean = self._errors / self._weight if self._weight else 0.0
        return PredictionError(judged=self._judged, mean_abs_log_ratio=mean)

    def add(self, tokens: int, error: float) -> None:
        """Add an output and the error of its prediction."""
        if self._judged and self._judged % _HALF_LIFE == 0:
            self._errors /= 2
            self._weight /= 2
            self._weights = [weight / 2 for weight in self._weights]
            self._sums = [total / 2 for total in self._sums]
        at = _bin(tokens)
        missing = at + 1 - len(self._weights)
        if missing > 0:
            self._weights += [0.0] * missing
            self._sums += [0.0] * missing
        self._weights[at] += 1
        self._sums[at] += tokens
        self._weight += 1
        self._errors += error
        self._judged += 1
        self._since_revision += 1
        if self._since_revision * 8 >= min(self._judged, _HALF_LIFE):
            self._since_revision = 0
            self.revision += 1
            self._means = self._means_from_above()

    def expected(self, so_far: int) -> int:
        """Return the mean of the lengths above this one; twice this length if there are none."""
        at = _bin(so_far) + 1 if so_far else 0
        return round(self._means[at]) if at < len(self._means) else 2 * so_far

    def _means_from_above(self) -> list[float]:
        means = [0.0] * len(self._weights)
        weight = total = 0.0
        for at in reversed(range(len(means))):
            weight += self._weights[at]
            total += self._sums[at]
            means[at] = total / weight
        return means


def _bin(tokens: int) -> int:
    return int(math.log2(tokens) * _BINS_PER_DOUBLING)

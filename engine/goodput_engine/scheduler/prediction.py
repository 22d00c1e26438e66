"""How long an answer will be: learned from those that have ended, never from the request's row.

A policy is given a predictor and asks it about requests it can see. `LearnedLengths` knows only
what a server can know. `KnownLengths` is the oracle that bounds what prediction can gain: whoever
builds an engine in virtual time hands it the true lengths, and nothing else in the scheduler has
a way to them.
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
_MEMORY: Final = 1024
"""Answers after whose number the weight of all earlier ones is halved."""
_ENOUGH: Final = 8
"""Answers without which a class's own are no evidence."""
_MAX_CLASSES: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionError:
    """How wrong predictions were: each is made with what was known when its request ended.

    Args:
        judged: answers since the start.
        mean_abs_log_ratio: mean of |ln(predicted / true)| over the recent ones; 0 where there
            are none. 0.69 means wrong by a factor of two.
    """

    judged: int = 0
    mean_abs_log_ratio: float = 0.0


class LengthPredictor(Protocol):
    """Predicts how many output tokens a request will have in all."""

    @property
    def revision(self) -> int:
        """Rises when a request's prediction may have changed without its gaining a token."""
        ...

    @property
    def error(self) -> PredictionError:
        """Over all classes."""
        ...

    def output_tokens(self, request: ScheduledRequest) -> int:
        """Output tokens in all, more than it has and no more than its limit."""
        ...

    def learn(self, request: ScheduledRequest) -> None:
        """A request has ended by itself or at its limit."""
        ...


class LearnedLengths:
    """The mean length of the answers of a request's class that were longer than its own is yet.

    With too few answers of its class those of all classes speak for it; before there are any,
    the longest answer it may have. Old answers fade: half of the weight goes with each thousand.
    Memory is bounded by classes times logarithmic bins of length, not by requests.

    Source: the conditional mean is what "shortest expected remaining processing time" asks for
    (Sevcik, "Scheduling for minimum total loss using service time distributions", JACM 1974).
    """

    __slots__ = ("_all", "_classes")

    def __init__(self) -> None:
        self._all = _Lengths()
        self._classes: dict[str, _Lengths] = {}

    @property
    def revision(self) -> int:
        """Rises now and then: after an eighth more answers."""
        return self._all.revision + sum(lengths.revision for lengths in self._classes.values())

    @property
    def error(self) -> PredictionError:
        """Over all classes."""
        return self._all.error

    @property
    def errors(self) -> Mapping[str, PredictionError]:
        """By class."""
        return {name: lengths.error for name, lengths in self._classes.items()}

    def output_tokens(self, request: ScheduledRequest) -> int:
        """Output tokens in all, more than it has and no more than its limit."""
        return self._predict(request, request.sampled_tokens)

    def learn(self, request: ScheduledRequest) -> None:
        """Judge what would have been predicted, then learn what was true."""
        tokens = request.output_tokens
        wrong = abs(math.log(self._predict(request, 0) / tokens))
        lengths = self._classes.get(request.slo_class)
        if lengths is None and len(self._classes) < _MAX_CLASSES:
            lengths = self._classes[request.slo_class] = _Lengths()
        if lengths is not None:
            lengths.add(tokens, wrong)
        self._all.add(tokens, wrong)

    def _predict(self, request: ScheduledRequest, has: int) -> int:
        """The prediction for a request with so many output tokens."""
        lengths = self._classes.get(request.slo_class)
        if lengths is None or lengths.error.judged < _ENOUGH:
            lengths = self._all
        if lengths.error.judged < _ENOUGH:
            return request.output_limit
        return min(max(lengths.expected(has), has + 1), request.output_limit)


class KnownLengths:
    """The oracle: what no server can know, for a bound in virtual time.

    Args:
        length_of: the true output tokens of a request by its rid.
    """

    revision: int = 0
    error: PredictionError = PredictionError()

    def __init__(self, length_of: Callable[[int], int]) -> None:
        self._length_of = length_of

    def output_tokens(self, request: ScheduledRequest) -> int:
        """Output tokens in all: the truth, cut at its limit."""
        return min(self._length_of(request.rid), request.output_limit)

    def learn(self, request: ScheduledRequest) -> None:
        """There is nothing to learn."""


class _Lengths:
    """Lengths of answers, as weights and sums in logarithmic bins."""

    __slots__ = (
        "_judged",
        "_means",
        "_since",
        "_sums",
        "_weight",
        "_weights",
        "_wrong",
        "revision",
    )

    def __init__(self) -> None:
        self.revision = 0
        self._judged = 0
        self._since = 0
        self._wrong = 0.0
        self._weight = 0.0
        self._weights: list[float] = []
        self._sums: list[float] = []
        # Of each bin: the mean of all lengths in it and above; brought up to date now and then.
        self._means: list[float] = []

    @property
    def error(self) -> PredictionError:
        mean = self._wrong / self._weight if self._weight else 0.0
        return PredictionError(judged=self._judged, mean_abs_log_ratio=mean)

    def add(self, tokens: int, wrong: float) -> None:
        """One answer, and by how much its prediction was wrong."""
        if self._judged and self._judged % _MEMORY == 0:
            self._wrong /= 2
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
        self._wrong += wrong
        self._judged += 1
        self._since += 1
        if self._since * 8 >= min(self._judged, _MEMORY):
            self._since = 0
            self.revision += 1
            self._means = self._means_from_above()

    def expected(self, has: int) -> int:
        """The mean of the lengths above one; where there are none, twice as much."""
        at = _bin(has) + 1 if has else 0
        return round(self._means[at]) if at < len(self._means) else 2 * has

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

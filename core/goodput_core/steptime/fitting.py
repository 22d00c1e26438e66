"""From steps that were timed to the roofline that predicts them.

Which steps are bound by memory and which by arithmetic is not in a log: every place of the bend
is tried, and on each side of it the law is linear. Errors are relative, so that a short step
counts as much as a long one.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import add
from typing import TYPE_CHECKING, Final, NamedTuple

from goodput_core.steptime.nonnegative import nonnegative_least_squares
from goodput_core.steptime.roofline import RooflineForm

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from goodput_core.steptime.form import StepTimeForm
    from goodput_core.steptime.shape import StepShape

__all__ = ["StepSample", "errors_ppm", "fit_roofline", "hold_out"]

_BLOCKS: Final = 25
_FINALISTS: Final = 8
# At the largest step arithmetic must take this many times what reading the weights takes, and at
# the smallest the other way round, or the bend is not in the log.
_CLEARLY: Final = 1.1


class StepSample(NamedTuple):
    """A step that was timed.

    Args:
        shape: what it computed.
        step_ns: device time it took, at least 1.
    """

    shape: StepShape
    step_ns: int


class _Sums(NamedTuple):
    """Sums over steps, of 1, the context x and the requests b, each over the step's time t."""

    steps: float = 0
    one: float = 0
    x: float = 0
    b: float = 0
    one_one: float = 0
    one_x: float = 0
    one_b: float = 0
    x_x: float = 0
    x_b: float = 0
    b_b: float = 0

    def plus(self, other: _Sums) -> _Sums:
        return _Sums(*map(add, self, other))

    def times_tokens(self, tokens: int) -> _Sums:
        """The same with `tokens` in place of 1."""
        return self._replace(
            one=self.one * tokens,
            one_one=self.one_one * tokens * tokens,
            one_x=self.one_x * tokens,
            one_b=self.one_b * tokens,
        )


@dataclass(frozen=True, slots=True)
class _Group:
    """The steps that compute one number of tokens."""

    tokens: int
    sums: _Sums


def fit_roofline(samples: Iterable[StepSample], *, least_per_side: int = 10) -> RooflineForm:
    """The roofline with the least squared relative error.

    For every place of the bend, non-negative least squares give c0 from the steps before it, c1
    from those after it, c2 and c4 from all; of the best places, the one whose law as a whole, with
    its max, is nearest to the steps wins.

    Args:
        samples: steps, in any order.
        least_per_side: steps that must lie before the bend, and after it.

    Raises:
        ValueError: the steps do not show both sides of the bend; the sentence says which.
    """
    groups = _grouped(samples)
    total = sum(group.sums.steps for group in groups)
    zero = _Sums()
    before = list(accumulate((g.sums for g in groups), _Sums.plus, initial=zero))
    after = list(
        accumulate(
            (g.sums.times_tokens(g.tokens) for g in reversed(groups)), _Sums.plus, initial=zero
        )
    )[::-1]
    tried: list[tuple[float, RooflineForm]] = []
    for low, high in zip(before, after, strict=True):
        if min(low.steps, high.steps) >= least_per_side:
            form, explained = _fit_sides(low, high)
            tried.append((total - explained, form))
    if not tried:
        raise ValueError(
            f"{total:.0f} steps of {len(groups)} different sizes are too few: "
            f"{least_per_side} smaller and {least_per_side} larger ones are needed"
        )
    best = heapq.nsmallest(_FINALISTS, tried, key=lambda item: item[0])
    form = min((form for _, form in best), key=lambda form: _squared_error(form, groups))
    smallest, largest = groups[0].tokens, groups[-1].tokens
    if form.c1_ns_per_token * largest < form.c0_ns * _CLEARLY:
        raise ValueError(
            "no step is large enough for arithmetic to take longer than reading the weights; "
            "log some with longer prompts or a larger token budget"
        )
    if form.c0_ns < form.c1_ns_per_token * smallest * _CLEARLY:
        raise ValueError(
            "no step is small enough for reading the weights to take longer than arithmetic; "
            "log some that only decode"
        )
    return form


def hold_out(samples: Sequence[StepSample]) -> tuple[list[StepSample], list[StepSample]]:
    """Four fifths to fit and one fifth to judge the fit by.

    Neighbouring steps are alike, so whole stretches are held out: of 25 equal ones, every fifth.
    """
    bounds = [len(samples) * i // _BLOCKS for i in range(_BLOCKS + 1)]
    fit: list[StepSample] = []
    held: list[StepSample] = []
    for i, (start, end) in enumerate(pairwise(bounds)):
        (held if i % 5 == 4 else fit).extend(samples[start:end])
    return fit, held


def errors_ppm(form: StepTimeForm, samples: Iterable[StepSample]) -> list[int]:
    """By how much each prediction is off, in millionths of the measured time."""
    return [abs(form.step_ns(shape) - step_ns) * 1_000_000 // step_ns for shape, step_ns in samples]


def _grouped(samples: Iterable[StepSample]) -> list[_Group]:
    groups: dict[int, list[float]] = {}
    for shape, step_ns in samples:
        one = 1 / step_ns
        x, b = shape.context_tokens * one, shape.num_requests * one
        sums = groups.setdefault(shape.num_tokens, [0.0] * 10)
        added = (1, one, x, b, one * one, one * x, one * b, x * x, x * b, b * b)
        for i, value in enumerate(added):
            sums[i] += value
    return [_Group(tokens, _Sums(*groups[tokens])) for tokens in sorted(groups)]


def _fit_sides(low: _Sums, high: _Sums) -> tuple[RooflineForm, float]:
    """The best coefficients for one place of the bend, and how much of Σ 1 they explain."""
    gram = [
        [low.one_one, 0, low.one_x, low.one_b],
        [0, high.one_one, high.one_x, high.one_b],
        [low.one_x, high.one_x, low.x_x + high.x_x, low.x_b + high.x_b],
        [low.one_b, high.one_b, low.x_b + high.x_b, low.b_b + high.b_b],
    ]
    right = [low.one, high.one, low.x + high.x, low.b + high.b]
    c0, c1, c2, c4 = solved = nonnegative_least_squares(gram, right)
    form = RooflineForm(
        c0_ns=c0, c1_ns_per_token=c1, c2_ns_per_context_token=c2, c4_ns_per_request=c4
    )
    return form, sum(x * r for x, r in zip(solved, right, strict=True))


def _squared_error(form: RooflineForm, groups: Iterable[_Group]) -> float:
    """Σ (predicted/measured − 1)² over the steps of all groups."""
    c2, c4 = form.c2_ns_per_context_token, form.c4_ns_per_request
    error = 0.0
    for group in groups:
        s, h = group.sums, max(form.c0_ns, form.c1_ns_per_token * group.tokens)
        error += (
            h * (h * s.one_one + 2 * (c2 * s.one_x + c4 * s.one_b - s.one))
            + c2 * (c2 * s.x_x + 2 * (c4 * s.x_b - s.x))
            + c4 * (c4 * s.b_b - 2 * s.b)
            + s.steps
        )
    return error

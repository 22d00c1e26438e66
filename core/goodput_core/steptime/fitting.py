"""Fitting of a roofline to timed steps, and least squares without negative coefficients.

A log does not state which steps are bound by memory and which by arithmetic. Therefore every
position of the bend between them is tried. On each side of the bend the step time is linear. Errors
are relative, so that a short step counts as much as a long one.

A fit with errors relative to the measured times is below the mean if the times scatter, because a
step that was delayed then counts less than a step that was not. The errors of further fits are
therefore relative to the times of the fit before, so the mean ratio of measured to fitted times is
1. (Iteratively reweighted least squares, with the variance of a gamma distribution.)

Coefficients are not negative. A negative cost would be noise, and the prefill law would act on it.
The exact solution for at most four unknowns is found by trying all sets of coefficients that may be
zero. It needs only sums and no numerical library, so an engine can fit while it serves.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from operator import add
from statistics import fmean
from typing import TYPE_CHECKING, Final, NamedTuple

from goodput_core.steptime.forms import RooflineForm

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from goodput_core.steptime.forms import StepShape, StepTimeForm

__all__ = [
    "REWEIGHTED",
    "StepSample",
    "errors_ppm",
    "fit_roofline",
    "hold_out",
    "nonnegative_least_squares",
]

_SECTIONS: Final = 25
REWEIGHTED: Final = 3
"""Fits whose errors are relative to the times of the fit before."""
_MEAN_KEPT: Final = 0.005
"""Difference of the mean ratio of measured to fitted times from 1 that needs no further fit."""
_FINALISTS: Final = 8  # the best positions of the bend; one of them is selected
# In the largest step, arithmetic must take this many times as long as reading the weights, and in
# the smallest step the weights must take this many times as long as arithmetic. Otherwise the bend
# is not in the log.
_MIN_RATIO: Final = 1.1
# Columns scaled to length one are dependent if a pivot is smaller than this.
_SINGULAR: Final = 1e-10
_MAX_TRIED: Final = 4  # unknowns for which all sets of columns are tried
_TOLERANCE: Final = 1e-9  # gradients below this share of the largest one are zero
_MAX_CHANGES: Final = 10  # changes of the active set for each unknown


class StepSample(NamedTuple):
    """A timed step.

    Args:
        shape: shape of the step.
        step_ns: device time, at least 1.
    """

    shape: StepShape
    step_ns: int


class _Sums(NamedTuple):
    """Sums over steps, in which time t, 1, context x and requests b are divided by a scale.

    Args:
        steps: number of steps.
        time: sum of t².
        one, x, b: sums of the products with t.
        one_one, one_x, one_b, x_x, x_b, b_b: sums of the products of two of the others.
    """

    steps: int = 0
    time: float = 0
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
        """Return the sums with `tokens` in place of 1."""
        return self._replace(
            one=self.one * tokens,
            one_one=self.one_one * tokens * tokens,
            one_x=self.one_x * tokens,
            one_b=self.one_b * tokens,
        )


@dataclass(frozen=True, slots=True)
class _Group:
    """The sums of the steps with one number of tokens."""

    tokens: int
    sums: _Sums


def fit_roofline(samples: Iterable[StepSample], *, least_per_side: int = 10) -> RooflineForm:
    """Return the roofline with the least squared relative error, of which the mean is kept.

    For every position of the bend, non-negative least squares give c0 from the steps before the
    bend, c1 from the steps after it, and c2 and c4 from all steps. Of the best positions, the one
    is selected whose complete form, including the maximum, has the smallest error.

    Args:
        samples: steps, in any order.
        least_per_side: minimum number of steps before the bend, and after it.

    Raises:
        ValueError: the steps are too few or cover only one side of the bend.
    """
    steps = list(samples)
    groups = _group_by_tokens(steps, [step_ns for _, step_ns in steps])
    form = _fit_groups(groups, least_per_side)
    for _ in range(REWEIGHTED):
        fitted_ns = [form.step_ns(shape) for shape, _ in steps]
        ratios = (step_ns / time for (_, step_ns), time in zip(steps, fitted_ns, strict=True))
        if abs(fmean(ratios) - 1) < _MEAN_KEPT:
            break
        groups = _group_by_tokens(steps, fitted_ns)
        form = _fit_groups(groups, least_per_side)
    smallest, largest = groups[0].tokens, groups[-1].tokens
    if form.c1_ns_per_token * largest < form.c0_ns * _MIN_RATIO:
        raise ValueError(
            "no step is large enough for arithmetic to take longer than reading the weights; "
            "log steps with longer prompts or a larger token budget"
        )
    if form.c0_ns < form.c1_ns_per_token * smallest * _MIN_RATIO:
        raise ValueError(
            "no step is small enough for reading the weights to take longer than arithmetic; "
            "log steps that only decode"
        )
    return form


def _fit_groups(groups: Sequence[_Group], least_per_side: int) -> RooflineForm:
    """Return the roofline with the least squared error.

    Raises:
        ValueError: the steps are too few.
    """
    total = sum(group.sums.steps for group in groups)
    time = sum(group.sums.time for group in groups)
    zero = _Sums()
    before = list(accumulate((g.sums for g in groups), _Sums.plus, initial=zero))
    after = list(
        accumulate(
            (g.sums.times_tokens(g.tokens) for g in reversed(groups)), _Sums.plus, initial=zero
        )
    )[::-1]
    fits: list[tuple[float, RooflineForm]] = []
    for low, high in zip(before, after, strict=True):
        if min(low.steps, high.steps) >= least_per_side:
            form, explained = _fit_sides(low, high)
            fits.append((time - explained, form))
    if not fits:
        raise ValueError(
            f"{total} steps of {len(groups)} different sizes are too few: "
            f"{least_per_side} smaller and {least_per_side} larger ones are needed"
        )
    best = heapq.nsmallest(_FINALISTS, fits, key=lambda fit: fit[0])
    return min((form for _, form in best), key=lambda form: _squared_error(form, groups))


def hold_out(samples: Sequence[StepSample]) -> tuple[list[StepSample], list[StepSample]]:
    """Split steps into four fifths to fit and one fifth to evaluate the fit.

    Neighbouring steps are similar, so every fifth of 25 equal sections is held out.
    """
    bounds = [len(samples) * i // _SECTIONS for i in range(_SECTIONS + 1)]
    fit: list[StepSample] = []
    held: list[StepSample] = []
    for i, (start, end) in enumerate(pairwise(bounds)):
        (held if i % 5 == 4 else fit).extend(samples[start:end])
    return fit, held


def errors_ppm(form: StepTimeForm, samples: Iterable[StepSample]) -> list[int]:
    """Return the absolute error of each prediction, in millionths of the measured time."""
    return [abs(form.step_ns(shape) - step_ns) * 1_000_000 // step_ns for shape, step_ns in samples]


def _group_by_tokens(steps: Sequence[StepSample], scales_ns: Sequence[int]) -> list[_Group]:
    """Return the sums of the steps with each number of tokens.

    Args:
        steps: the steps.
        scales_ns: for each step, the time by which its numbers are divided.
    """
    groups: dict[int, list[float]] = {}
    counts: dict[int, int] = {}
    for (shape, step_ns), scale_ns in zip(steps, scales_ns, strict=True):
        one, time = 1 / scale_ns, step_ns / scale_ns
        x, b = shape.context_tokens * one, shape.num_requests * one
        sums = groups.setdefault(shape.num_tokens, [0.0] * 10)
        counts[shape.num_tokens] = counts.get(shape.num_tokens, 0) + 1
        added = (
            *(time * time, time * one, time * x, time * b),
            *(one * one, one * x, one * b, x * x, x * b, b * b),
        )
        for i, value in enumerate(added):
            sums[i] += value
    return [_Group(tokens, _Sums(counts[tokens], *groups[tokens])) for tokens in sorted(groups)]


def _fit_sides(low: _Sums, high: _Sums) -> tuple[RooflineForm, float]:
    """Return the best form for one position of the bend, and the explained part of Σ t²."""
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
    """Σ ((predicted − measured) / scale)² over the steps of all groups."""
    c2, c4 = form.c2_ns_per_context_token, form.c4_ns_per_request
    error = 0.0
    for group in groups:
        s, h = group.sums, max(form.c0_ns, form.c1_ns_per_token * group.tokens)
        error += (
            h * (h * s.one_one + 2 * (c2 * s.one_x + c4 * s.one_b - s.one))
            + c2 * (c2 * s.x_x + 2 * (c4 * s.x_b - s.x))
            + c4 * (c4 * s.b_b - 2 * s.b)
            + s.time
        )
    return error


def nonnegative_least_squares(
    gram: Sequence[Sequence[float]], right: Sequence[float]
) -> list[float]:
    """Return the x ≥ 0 that minimises |A·x − b|², from AᵀA and Aᵀb.

    Args:
        gram: AᵀA, [n, n].
        right: Aᵀb, [n].

    Returns:
        x, [n]. Columns of zeros get 0; linear combinations of other columns may get 0.

    Source: Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23. The solution
    equals the unconstrained solution of those columns whose x is not zero. Up to four unknowns, all
    2ⁿ sets of columns are tried; beyond, the active set is changed by one column at a time.
    """
    if len(right) > _MAX_TRIED:
        return _search_active_set(gram, right)
    columns = [i for i in range(len(right)) if gram[i][i] > 0]
    best, best_gain = [0.0] * len(right), 0.0
    for count in range(len(columns), 0, -1):
        for chosen in combinations(columns, count):
            solved = _solve(gram, right, chosen)
            if solved is None or min(solved) < 0:
                continue
            # The reduction of the squared error from x = 0.
            gain = sum(right[i] * x for i, x in zip(chosen, solved, strict=True))
            if gain > best_gain:
                best_gain = gain
                best = [0.0] * len(right)
                for i, x in zip(chosen, solved, strict=True):
                    best[i] = x
        if count == len(columns) and best_gain > 0:
            break  # no constrained solution is better than an unconstrained one
    return best


def _search_active_set(gram: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Solve as `nonnegative_least_squares` does, by the algorithm NNLS of its source."""
    size = len(right)
    lengths = [gram[i][i] ** 0.5 for i in range(size)]
    usable = {i for i in range(size) if lengths[i] > 0}
    least = _TOLERANCE * max((abs(right[i]) / lengths[i] for i in usable), default=0)
    found = [0.0] * size
    chosen: list[int] = []
    for _ in range(_MAX_CHANGES * size):
        slopes = {
            i: (right[i] - sum(gram[i][j] * found[j] for j in chosen)) / lengths[i]
            for i in usable.difference(chosen)
        }
        entering = max(slopes, key=slopes.__getitem__, default=None)
        if entering is None or slopes[entering] <= least:
            break
        chosen.append(entering)
        while chosen:
            solved = _solve(gram, right, tuple(chosen))
            if solved is None or (entering in chosen and solved[chosen.index(entering)] <= 0):
                # Dependent on the other columns, up to rounding errors.
                chosen.remove(entering)
                usable.discard(entering)
                break
            if min(solved) > 0:
                for i, x in zip(chosen, solved, strict=True):
                    found[i] = x
                break
            share = min(
                found[i] / (found[i] - x) for i, x in zip(chosen, solved, strict=True) if x <= 0
            )
            for i, x in zip(chosen, solved, strict=True):
                found[i] += share * (x - found[i])
            leaving = min(chosen, key=lambda i: found[i] * lengths[i])
            found[leaving] = 0.0
            chosen.remove(leaving)
    return found


def _solve(
    gram: Sequence[Sequence[float]], right: Sequence[float], chosen: tuple[int, ...]
) -> list[float] | None:
    """Solve the chosen columns by Gaussian elimination; None if the columns are dependent."""
    scale = [gram[i][i] ** -0.5 for i in chosen]
    rows = [
        [*(gram[i][j] * si * sj for j, sj in zip(chosen, scale, strict=True)), right[i] * si]
        for i, si in zip(chosen, scale, strict=True)
    ]
    size = len(rows)
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        if abs(rows[pivot][column]) < _SINGULAR:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for row in range(column + 1, size):
            factor = rows[row][column] / rows[column][column]
            for at in range(column, size + 1):
                rows[row][at] -= factor * rows[column][at]
    solution = [0.0] * size
    for row in range(size - 1, -1, -1):
        solved = sum(rows[row][at] * solution[at] for at in range(row + 1, size))
        solution[row] = (rows[row][size] - solved) / rows[row][row]
    return [x * s for x, s in zip(solution, scale, strict=True)]

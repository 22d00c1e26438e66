"""A piecewise linear form of step time, and its fit to timed steps.

On a CPU, a step takes longer with each token, and by another amount per token with few tokens than
with many. The maximum of two terms does not describe that. The form has a curve over the number of
tokens instead, which grows linearly between given points.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from goodput_core.steptime.fitting import REWEIGHTED, nonnegative_least_squares
from goodput_core.steptime.forms import linear_times, tokens_in_time

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from goodput_core.steptime.fitting import StepSample
    from goodput_core.steptime.forms import StepShape

__all__ = ["PiecewiseForm", "fit_piecewise"]

_MAX_POINTS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecewiseForm:
    """f(N) + c2·decode context + c3·Σ(end² − start²) + c4·B, with a piecewise linear f.

    Steps with fewer tokens than the first point take its time. Beyond the last point, the slope of
    the last two points continues.

    Args:
        tokens: numbers of tokens, increasing, at least two.
        times_ns: f at each of them, not decreasing.
        c2_ns_per_context_token: attention of a decode for each token that it reads.
        c3_ns_per_square: attention of prompts for each unit of Σ(end² − start²) over the chunks.
        c4_ns_per_request: sampling and bookkeeping for each request.

    Raises:
        ValueError: the points violate one of these conditions.
    """

    tokens: tuple[int, ...]
    times_ns: tuple[float, ...]
    c2_ns_per_context_token: float
    c3_ns_per_square: float
    c4_ns_per_request: float

    def __post_init__(self) -> None:
        """Raise ValueError if the points do not increase."""
        if len(self.tokens) < 2 or len(self.tokens) != len(self.times_ns):
            raise ValueError("at least two points are needed, each with its tokens and its time")
        if any(a >= b for a, b in pairwise((0, *self.tokens))):
            raise ValueError("tokens must increase from at least 1")
        if any(a > b for a, b in pairwise((0, *self.times_ns))):
            raise ValueError("times must not decrease as tokens increase")

    def step_ns(self, shape: StepShape) -> int:
        """Return the device time of a step of this shape, in nanoseconds, at least 1."""
        return max(
            1,
            round(
                self._curve_ns(shape.num_tokens)
                + self.c3_ns_per_square * shape.prefill_squares
                + self.c2_ns_per_context_token * shape.decode_context_tokens
                + self.c4_ns_per_request * shape.num_requests
            ),
        )

    def decode_times(self, num_decodes: int, contexts: Sequence[int]) -> list[int]:
        """Return the times of steps that only decode; see `DeviceForm`."""
        requests_ns = self.c4_ns_per_request * num_decodes
        curve_ns = self._curve_ns(num_decodes)
        return linear_times(curve_ns, self.c2_ns_per_context_token, requests_ns, contexts)

    def chunk_within(self, beside: StepShape, start: int, limit_ns: float) -> float:
        """Invert the form; see `StepTimeForm`."""
        square = self.c3_ns_per_square
        room_ns = (
            limit_ns
            - square * beside.prefill_squares
            - self.c2_ns_per_context_token * beside.decode_context_tokens
            - self.c4_ns_per_request * (beside.num_requests + 1)
        )
        before, most = beside.num_tokens, 0.0
        if self._curve_ns(before) > room_ns:
            return -1
        # The first point is preceded by a flat part.
        points = [(0, self.times_ns[0]), *zip(self.tokens, self.times_ns, strict=True)]
        for at, ((left, left_ns), (right, right_ns)) in enumerate(pairwise(points)):
            is_last = at == len(points) - 2
            if right <= before and not is_last:
                continue
            slope = (right_ns - left_ns) / (right - left)
            most = tokens_in_time(
                room_ns - left_ns - slope * (before - left),
                linear=slope + 2 * square * start,
                square=square,
            )
            if most < right - before:
                break
        return most

    def _curve_ns(self, tokens: int) -> float:
        points, times_ns = self.tokens, self.times_ns
        if tokens <= points[0]:
            return times_ns[0]
        at = min(bisect_right(points, tokens), len(points) - 1)
        left, left_ns = points[at - 1], times_ns[at - 1]
        return left_ns + (times_ns[at] - left_ns) / (points[at] - left) * (tokens - left)


def fit_piecewise(samples: Iterable[StepSample], *, least_per_part: int = 10) -> PiecewiseForm:
    """Return the piecewise linear form with the least squared relative error.

    The points are powers of two, as far as each part between two of them has enough steps.

    As with the roofline, the mean ratio of measured to fitted times is 1.

    Args:
        samples: steps, in any order.
        least_per_part: minimum number of steps in each part.

    Raises:
        ValueError: the steps are too few, or all have the same number of tokens.
    """
    steps = list(samples)
    counts: dict[int, int] = {}
    for shape, _ in steps:
        counts[shape.num_tokens] = counts.get(shape.num_tokens, 0) + 1
    if len(counts) < 2 or len(steps) < 2 * least_per_part:
        raise ValueError(
            f"{len(steps)} steps of {len(counts)} different sizes are too few: at least "
            f"{2 * least_per_part} steps with different numbers of tokens are needed"
        )
    points = _choose_points(counts, least_per_part)
    form = _fit_curve(points, _group_by_tokens(steps, [step_ns for _, step_ns in steps]))
    for _ in range(REWEIGHTED):
        form = _fit_curve(points, _group_by_tokens(steps, [form.step_ns(s) for s, _ in steps]))
    return form


def _fit_curve(points: Sequence[int], groups: Mapping[int, Sequence[float]]) -> PiecewiseForm:
    """Return the form with these points and the least squared error.

    Args:
        points: numbers of tokens.
        groups: sums of `_group_by_tokens`.
    """
    width = len(points)
    gram = [[0.0] * (width + 3) for _ in range(width + 3)]
    right = [0.0] * (width + 3)
    for tokens, (one, x, s, b, *products) in groups.items():
        one_one, one_x, one_s, one_b, xx, xs, xb, ss, sb, bb = products
        basis = _basis(points, tokens)
        for i, value in enumerate(basis):
            if not value:
                continue
            right[i] += value * one
            for j in range(i, width):
                gram[i][j] += value * basis[j] * one_one
            for j, product in enumerate((one_x, one_s, one_b), start=width):
                gram[i][j] += value * product
        for i, (value, row) in enumerate(
            ((x, (xx, xs, xb)), (s, (xs, ss, sb)), (b, (xb, sb, bb))), start=width
        ):
            right[i] += value
            for j, product in enumerate(row, start=width):
                gram[i][j] += product if j >= i else 0
    for i in range(width + 3):
        for j in range(i):
            gram[i][j] = gram[j][i]
    *rises, c2, c3, c4 = nonnegative_least_squares(gram, right)
    times_ns = [rises[0]]
    for (left, right_point), slope in zip(pairwise(points), rises[1:], strict=True):
        times_ns.append(times_ns[-1] + slope * (right_point - left))
    return PiecewiseForm(
        tokens=tuple(points),
        times_ns=tuple(times_ns),
        c2_ns_per_context_token=c2,
        c3_ns_per_square=c3,
        c4_ns_per_request=c4,
    )


def _choose_points(counts: Mapping[int, int], least: int) -> list[int]:
    """Return the ends of parts with at least `least` steps each."""
    smallest, largest = min(counts), max(counts)
    bounds = [tokens for at in range(largest.bit_length()) if smallest < (tokens := 1 << at)]
    points, steps, previous = [smallest], 0, smallest - 1
    for bound in bounds:
        if bound >= largest:
            break
        steps += sum(n for tokens, n in counts.items() if previous < tokens <= bound)
        previous = bound
        if steps >= least:
            points.append(bound)
            steps = 0
    steps += sum(n for tokens, n in counts.items() if previous < tokens)
    if steps < least and len(points) > 1:
        points.pop()
    return [*points[: _MAX_POINTS - 1], largest]


def _basis(points: Sequence[int], tokens: int) -> list[float]:
    """Return 1, and for each part the tokens that lie in it."""
    return [
        1.0,
        *(float(min(max(tokens - left, 0), right - left)) for left, right in pairwise(points)),
    ]


def _group_by_tokens(
    steps: Sequence[StepSample], scales_ns: Sequence[int]
) -> dict[int, list[float]]:
    """Return sums over the steps with each number of tokens.

    Args:
        steps: the steps.
        scales_ns: for each step, the time by which its numbers are divided: 1, context x, squares
            s, requests b, and the measured time.

    Returns:
        The sums of the products of the measured time with the other four, then of all products of
        two of the four.
    """
    groups: dict[int, list[float]] = {}
    for (shape, step_ns), scale_ns in zip(steps, scales_ns, strict=True):
        one, time = 1 / scale_ns, step_ns / scale_ns
        x = shape.decode_context_tokens * one
        s = shape.prefill_squares * one
        b = shape.num_requests * one
        sums = groups.setdefault(shape.num_tokens, [0.0] * 14)
        added = (
            *(time * one, time * x, time * s, time * b),
            *(one * one, one * x, one * s, one * b),
            *(x * x, x * s, x * b, s * s, s * b, b * b),
        )
        for i, value in enumerate(added):
            sums[i] += value
    return groups

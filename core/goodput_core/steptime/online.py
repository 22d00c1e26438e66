"""A step-time form that is learned while an engine serves, for its budgets and deadlines.

Each timed step is one equation for the coefficients. The weight of old equations decays, and every
32 steps the best fit to all equations is computed exactly. Predictions are multiplied by a
correction, the recent ratio of measured to fitted times. Through the correction, predictions adapt
to a slower device within twenty steps. If steps of all kinds have become slower, the old equations
are scaled, so that they still show how the time depends on the shape of a step. If only one kind
has, its cost is learned more slowly.

The caller supplies the times; this module reads no clock and no device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from goodput_core.steptime.fitting import nonnegative_least_squares
from goodput_core.steptime.forms import (
    LinearTime,
    RooflineForm,
    StepShape,
    tokens_in_time,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_core.steptime.forms import StepTimeForm

__all__ = ["ArithmeticTime", "OnlineStepTime", "RegimesForm"]

# For an unknown device only proportions matter, because the first step gives the scale. On an
# accelerator 200 tokens of arithmetic take about as long as reading the weights.
_UNKNOWN_DEVICE: Final = RooflineForm(
    c0_ns=1e6, c1_ns_per_token=5e3, c2_ns_per_context_token=8, c4_ns_per_request=1e3
)
# Steps to which the initial coefficients are fitted, and their weight relative to a timed step.
_TYPICAL_STEPS: Final = (
    *(
        StepShape.of(decodes=decodes, decode_context_tokens=decodes * context)
        for decodes in (1, 16, 128)
        for context in (256, 2048)
    ),
    *(
        StepShape.of(decodes=decodes, decode_context_tokens=decodes * 512, chunks=[chunk])
        for decodes in (0, 32)
        for chunk in ((0, 512), (0, 2048), (4096, 512), (4096, 2048))
    ),
)
_TYPICAL_WEIGHT: Final = 0.001

_MEMORY_STEPS: Final = 512
_GROWTH: Final = 1 / (1 - 1 / _MEMORY_STEPS)
# While all steps update one line, the equations of the other fade, for at most this many steps.
_LONGEST_GAP_STEPS: Final = 4 * _MEMORY_STEPS
_RENORMALISE_ABOVE: Final = 1e50
# A coefficient on which no step depends stays near its previous value.
_INERTIA: Final = 1e-3
_FIT_EVERY: Final = 32
# The device may have changed if steps take longer or shorter by this factor, for so many steps, and
# a fit does not explain it by their shapes; not before so many steps have been observed.
_CHANGED: Final = 1.15
_CHANGED_STEPS: Final = 32
_SETTLED_STEPS: Final = 256
# It has not if at least this share of them take their old time: then only one kind of steps has.
_UNCHANGED: Final = 0.3
_FIRST_FITS: Final = frozenset({1, 2, 4, 8, 16})

# Within 20 steps the correction covers 1 − 0.85²⁰ = 96 % of a change.
_CORRECTION_WEIGHT: Final = 0.15
_MIN_CORRECTION: Final = 0.25
_MAX_CORRECTION: Final = 4.0
_ERROR_WEIGHT: Final = 0.05
# A step with prompts is bound by arithmetic if it takes this many times the memory line's time.
_ARITHMETIC_RATIO: Final = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticTime:
    """Time of a step with prompts: fixed + tokens + context + pairs of tokens.

    Args:
        fixed_ns: time of every such step.
        ns_per_token: time for each computed token.
        ns_per_context_token: time for each token of context.
        ns_per_square: time for each unit of `StepShape.prefill_squares`.
    """

    fixed_ns: float
    ns_per_token: float
    ns_per_context_token: float
    ns_per_square: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RegimesForm:
    """Two linear forms: memory for decoding, max(memory, arithmetic) for steps with prompts.

    This form can be learned while a device serves. It equals a roofline if all steps that only
    decode lie before the bend, and DistServe's form if each step with prompts also decodes. No
    coefficient is negative.

    Args:
        memory: time of a step that reads weights, keys and values, and computes little.
        arithmetic: time of a step whose prompts are so long that arithmetic dominates.

    Source: the regimes of a roofline (Williams et al., CACM 2009), as a maximum of lines (Magnani
    and Boyd, "Convex piecewise-linear fitting", 2009).
    """

    memory: LinearTime
    arithmetic: ArithmeticTime

    def memory_ns(self, shape: StepShape) -> float:
        """Return the memory line's time of this step, not rounded."""
        memory = self.memory
        return (
            memory.fixed_ns
            + memory.ns_per_context_token * shape.context_tokens
            + memory.ns_per_request * shape.num_requests
        )

    def arithmetic_ns(self, shape: StepShape) -> float:
        """Return the arithmetic line's time of a step with prompts, not rounded."""
        arithmetic = self.arithmetic
        return (
            arithmetic.fixed_ns
            + arithmetic.ns_per_token * shape.num_tokens
            + arithmetic.ns_per_context_token * shape.context_tokens
            + arithmetic.ns_per_square * shape.prefill_squares
        )

    def time_ns(self, shape: StepShape) -> float:
        """Return the device time of this step, not rounded."""
        if shape.num_tokens == shape.num_decodes:
            return self.memory_ns(shape)
        return max(self.memory_ns(shape), self.arithmetic_ns(shape))

    def step_ns(self, shape: StepShape) -> int:
        """Return the device time of a step of this shape, in nanoseconds, at least 1."""
        return max(1, round(self.time_ns(shape)))

    def chunk_within(self, beside: StepShape, start: int, limit_ns: float) -> float:
        """Invert the form; see `StepTimeForm`."""
        memory, arithmetic = self.memory, self.arithmetic
        by_memory = tokens_in_time(
            limit_ns
            - self.memory_ns(beside)
            - memory.ns_per_context_token * start
            - memory.ns_per_request,
            linear=memory.ns_per_context_token,
        )
        by_arithmetic = tokens_in_time(
            limit_ns - self.arithmetic_ns(beside) - arithmetic.ns_per_context_token * start,
            linear=arithmetic.ns_per_token
            + arithmetic.ns_per_context_token
            + 2 * arithmetic.ns_per_square * start,
            square=arithmetic.ns_per_square,
        )
        # The maximum of two terms is in time if each of them is.
        return min(by_memory, by_arithmetic)


class OnlineStepTime:
    """Predicts step times from observed ones; a `StepTimeForm`.

    Use:
        form = OnlineStepTime()                      # or OnlineStepTime(prior=profile.form)
        form.observe(shape, step_ns)                 # after each step: a few microseconds
        form.step_ns(shape)                          # valid before the first step too
        largest_prefill(form, beside=…, target_ns=…, most_tokens=…)

    The fitted form is a `RegimesForm` of two lines. Each line is fitted by recursive least squares
    with forgetting, in the variant that keeps the sums and solves them for non-negative
    coefficients. Errors are relative. A timed step updates one line: the memory line if the step
    only decodes or was bound by memory, otherwise the arithmetic line.

    A step that was delayed by the host has little effect on the fit. Its relative error is at most
    1, and the correction counts it as at most four times as slow.

    Args:
        prior: form before the first observation, for example that of a device profile. If None,
            use proportions that are usual on accelerators, scaled to the first observed step, and
            at least 1 ms before that step.

    Source: Ljung, "System Identification", 1999, chapter 11, recursive least squares with
    forgetting; the correction is Goodput's own.
    """

    __slots__ = (
        "_arithmetic",
        "_correction",
        "_law",
        "_memory",
        "_off",
        "_old",
        "_ratio",
        "_scaled",
        "_unchanged",
        "error",
        "steps",
    )

    def __init__(self, *, prior: StepTimeForm | None = None) -> None:
        self._memory = _Line(3)
        self._arithmetic = _Line(4)
        self._correction = 1.0
        self._scaled = prior is not None
        self._law = self._begin(_UNKNOWN_DEVICE if prior is None else prior, scale=1.0)
        self._old = self._law, self._memory.saved(), self._arithmetic.saved()
        """Law and sums before the device may have changed."""
        self._ratio = 1.0
        """Recent ratio of measured times to those of the old law."""
        self._off = self._unchanged = 0
        """Steps in a row for which the ratio is as of a changed device, and how many are not."""
        self.steps = 0
        """Observed steps."""
        self.error = 0.0
        """Mean of |measured / predicted − 1| over about twenty steps, predicted before they were
        observed."""

    @property
    def law(self) -> RegimesForm:
        """The fitted form, without the correction."""
        return self._law

    def step_ns(self, shape: StepShape) -> int:
        """Return the expected time of a step of this shape, in nanoseconds, at least 1."""
        return max(1, round(self._correction * self._law.time_ns(shape)))

    def chunk_within(self, beside: StepShape, start: int, limit_ns: float) -> float:
        """Invert the form; see `StepTimeForm`."""
        return self._law.chunk_within(beside, start, limit_ns / self._correction)

    def observe(self, shape: StepShape, step_ns: int) -> None:
        """Learn from a timed step; ignore a step without requests.

        Args:
            shape: shape of the step.
            step_ns: device time of the step, at least 1.
        """
        if not shape.num_requests:
            return
        error = abs(step_ns / self.step_ns(shape) - 1)
        self.steps += 1
        self.error += (error - self.error) * max(_ERROR_WEIGHT, 1 / self.steps)
        if not self._scaled:
            self._scaled = True
            self._law = self._begin(_UNKNOWN_DEVICE, scale=step_ns / _UNKNOWN_DEVICE.step_ns(shape))
        correction = self._correction
        predicted_ns = max(self._law.time_ns(shape), 1.0)
        ratio = step_ns / predicted_ns
        ratio = min(_MAX_CORRECTION, max(_MIN_CORRECTION, ratio))
        self._correction = correction = correction + _CORRECTION_WEIGHT * (ratio - correction)
        self._compare(shape, step_ns, ratio)
        if self._is_arithmetic(shape, step_ns / correction, predicted_ns):
            line, other = self._arithmetic, self._memory
            fit = line.observe(_arithmetic_features(shape), step_ns, self.steps)
        else:
            line, other = self._memory, self._arithmetic
            fit = line.observe(_memory_features(shape), step_ns, self.steps)
        if fit:
            line.fit()
            # The new fit includes the correction, or a part of it; the rest remains. The other line
            # is scaled by the included part, because the device is assumed to be slower, not only
            # steps of this kind.
            remaining = correction * predicted_ns / max(self._lines().time_ns(shape), 1.0)
            if correction > 1:
                self._correction = min(correction, max(1.0, remaining))
            else:
                self._correction = max(correction, min(1.0, remaining))
            other.scale(correction / self._correction)
            self._law = self._lines()
            self._follow_change()

    def _is_arithmetic(self, shape: StepShape, time_ns: float, predicted_ns: float) -> bool:
        """True if a step is bound by arithmetic.

        Args:
            shape: shape of the step.
            time_ns: measured time divided by the correction.
            predicted_ns: time predicted by the fitted form.
        """
        if shape.num_tokens == shape.num_decodes:
            return False
        memory_ns = self._law.memory_ns(shape)
        # If arithmetic was predicted to dominate, the step updates the arithmetic line, even if the
        # prediction was too high.
        return predicted_ns > memory_ns or time_ns > _ARITHMETIC_RATIO * memory_ns

    def _compare(self, shape: StepShape, step_ns: int, ratio: float) -> None:
        """Compare a step with the old law.

        Args:
            shape: shape of the step.
            step_ns: its time.
            ratio: its time over that of the present law, within the limits of the correction.
        """
        law = self._old[0]
        if law is not self._law:
            ratio = step_ns / max(law.time_ns(shape), 1.0)
            ratio = min(_MAX_CORRECTION, max(_MIN_CORRECTION, ratio))
        self._ratio += _CORRECTION_WEIGHT * (ratio - self._ratio)
        if 1 / _CHANGED < self._ratio < _CHANGED:
            self._off = self._unchanged = 0
        else:
            self._off += 1
            self._unchanged += abs(ratio - 1) < abs(ratio - self._ratio)

    def _follow_change(self) -> None:
        """Scale the old equations if the device has changed; after a fit."""
        if 0 < self._off < _CHANGED_STEPS:
            return
        _, memory, arithmetic = self._old
        if (
            self._off
            and self.steps >= _SETTLED_STEPS
            and self._unchanged < _UNCHANGED * self._off
            and not 1 / _CHANGED < self._correction < _CHANGED
        ):
            # The equations since then are left out: a fit to steps of both speeds takes the
            # difference for one between their shapes.
            self._memory.restore(memory, slower=self._ratio)
            self._arithmetic.restore(arithmetic, slower=self._ratio)
            self._law, self._correction = self._lines(), 1.0
        self._old = self._law, self._memory.saved(), self._arithmetic.saved()
        self._ratio, self._off, self._unchanged = self._correction, 0, 0

    def _begin(self, form: StepTimeForm, *, scale: float) -> RegimesForm:
        """Fit both lines to a form at typical steps, and return them."""
        self._memory, self._arithmetic = _Line(3), _Line(4)
        for shape in _TYPICAL_STEPS:
            time_ns = form.step_ns(shape) * scale
            if shape.prefill_tokens:
                self._arithmetic.add(_arithmetic_features(shape), time_ns, _TYPICAL_WEIGHT)
            else:
                self._memory.add(_memory_features(shape), time_ns, _TYPICAL_WEIGHT)
        self._memory.fit()
        self._arithmetic.fit()
        return self._lines()

    def _lines(self) -> RegimesForm:
        memory, arithmetic = self._memory.coefficients, self._arithmetic.coefficients
        return RegimesForm(
            memory=LinearTime(
                fixed_ns=memory[0], ns_per_context_token=memory[1], ns_per_request=memory[2]
            ),
            arithmetic=ArithmeticTime(
                fixed_ns=arithmetic[0],
                ns_per_token=arithmetic[1],
                ns_per_context_token=arithmetic[2],
                ns_per_square=arithmetic[3],
            ),
        )


def _memory_features(shape: StepShape) -> tuple[int, ...]:
    return (1, shape.context_tokens, shape.num_requests)


def _arithmetic_features(shape: StepShape) -> tuple[int, ...]:
    return (1, shape.num_tokens, shape.context_tokens, shape.prefill_squares)


class _SavedLine(NamedTuple):
    """A `_Line` at some time: its sums, the weight of a new equation, and the coefficients."""

    gram: list[float]
    right: list[float]
    weight: float
    coefficients: list[float]


class _Line:
    """The decaying sums of one linear form, and the coefficients that fit them best.

    The sums are of products of features, each divided by the time of its step. The weight of new
    equations grows, which is the same as reducing all old weights at each step.

    Args:
        width: number of features.
    """

    __slots__ = ("_gram", "_last_step", "_right", "_seen", "_weight", "coefficients")

    def __init__(self, width: int) -> None:
        self.coefficients = [0.0] * width
        self._gram = [0.0] * (width * (width + 1) // 2)  # the lower triangle, row by row
        self._right = [0.0] * width
        self._weight = 1.0
        self._last_step = 0
        self._seen = 0

    def observe(self, features: tuple[int, ...], time_ns: float, step: int) -> bool:
        """Add a step with its number; return True if the line should be fitted again."""
        gap = min(step - self._last_step, _LONGEST_GAP_STEPS)
        self._last_step = step
        self._weight *= _GROWTH**gap
        self.add(features, time_ns, self._weight)
        self._seen += 1
        return not self._seen % _FIT_EVERY or self._seen in _FIRST_FITS

    def add(self, features: tuple[int, ...], time_ns: float, weight: float) -> None:
        """Add the equation features · coefficients = time_ns."""
        gram, right = self._gram, self._right
        per_ns = 1 / time_ns
        index = 0
        for row, feature in enumerate(features):
            share = feature * per_ns
            weighted = weight * share
            right[row] += weighted
            weighted *= per_ns
            for other in features[: row + 1]:
                gram[index] += weighted * other
                index += 1

    def saved(self) -> _SavedLine:
        """Return a copy of the sums and coefficients."""
        coefficients = self.coefficients.copy()
        return _SavedLine(self._gram.copy(), self._right.copy(), self._weight, coefficients)

    def restore(self, saved: _SavedLine, *, slower: float) -> None:
        """Return to saved sums, as if all their steps had taken longer by a factor."""
        self._gram = [value / slower**2 for value in saved.gram]
        self._right = [value / slower for value in saved.right]
        self._weight = saved.weight
        self.coefficients = [slower * value for value in saved.coefficients]

    def scale(self, factor: float) -> None:
        """Multiply the coefficients until the next fit, if enough steps have been observed."""
        if self._seen >= _FIT_EVERY and factor != 1:
            self.coefficients = [factor * coefficient for coefficient in self.coefficients]

    def fit(self) -> None:
        """Fit the coefficients to the sums."""
        if self._weight > _RENORMALISE_ABOVE:
            self._gram = [value / self._weight for value in self._gram]
            self._right = [value / self._weight for value in self._right]
            self._weight = 1.0
        width = len(self._right)
        gram = [[0.0] * width for _ in range(width)]
        for (row, column), value in zip(_triangle(width), self._gram, strict=True):
            gram[row][column] = gram[column][row] = value
        right = list(self._right)
        for i, coefficient in enumerate(self.coefficients):
            inertia = _INERTIA * gram[i][i]
            gram[i][i] += inertia
            right[i] += inertia * coefficient
        self.coefficients = nonnegative_least_squares(gram, right)


def _triangle(width: int) -> Iterator[tuple[int, int]]:
    return ((row, column) for row in range(width) for column in range(row + 1))

"""A step-time law learnt while an engine serves, for budgets and deadlines of the next step.

Each step that was timed is one equation for the law. Old equations fade, and every so often the
law that fits what is left best is found exactly. In between, and before enough is known, the law
of before holds, times how much slower the last steps were than it says. So a device that slows
down is followed at once, and what a step's size costs is learnt in peace.

It reads no clock and no device: somebody else says what a step took.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from goodput_core.steptime.distserve import LinearTime
from goodput_core.steptime.nonnegative import nonnegative_least_squares
from goodput_core.steptime.regimes import ArithmeticTime, RegimesForm
from goodput_core.steptime.roofline import RooflineForm
from goodput_core.steptime.shape import StepShape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_core.steptime.form import StepTimeForm

__all__ = ["OnlineStepTime"]

# Of a device of which nothing is known only proportions matter, its scale is the first step's:
# on an accelerator 200 tokens of arithmetic take about as long as reading the weights.
_UNKNOWN: Final = RooflineForm(
    c0_ns=1e6, c1_ns_per_token=5e3, c2_ns_per_context_token=8, c4_ns_per_request=1e3
)
# What a law is read at to begin with, and how much each such step counts beside a timed one.
_TYPICAL: Final = (
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
# What one regime has shown fades while only the other one runs, but not beyond use.
_LONGEST_GAP_STEPS: Final = 4 * _MEMORY_STEPS
_RENORMALISE_ABOVE: Final = 1e50
# Where steps show nothing of a coefficient, it stays near what it was.
_INERTIA: Final = 1e-3
_FIT_EVERY: Final = 32
_FIRST_FITS: Final = frozenset({1, 2, 4, 8, 16})

# 1 − 0.85²⁰ = 96 % of a change is followed within 20 steps.
_FOLLOW: Final = 0.15
_LEAST_CORRECTION: Final = 0.25
_MOST_CORRECTION: Final = 4.0
_ERROR_SHARE: Final = 0.05
# A step with prompts that takes so many times what memory takes is not explained by memory.
_CLEARLY: Final = 1.1


class OnlineStepTime:
    """Predicts step times from those observed so far; itself a `StepTimeForm`.

    Use:
        law = OnlineStepTime()                       # or OnlineStepTime(prior=profile.form)
        law.observe(shape, step_ns)                  # after each step: a few microseconds
        law.step_ns(shape)                           # at least 1, before any step too
        largest_prefill(law, beside=…, target_ns=…, most_tokens=…)

    The law is a `RegimesForm`, two lines, each fitted by recursive least squares with forgetting,
    in the variant that keeps the sums and solves them for coefficients that are not negative.
    Errors are relative. A timed step teaches the line that explains it: decodes alone that of
    memory, a step with prompts that of arithmetic unless memory took as long.

    A step that took unusually long, for a reason of the host's, moves the law little: its
    relative error is at most 1, and the correction takes it for at most four times as slow.

    Args:
        prior: what to predict before anything is observed, a device profile's form for example;
            None: proportions usual on accelerators, scaled to the first step that is observed,
            and 1 ms and more before that one.

    Source: Ljung, "System Identification", 1999, chapter 11, recursive least squares with
    forgetting; the correction is Goodput's own.
    """

    __slots__ = (
        "_arithmetic",
        "_correction",
        "_law",
        "_memory",
        "_scaled",
        "error",
        "steps",
    )

    def __init__(self, *, prior: StepTimeForm | None = None) -> None:
        self._memory = _Line(3)
        self._arithmetic = _Line(4)
        self._correction = 1.0
        self._scaled = prior is not None
        self._law = self._begin(_UNKNOWN if prior is None else prior, scale=1.0)
        self.steps = 0
        """Steps that were observed."""
        self.error = 0.0
        """Recent mean of |measured / predicted − 1|, each predicted before it was observed;
        its memory is twenty steps."""

    @property
    def correction(self) -> float:
        """Measured over predicted by the fitted law, of late; predictions are multiplied by it."""
        return self._correction

    @property
    def law(self) -> RegimesForm:
        """The fitted law, without the correction."""
        return self._law

    def step_ns(self, shape: StepShape) -> int:
        """Expected time of a step of this shape, in nanoseconds, at least 1."""
        return max(1, round(self._correction * self._law.time_ns(shape)))

    def chunk_within(self, beside: StepShape, start: int, limit_ns: float) -> float:
        """The longest chunk with which a step stays within a time; see `StepTimeForm`."""
        return self._law.chunk_within(beside, start, limit_ns / self._correction)

    def observe(self, shape: StepShape, step_ns: int) -> None:
        """A step was timed; one that computed nothing tells nothing.

        Args:
            shape: what it computed.
            step_ns: device time it took, at least 1.
        """
        if not shape.num_requests:
            return
        wrong = abs(step_ns / self.step_ns(shape) - 1)
        self.steps += 1
        self.error += (wrong - self.error) * max(_ERROR_SHARE, 1 / self.steps)
        if not self._scaled:
            self._scaled = True
            self._law = self._begin(_UNKNOWN, scale=step_ns / _UNKNOWN.step_ns(shape))
        law, correction = self._law, self._correction
        predicted_ns = max(law.time_ns(shape), 1.0)
        ratio = step_ns / predicted_ns
        ratio = min(_MOST_CORRECTION, max(_LEAST_CORRECTION, ratio))
        self._correction = correction = correction + _FOLLOW * (ratio - correction)
        if self._is_arithmetic(shape, step_ns / correction, predicted_ns):
            line, other = self._arithmetic, self._memory
            fit = line.observe(_arithmetic_features(shape), step_ns, self.steps)
        else:
            line, other = self._memory, self._arithmetic
            fit = line.observe(_memory_features(shape), step_ns, self.steps)
        if fit:
            line.fit()
            # What the line now says by itself is not corrected for once more, but for the other
            # line it is kept: the device is taken to be slower, not this kind of step.
            kept = correction * predicted_ns / max(self._lines().time_ns(shape), 1.0)
            if correction > 1:
                self._correction = min(correction, max(1.0, kept))
            else:
                self._correction = max(correction, min(1.0, kept))
            other.scale(correction / self._correction)
            self._law = self._lines()

    def _is_arithmetic(self, shape: StepShape, time_ns: float, predicted_ns: float) -> bool:
        """Whether a step tells of the line of arithmetic.

        Args:
            shape: of the step.
            time_ns: what it took, on a device as fast as the law has it.
            predicted_ns: by the law.
        """
        if shape.num_tokens == shape.num_decodes:
            return False
        memory_ns = self._law.memory_ns(shape)
        # Where arithmetic was predicted to take longer, that is what was right or wrong.
        return predicted_ns > memory_ns or time_ns > _CLEARLY * memory_ns

    def _begin(self, form: StepTimeForm, *, scale: float) -> RegimesForm:
        """The law that is nearest to a form at typical steps."""
        self._memory, self._arithmetic = _Line(3), _Line(4)
        for shape in _TYPICAL:
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


class _Line:
    """One line's fading sums, and the coefficients that fit them best.

    Sums are of products of features, each feature over its step's time. Instead of every old
    equation fading at each step, the new one weighs more.

    Args:
        width: features.
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
        """Take in a step, the one of this number; returns whether to fit anew."""
        gap = min(step - self._last_step, _LONGEST_GAP_STEPS)
        self._last_step = step
        self._weight *= _GROWTH**gap
        self.add(features, time_ns, self._weight)
        self._seen += 1
        return not self._seen % _FIT_EVERY or self._seen in _FIRST_FITS

    def add(self, features: tuple[int, ...], time_ns: float, weight: float) -> None:
        """An equation: the coefficients make `time_ns` of the features."""
        gram, right = self._gram, self._right
        per_ns = 1 / time_ns
        at = 0
        for row, feature in enumerate(features):
            share = feature * per_ns
            weighted = weight * share
            right[row] += weighted
            weighted *= per_ns
            for other in features[: row + 1]:
                gram[at] += weighted * other
                at += 1

    def scale(self, factor: float) -> None:
        """Until they are found anew, take the coefficients times a factor, if they are known."""
        if self._seen >= _FIT_EVERY and factor != 1:
            self.coefficients = [factor * coefficient for coefficient in self.coefficients]

    def fit(self) -> None:
        """Find the coefficients anew."""
        if self._weight > _RENORMALISE_ABOVE:
            self._gram = [value / self._weight for value in self._gram]
            self._right = [value / self._weight for value in self._right]
            self._weight = 1.0
        width = len(self._right)
        gram = [[0.0] * width for _ in range(width)]
        for (row, column), value in zip(_triangle(width), self._gram, strict=True):
            gram[row][column] = gram[column][row] = value
        right = list(self._right)
        for at, coefficient in enumerate(self.coefficients):
            inertia = _INERTIA * gram[at][at]
            gram[at][at] += inertia
            right[at] += inertia * coefficient
        self.coefficients = nonnegative_least_squares(gram, right)


def _triangle(width: int) -> Iterator[tuple[int, int]]:
    return ((row, column) for row in range(width) for column in range(row + 1))

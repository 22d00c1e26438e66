"""A step-time law that is learned while an engine serves, for its budgets and deadlines.

Each timed step is one equation for the law. The weight of old equations decays, and every 32 steps
the best fit to all equations is computed exactly. Between two fits, predictions are multiplied by a
correction, the recent ratio of measured to predicted times. The law therefore adapts to a device
that slows down at once, and learns the cost of a token more slowly.

The caller supplies the times; this module reads no clock and no device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

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

# For an unknown device only proportions matter; the first step gives the scale. On an accelerator
# 200 tokens of arithmetic take about as long as reading the weights.
_UNKNOWN: Final = RooflineForm(
    c0_ns=1e6, c1_ns_per_token=5e3, c2_ns_per_context_token=8, c4_ns_per_request=1e3
)
# Steps at which an initial law is read, and their weight beside a timed step.
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
# Samples of one regime fade while only the other one runs, up to this many steps.
_LONGEST_GAP_STEPS: Final = 4 * _MEMORY_STEPS
_RENORMALISE_ABOVE: Final = 1e50
# A coefficient that no step depends on stays near its previous value.
_INERTIA: Final = 1e-3
_FIT_EVERY: Final = 32
_FIRST_FITS: Final = frozenset({1, 2, 4, 8, 16})

# Within 20 steps the correction covers 1 − 0.85²⁰ = 96 % of a change.
_FOLLOW: Final = 0.15
_LEAST_CORRECTION: Final = 0.25
_MOST_CORRECTION: Final = 4.0
_ERROR_SHARE: Final = 0.05
# A step with prompts that takes this many times the memory law is bound by arithmetic.
_CLEARLY: Final = 1.1


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
    """Two linear laws: memory for decoding, max(memory, arithmetic) for steps with prompts.

    This form can be learned while a device serves. A roofline has this form while steps that only
    decode stay before its bend. DistServe's form has it while each step with prompts also decodes.
    No coefficient is negative.

    Args:
        memory: time of a step that reads weights, keys and values, and computes little.
        arithmetic: time of a step whose prompts are long enough to dominate.

    Source: the regimes of a roofline (Williams et al., CACM 2009), as a maximum of lines (Magnani
    and Boyd, "Convex piecewise-linear fitting", 2009).
    """

    memory: LinearTime
    arithmetic: ArithmeticTime

    def memory_ns(self, shape: StepShape) -> float:
        """Memory law of this step, not rounded."""
        law = self.memory
        return (
            law.fixed_ns
            + law.ns_per_context_token * shape.context_tokens
            + law.ns_per_request * shape.num_requests
        )

    def arithmetic_ns(self, shape: StepShape) -> float:
        """Arithmetic law of this step, not rounded; valid for a step with prompts."""
        law = self.arithmetic
        return (
            law.fixed_ns
            + law.ns_per_token * shape.num_tokens
            + law.ns_per_context_token * shape.context_tokens
            + law.ns_per_square * shape.prefill_squares
        )

    def time_ns(self, shape: StepShape) -> float:
        """Device time, not rounded."""
        if shape.num_tokens == shape.num_decodes:
            return self.memory_ns(shape)
        return max(self.memory_ns(shape), self.arithmetic_ns(shape))

    def step_ns(self, shape: StepShape) -> int:
        """Return the device time of a step of this shape, in nanoseconds, at least 1."""
        return max(1, round(self.time_ns(shape)))

    def chunk_within(self, beside: StepShape, start: int, limit_ns: float) -> float:
        """Invert the law; see `StepTimeForm`."""
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
        # The maximum is within the time if both are.
        return min(by_memory, by_arithmetic)


class OnlineStepTime:
    """Predicts step times from observed ones; a `StepTimeForm`.

    Use:
        law = OnlineStepTime()                       # or OnlineStepTime(prior=profile.form)
        law.observe(shape, step_ns)                  # after each step: a few microseconds
        law.step_ns(shape)                           # valid before the first step too
        largest_prefill(law, beside=…, target_ns=…, most_tokens=…)

    The law is a `RegimesForm`: two linear laws, each fitted by recursive least squares with
    forgetting, in the variant that keeps the sums and solves them for non-negative coefficients.
    Errors are relative. A timed step updates the law that explains it: the memory law for a step
    that only decodes, the arithmetic law for one with prompts, unless memory took as long.

    A step that was delayed by the host has little effect on the law. Its relative error is at most
    1, and the correction counts it as at most four times as slow.

    Args:
        prior: law before the first observation, for example the form of a device profile. If None,
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
        """Observed steps."""
        self.error = 0.0
        """Mean of |measured / predicted − 1| over about twenty steps, each predicted before it was
        observed."""

    @property
    def law(self) -> RegimesForm:
        """The fitted law, without the correction."""
        return self._law

    def step_ns(self, shape: StepShape) -> int:
        """Return the expected time of a step of this shape, in nanoseconds, at least 1."""
        return max(1, round(self._correction * self._law.time_ns(shape)))

    def chunk_within(self, beside: StepShape, start: int, limit_ns: float) -> float:
        """Invert the law; see `StepTimeForm`."""
        return self._law.chunk_within(beside, start, limit_ns / self._correction)

    def observe(self, shape: StepShape, step_ns: int) -> None:
        """Learn from a timed step; ignore a step without requests.

        Args:
            shape: shape of the step.
            step_ns: device time of the step, at least 1.
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
            # The fitted law now includes the correction. The other law is scaled by it, because the
            # device is assumed to be slower, not only steps of this kind.
            kept = correction * predicted_ns / max(self._lines().time_ns(shape), 1.0)
            if correction > 1:
                self._correction = min(correction, max(1.0, kept))
            else:
                self._correction = max(correction, min(1.0, kept))
            other.scale(correction / self._correction)
            self._law = self._lines()

    def _is_arithmetic(self, shape: StepShape, time_ns: float, predicted_ns: float) -> bool:
        """True if a step is bound by arithmetic.

        Args:
            shape: shape of the step.
            time_ns: measured time divided by the correction.
            predicted_ns: time predicted by the fitted law.
        """
        if shape.num_tokens == shape.num_decodes:
            return False
        memory_ns = self._law.memory_ns(shape)
        # A step for which arithmetic was predicted to dominate updates the arithmetic law, even if
        # that prediction was too high.
        return predicted_ns > memory_ns or time_ns > _CLEARLY * memory_ns

    def _begin(self, form: StepTimeForm, *, scale: float) -> RegimesForm:
        """Return the law that is nearest to a form at typical steps."""
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
    """The decaying sums of one linear law, and the coefficients that fit them best.

    The sums are of products of features, each feature over the time of its step. Instead of
    reducing all old weights at each step, the weight of new equations grows.

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
        """Add a step with its number; return True if the law should be fitted again."""
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
        """Multiply the coefficients, if they are known, until the next fit."""
        if self._seen >= _FIT_EVERY and factor != 1:
            self.coefficients = [factor * coefficient for coefficient in self.coefficients]

    def fit(self) -> None:
        """Fit the coefficients."""
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

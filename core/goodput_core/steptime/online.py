"""A step-time law that is learnt while a device serves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from goodput_core.steptime.recursive import RecursiveLine

if TYPE_CHECKING:
    from goodput_core.steptime.shape import StepShape

__all__ = ["OnlineStepTime"]

_MS: Final = 1e6
_CONTEXT: Final = 1e5
_REQUESTS: Final = 1e2
_TOKENS: Final = 1e3
_SQUARES: Final = 1e6
_FOLLOW: Final = 0.2
"""Weight of the newest step in the correction: after ten steps nine tenths are followed."""
_TELLS_NOTHING: Final = 0.005
_ARITHMETIC: Final = 1.1
_MOST_CORRECTION: Final = 8.0


class OnlineStepTime:
    """max(memory, arithmetic), each a line that is fitted to the steps it explains.

    `memory` is fixed + by context + by request: what a step takes that only decodes. `arithmetic`
    is fixed + by token + by context + by pairs of tokens: what a step takes whose prompts are
    long enough to show. Both are multiplied by a correction, measured over predicted of late, so
    that a device that suddenly is a third slower is followed within twenty steps while the lines
    take longer. A step that was predicted to half a percent teaches nothing and costs nothing.

    It is a `StepTimeForm`: `largest_prefill` turns it around like any other.

    Source: a roofline's two regimes (Williams et al., CACM 2009), fitted as a maximum of lines
    (Magnani and Boyd, "Convex piecewise-linear fitting", 2009), each point assigned to the line
    that explains it.
    """

    __slots__ = ("_arithmetic", "_correction", "_memory", "error", "steps")

    def __init__(self) -> None:
        self._memory = RecursiveLine([10.0, 1.0, 1.0])
        self._arithmetic = RecursiveLine([1.0, 30.0, 1.0, 0.0])
        self._correction = 1.0
        self.steps = 0
        """Steps that were observed."""
        self.error = 0.0
        """Recent mean of |measured / predicted − 1|, each predicted before it was learnt."""

    def step_ns(self, shape: StepShape) -> int:
        """Expected time of a step of this shape, in nanoseconds, at least 1."""
        return max(1, round(self._correction * self._line_ms(shape) * _MS))

    def chunk_within(self, beside: StepShape, start: int, limit_ns: float) -> float:
        """The longest chunk with which a step stays within a time; see `StepTimeForm`."""
        limit = limit_ns / _MS / self._correction
        return min(self._in_memory(beside, start, limit), self._in_time(beside, start, limit))

    def observe(self, shape: StepShape, step_ns: int) -> None:
        """A step of this shape took so long."""
        measured = step_ns / _MS
        line = self._line_ms(shape)
        predicted = self._correction * line
        wrong = abs(measured / predicted - 1)
        self.error += (wrong - self.error) * (_FOLLOW / 4 if self.steps else 1)
        self.steps += 1
        if wrong < _TELLS_NOTHING:
            return
        memory = _memory_features(shape)
        if shape.prefill_tokens and measured > _ARITHMETIC * self._memory.predict(memory):
            self._arithmetic.learn(_arithmetic_features(shape), measured)
        else:
            self._memory.learn(memory, measured)
        # Of what the lines have just learnt, nothing is left to correct.
        ratio = measured / max(self._line_ms(shape), 1e-6)
        ratio = min(max(ratio, 1 / _MOST_CORRECTION), _MOST_CORRECTION)
        self._correction += (ratio - self._correction) * _FOLLOW

    def _line_ms(self, shape: StepShape) -> float:
        memory = self._memory.predict(_memory_features(shape))
        if not shape.prefill_tokens:
            return max(memory, 1e-6)
        return max(memory, self._arithmetic.predict(_arithmetic_features(shape)), 1e-6)

    def _in_memory(self, beside: StepShape, start: int, limit: float) -> float:
        fixed, by_context, by_request = (max(0.0, c) for c in self._memory.coefficients)
        taken = (
            fixed
            + by_context * (beside.context_tokens + start) / _CONTEXT
            + by_request * (beside.num_requests + 1) / _REQUESTS
        )
        if taken > limit:
            return -1
        return (limit - taken) * _CONTEXT / by_context if by_context else math.inf

    def _in_time(self, beside: StepShape, start: int, limit: float) -> float:
        fixed, by_token, by_context, by_square = (
            max(0.0, c) for c in self._arithmetic.coefficients
        )
        room = limit - (
            fixed
            + by_token * beside.num_tokens / _TOKENS
            + by_context * (beside.context_tokens + start) / _CONTEXT
            + by_square * beside.prefill_squares / _SQUARES
        )
        if room < 0:
            return -1
        square = by_square / _SQUARES
        linear = by_token / _TOKENS + by_context / _CONTEXT + 2 * square * start
        divisor = linear + math.sqrt(linear * linear + 4 * square * room)
        return 2 * room / divisor if divisor else math.inf


def _memory_features(shape: StepShape) -> tuple[float, float, float]:
    return (1.0, shape.context_tokens / _CONTEXT, shape.num_requests / _REQUESTS)


def _arithmetic_features(shape: StepShape) -> tuple[float, float, float, float]:
    return (
        1.0,
        shape.num_tokens / _TOKENS,
        shape.context_tokens / _CONTEXT,
        shape.prefill_squares / _SQUARES,
    )

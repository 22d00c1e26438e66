"""Step time in two regimes, each a line: what decoding takes, and what prompts make of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from goodput_core.steptime.distserve import LinearTime

if TYPE_CHECKING:
    from goodput_core.steptime.shape import StepShape

__all__ = ["ArithmeticTime", "RegimesForm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticTime:
    """Time of a step with prompts in it: fixed + by token + by context + by pairs of tokens.

    Args:
        fixed_ns: of every such step.
        ns_per_token: for each token computed.
        ns_per_context_token: for each token of context.
        ns_per_square: for each unit of `StepShape.prefill_squares`.
    """

    fixed_ns: float
    ns_per_token: float
    ns_per_context_token: float
    ns_per_square: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RegimesForm:
    """Decoding: memory. With prompts: max(memory, arithmetic). Both are linear.

    It is what can be learnt of a device while it serves: a roofline is such a form as long as
    decodes alone stay before its bend, and so is DistServe's as long as each step with prompts
    has decodes too. No coefficient is negative.

    Args:
        memory: what a step takes that reads weights, keys and values, and computes little.
        arithmetic: what a step takes whose prompts are long enough to show.

    Source: the regimes of a roofline (Williams et al., CACM 2009), as a maximum of lines (Magnani
    and Boyd, "Convex piecewise-linear fitting", 2009).
    """

    memory: LinearTime
    arithmetic: ArithmeticTime

    def memory_ns(self, shape: StepShape) -> float:
        """The line of memory at this step."""
        law = self.memory
        return (
            law.fixed_ns
            + law.ns_per_context_token * shape.context_tokens
            + law.ns_per_request * shape.num_requests
        )

    def arithmetic_ns(self, shape: StepShape) -> float:
        """The line of arithmetic at this step; it means something for one with prompts."""
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
        """Device time of a step of this shape, in nanoseconds, at least 1."""
        return max(1, round(self.time_ns(shape)))

    def chunk_within(self, beside: StepShape, start: int, limit_ns: float) -> float:
        """The longest chunk with which a step stays within a time; see `StepTimeForm`."""
        memory, arithmetic = self.memory, self.arithmetic
        by_memory = _tokens(
            limit_ns
            - self.memory_ns(beside)
            - memory.ns_per_context_token * start
            - memory.ns_per_request,
            linear=memory.ns_per_context_token,
        )
        by_arithmetic = _tokens(
            limit_ns - self.arithmetic_ns(beside) - arithmetic.ns_per_context_token * start,
            linear=arithmetic.ns_per_token
            + arithmetic.ns_per_context_token
            + 2 * arithmetic.ns_per_square * start,
            square=arithmetic.ns_per_square,
        )
        # The larger of two is within the time where both are.
        return min(by_memory, by_arithmetic)


def _tokens(room_ns: float, *, linear: float, square: float = 0.0) -> float:
    """The q at which square·q² + linear·q = room, without cancelling where `square` is small."""
    if room_ns < 0:
        return -1
    divisor = linear + math.sqrt(linear * linear + 4 * square * room_ns)
    return 2 * room_ns / divisor if divisor else math.inf

"""Step time from a table of measured iterations, with a line between any two of them."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from goodput_core.steptime.shape import StepShape

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TableForm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableForm:
    """Iteration times by decodes and prefill tokens, interpolated along both.

    A published table seldom covers what a scheduler may ask, so outside it these rules hold:
    fewer decodes than the first row take that row's times (too long, never too short); each
    decode beyond the last row counts as one prefill token, since both compute one token; beyond
    the last column the last two columns' slope goes on. Context does not enter: the times hold
    for the contexts they were measured at.

    Args:
        decodes: of each row, rising.
        prefill_tokens: of each column, rising, at least two, the first 0.
        times_ns: [decodes, prefill_tokens], falling along neither.

    Raises:
        ValueError: the numbers are no such table.
    """

    decodes: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    times_ns: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        """Check that the numbers are such a table.

        Raises:
            ValueError: with what is wrong, in one sentence.
        """
        for name, values in (("decodes", self.decodes), ("prefill_tokens", self.prefill_tokens)):
            if any(one >= next_ for one, next_ in pairwise(values)):
                raise ValueError(f"{name} must rise")
        width = len(self.prefill_tokens)
        if width < 2 or self.prefill_tokens[0] != 0:
            raise ValueError("prefill_tokens must begin with 0 and have a second number")
        if [len(row) for row in self.times_ns] != [width] * len(self.decodes):
            raise ValueError("each of decodes needs a row of times as long as prefill_tokens")
        for line in (*self.times_ns, *zip(*self.times_ns, strict=True)):
            if any(one > next_ for one, next_ in pairwise(line)):
                raise ValueError("times must not fall as decodes or prefill tokens grow")

    def step_ns(self, shape: StepShape) -> int:
        """Device time of a step of this shape, in nanoseconds, at least 1."""
        tokens = shape.prefill_tokens + self._surplus(shape)
        columns = self.prefill_tokens
        at = min(bisect_right(columns, tokens), len(columns) - 1)
        left_ns, right_ns = self._time_ns(shape, at - 1), self._time_ns(shape, at)
        share = (tokens - columns[at - 1]) / (columns[at] - columns[at - 1])
        return max(1, round(left_ns + share * (right_ns - left_ns)))

    def decode_times(self, num_decodes: int, contexts: Sequence[int]) -> list[int]:
        """`step_ns` of steps that only decode; see `DeviceForm`."""
        # Context does not enter.
        return [self.step_ns(StepShape.of(decodes=num_decodes))] * len(contexts)

    def chunk_within(self, beside: StepShape, start: int, limit_ns: float) -> float:  # noqa: ARG002 - context does not enter
        """The longest chunk with which a step stays within a time; see `StepTimeForm`."""
        columns = self.prefill_tokens
        times = [self._time_ns(beside, at) for at in range(len(columns))]
        if times[0] > limit_ns:
            return -1
        at = min(bisect_right(times, limit_ns), len(times) - 1)
        rise_ns = times[at] - times[at - 1]
        if not rise_ns:
            return math.inf
        share = (limit_ns - times[at - 1]) / rise_ns
        tokens = columns[at - 1] + share * (columns[at] - columns[at - 1])
        return tokens - beside.prefill_tokens - self._surplus(beside)

    def _surplus(self, shape: StepShape) -> int:
        return max(0, shape.num_decodes - self.decodes[-1])

    def _time_ns(self, shape: StepShape, column: int) -> float:
        """The time of a column at this many decodes."""
        rows, times = self.decodes, self.times_ns
        below = bisect_right(rows, shape.num_decodes) - 1
        if below < 0:
            return times[0][column]
        if below == len(rows) - 1:
            return times[-1][column]
        share = (shape.num_decodes - rows[below]) / (rows[below + 1] - rows[below])
        return times[below][column] + share * (times[below + 1][column] - times[below][column])

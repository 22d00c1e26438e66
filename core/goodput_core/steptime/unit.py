"""Step time of the textbook: one unit, whatever a step computes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from goodput_core.steptime.shape import StepShape

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["UnitForm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitForm:
    """A step takes one unit, or ceil(largest chunk / chunk_tokens) units: textbook schedules.

    Args:
        unit_ns: the length of one unit.
        chunk_tokens: tokens of the largest chunk that fit in one unit; None: any number.
    """

    unit_ns: int = 1_000_000
    chunk_tokens: int | None = None

    def step_ns(self, shape: StepShape) -> int:
        """Device time of a step of this shape, in nanoseconds, at least 1."""
        if self.chunk_tokens is None:
            return self.unit_ns
        return self.unit_ns * max(1, math.ceil(shape.max_chunk_tokens / self.chunk_tokens))

    def decode_times(self, num_decodes: int, contexts: Sequence[int]) -> list[int]:
        """`step_ns` of steps that only decode; see `DeviceForm`."""
        # Context does not enter.
        return [self.step_ns(StepShape.of(decodes=num_decodes))] * len(contexts)

    def chunk_within(self, beside: StepShape, start: int, limit_ns: float) -> float:  # noqa: ARG002 - context does not enter
        """The longest chunk with which a step stays within a time; see `StepTimeForm`."""
        units = limit_ns // self.unit_ns
        if units < 1:
            return -1
        if self.chunk_tokens is None:
            return math.inf
        longest = units * self.chunk_tokens
        return -1 if beside.max_chunk_tokens > longest else longest

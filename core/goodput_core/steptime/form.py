"""What every law of step time can be asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_core.steptime.shape import StepShape

__all__ = ["DeviceForm", "StepTimeForm"]


class StepTimeForm(Protocol):
    """A law from the shape of a step to its duration.

    A chunk that grows never makes a step shorter.
    """

    def step_ns(self, shape: StepShape) -> int:
        """Device time of a step of this shape, in nanoseconds, at least 1."""
        ...

    def chunk_within(self, beside: StepShape, start: int, limit_ns: float) -> float:
        """The law turned around: the longest chunk with which a step stays within a time.

        Args:
            beside: what the step computes anyway.
            start: tokens of the chunk's request that are computed already.
            limit_ns: the time, before it is rounded to whole nanoseconds.

        Returns:
            Tokens, not rounded; negative where none fit, infinite where any number does.
            `largest_prefill` makes a whole number of it.
        """
        ...


class DeviceForm(StepTimeForm, Protocol):
    """A law that stays as it is: what a device profile has."""

    def decode_times(self, num_decodes: int, contexts: Sequence[int]) -> list[int]:
        """`step_ns` of steps in which this many requests decode and nothing else happens.

        Args:
            num_decodes: requests, at least 1.
            contexts: of each step, the context of all of them, in tokens.

        Returns:
            Of each step exactly the time that `step_ns` gives, at a fraction of its cost.
        """
        ...

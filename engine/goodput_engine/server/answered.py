"""Lengths of what a replica has answered, as sums that an observer can take differences of.

The control law wants the mix, not a mean: work is summed by powers of two of prompt and answer,
which bounds memory whatever comes.
"""

from __future__ import annotations

__all__ = ["AnsweredLengths"]


class AnsweredLengths:
    """Counts answers since the start."""

    def __init__(self) -> None:
        self._bins: dict[tuple[int, int], list[int]] = {}

    def add(self, *, input_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """A request was answered.

        Args:
            input_tokens: of its prompt, at least 1.
            cached_tokens: of these, found in the prefix cache.
            output_tokens: of its answer.
        """
        key = (input_tokens.bit_length(), output_tokens.bit_length())
        sums = self._bins.setdefault(key, [0, 0, 0, 0])
        sums[0] += 1
        sums[1] += input_tokens
        sums[2] += cached_tokens
        sums[3] += output_tokens

    def bins(self) -> list[list[int]]:
        """Requests and their input, cached and output tokens, summed, of each bin."""
        return list(self._bins.values())

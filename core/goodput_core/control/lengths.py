"""The mix of lengths that traffic brings, in bounded memory.

A mean prompt and a mean answer hide what the work of a service is: long prompts and long answers
cost differently, and their spread says how far a rate that was counted may be from the true one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["LengthBin", "LengthMix"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBin:
    """Requests of about the same lengths, summed.

    Args:
        requests: how many, at least 1.
        input_tokens: of all their prompts together.
        cached_tokens: of these, found in a prefix cache.
        output_tokens: of all their answers together.
    """

    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int

    @property
    def key(self) -> tuple[int, int]:
        """Which bin: powers of two of the mean prompt, and of the mean answer."""
        return (
            (self.input_tokens // self.requests).bit_length(),
            (self.output_tokens // self.requests).bit_length(),
        )

    def __add__(self, other: LengthBin) -> LengthBin:
        return LengthBin(
            requests=self.requests + other.requests,
            input_tokens=self.input_tokens + other.input_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthMix:
    """Requests by their lengths, in the order of the bins' keys.

    Args:
        bins: each key once; `LengthMix.of` sees to it.
    """

    bins: tuple[LengthBin, ...] = ()

    @classmethod
    def of(cls, bins: Iterable[LengthBin]) -> LengthMix:
        """Any bins, single requests too, brought together by their lengths."""
        # Every service's bins of minutes come by here in each interval: no values in between.
        sums: dict[tuple[int, int], list[int]] = {}
        for one in bins:
            known = sums.setdefault(one.key, [0, 0, 0, 0])
            known[0] += one.requests
            known[1] += one.input_tokens
            known[2] += one.cached_tokens
            known[3] += one.output_tokens
        return cls(
            bins=tuple(
                LengthBin(
                    requests=of[0], input_tokens=of[1], cached_tokens=of[2], output_tokens=of[3]
                )
                for _, of in sorted(sums.items())
            )
        )

    @classmethod
    def of_requests(cls, requests: Iterable[tuple[int, int, int]]) -> LengthMix:
        """From the (input, cached, output) tokens of single requests."""
        counted = Counter(requests)
        return cls.of(
            LengthBin(
                requests=count,
                input_tokens=count * input_tokens,
                cached_tokens=count * cached_tokens,
                output_tokens=count * output_tokens,
            )
            for (input_tokens, cached_tokens, output_tokens), count in counted.items()
        )

    @property
    def requests(self) -> int:
        """How many requests it holds."""
        return sum(one.requests for one in self.bins)

    def __add__(self, other: LengthMix) -> LengthMix:
        return LengthMix.of((*self.bins, *other.bins))

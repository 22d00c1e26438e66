"""Histograms of durations and of request lengths, in bounded memory.

Length histograms can be added without the individual values. Verdicts do not use histograms;
they are computed from request records.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["DurationHistogram", "LengthBin", "LengthHistogram", "LengthMix"]

_BUCKETS_PER_E: Final = 50
"""Buckets per factor of e, so that a quantile is within 1 % of the true one."""


class DurationHistogram:
    """Durations in buckets that grow by 2 %. Nanoseconds; durations below 1 ns count as 1 ns.

    Attributes:
        count: durations added.
        sum_ns: the exact sum.
        max_ns: the exact maximum.
    """

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.count = 0
        self.sum_ns = 0
        self.max_ns = 0

    def add(self, ns: int) -> None:
        """Add one duration."""
        ns = max(ns, 1)
        self._buckets[int(math.log(ns) * _BUCKETS_PER_E)] += 1
        self.count += 1
        self.sum_ns += ns
        self.max_ns = max(self.max_ns, ns)

    def merge(self, other: DurationHistogram) -> None:
        """Add the durations of another histogram."""
        self._buckets.update(other._buckets)
        self.count += other.count
        self.sum_ns += other.sum_ns
        self.max_ns = max(self.max_ns, other.max_ns)

    def quantile_ns(self, share: float) -> int:
        """Return the nearest-rank quantile within 1 %; 0 if the histogram is empty."""
        rank, seen = math.ceil(share * self.count), 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= rank:
                return min(self.max_ns, int(math.exp((bucket + 0.5) / _BUCKETS_PER_E)))
        return 0

    def cumulative(self) -> list[tuple[int, float]]:
        """Return the value of each filled bucket in ascending order, and the share up to it."""
        seen, steps = 0, []
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            value_ns = min(self.max_ns, int(math.exp((bucket + 0.5) / _BUCKETS_PER_E)))
            steps.append((value_ns, seen / self.count))
        return steps

    def counts_up_to(self, bounds_ns: Iterable[int]) -> list[int]:
        """Return the number of durations up to each bound; durations within 1 % may be misplaced.

        Args:
            bounds_ns: bounds in ascending order.
        """
        seen, counts = 0, []
        buckets = iter(sorted(self._buckets))
        bucket = next(buckets, None)
        for bound_ns in bounds_ns:
            last = math.log(bound_ns) * _BUCKETS_PER_E - 0.5
            while bucket is not None and bucket <= last:
                seen += self._buckets[bucket]
                bucket = next(buckets, None)
            counts.append(seen)
        return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBin:
    """Requests of similar prompt and output length, with the sums of their tokens.

    Args:
        requests: at least 1.
        input_tokens: prompt tokens.
        cached_tokens: prompt tokens found in a prefix cache.
        output_tokens: output tokens.
    """

    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int

    @property
    def key(self) -> tuple[int, int]:
        """The bin: bit lengths of the mean prompt and of the mean output."""
        return _key(self.requests, self.input_tokens, self.output_tokens)


class LengthHistogram:
    """Lengths of requests in bins: powers of two of the mean prompt and of the mean output.

    A mean length hides the cost of long prompts with long outputs and the spread of the requests.
    The bins retain both in bounded memory.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], list[int]] = {}

    def add(
        self, *, input_tokens: int, cached_tokens: int, output_tokens: int, requests: int = 1
    ) -> None:
        """Add requests of similar lengths.

        Args:
            input_tokens: prompt tokens of all these requests together.
            cached_tokens: prompt tokens found in a prefix cache.
            output_tokens: output tokens.
            requests: at least 1.
        """
        key = _key(requests, input_tokens, output_tokens)
        sums = self._sums.setdefault(key, [0, 0, 0, 0])
        sums[0] += requests
        sums[1] += input_tokens
        sums[2] += cached_tokens
        sums[3] += output_tokens

    def rows(self) -> list[list[int]]:
        """Return requests, input, cached and output tokens of each bin, in no particular order."""
        return list(self._sums.values())

    def mix(self) -> LengthMix:
        """Return the bins as a value, in the order of their lengths."""
        return LengthMix(
            bins=tuple(
                LengthBin(
                    requests=sums[0],
                    input_tokens=sums[1],
                    cached_tokens=sums[2],
                    output_tokens=sums[3],
                )
                for _, sums in sorted(self._sums.items())
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthMix:
    """A frozen `LengthHistogram`.

    Args:
        bins: one bin for each pair of lengths, shortest first.
    """

    bins: tuple[LengthBin, ...] = ()

    @classmethod
    def of(cls, bins: Iterable[LengthBin]) -> LengthMix:
        """Merge bins, including those of single requests, by their lengths."""
        histogram = LengthHistogram()
        for one in bins:
            histogram.add(
                requests=one.requests,
                input_tokens=one.input_tokens,
                cached_tokens=one.cached_tokens,
                output_tokens=one.output_tokens,
            )
        return histogram.mix()

    @classmethod
    def of_requests(cls, requests: Iterable[tuple[int, int, int]]) -> LengthMix:
        """Return the mix of single requests: (prompt, cached, output) tokens of each."""
        histogram = LengthHistogram()
        for prompt, cached, output in requests:
            histogram.add(input_tokens=prompt, cached_tokens=cached, output_tokens=output)
        return histogram.mix()

    @property
    def requests(self) -> int:
        """Number of requests."""
        return sum(one.requests for one in self.bins)

    def __add__(self, other: LengthMix) -> LengthMix:
        return LengthMix.of((*self.bins, *other.bins))


def _key(requests: int, input_tokens: int, output_tokens: int) -> tuple[int, int]:
    return (input_tokens // requests).bit_length(), (output_tokens // requests).bit_length()

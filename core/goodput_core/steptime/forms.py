"""Forms of step time: functions from the shape of a step to its device time.

A form has a few coefficients. Each device profile contains a form, from which the emulated executor
takes its step times. The engine and the operator use the inverse of a form (`largest_prefill`) to
size steps. This module reads no file. Its forms are immutable, unlike the learned form of
`goodput_core.steptime.online`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "DeviceForm",
    "DistServeForm",
    "LinearTime",
    "RooflineForm",
    "StepShape",
    "StepTimeForm",
    "TableForm",
    "UnitForm",
    "largest_prefill",
    "linear_times",
    "tokens_in_time",
]


class StepShape(NamedTuple):
    """The shape of a step, summed over its requests.

    Each request either decodes one token, or computes a *chunk*: some tokens of its prompt (or,
    after a preemption, of the tokens to recompute).

    Args:
        num_requests: B, requests with at least one token in the step.
        num_tokens: N, tokens computed in the step, in chunks and decodes together.
        context_tokens: tokens that attention reads, summed over all requests: those already in the
            KV cache plus those computed in the step.
        max_chunk_tokens: the largest number of tokens of one request.
        num_decodes: requests that decode.
        decode_context_tokens: the part of `context_tokens` that decodes read.
        prefill_squares: sum of end² − start² over the chunks, which is about twice the number of
            token pairs in attention. All chunks of a prompt add up to the square of its length.
    """

    num_requests: int
    num_tokens: int
    context_tokens: int
    max_chunk_tokens: int
    num_decodes: int
    decode_context_tokens: int
    prefill_squares: int

    @classmethod
    def of(
        cls,
        *,
        decodes: int = 0,
        decode_context_tokens: int = 0,
        chunks: Iterable[tuple[int, int]] = (),
    ) -> StepShape:
        """Return the shape of a step from its parts.

        Args:
            decodes: requests that decode.
            decode_context_tokens: context of these requests, including the tokens computed in the
                step.
            chunks: (tokens computed before the step, tokens computed in it) of every other request.
        """
        context, longest = decode_context_tokens, 1 if decodes else 0
        shape = cls(decodes, decodes, context, longest, decodes, context, 0)
        for start, tokens in chunks:
            shape = shape.with_chunk(start, tokens)
        return shape

    @property
    def prefill_tokens(self) -> int:
        """Tokens computed in chunks."""
        return self.num_tokens - self.num_decodes

    def with_chunk(self, start: int, tokens: int) -> StepShape:
        """Return the step with one more chunk: `tokens` tokens after the first `start`."""
        end = start + tokens
        return StepShape(
            num_requests=self.num_requests + 1,
            num_tokens=self.num_tokens + tokens,
            context_tokens=self.context_tokens + end,
            max_chunk_tokens=max(self.max_chunk_tokens, tokens),
            num_decodes=self.num_decodes,
            decode_context_tokens=self.decode_context_tokens,
            prefill_squares=self.prefill_squares + end * end - start * start,
        )


class StepTimeForm(Protocol):
    """A function from the shape of a step to its device time.

    A larger chunk never makes a step shorter.
    """

    def step_ns(self, shape: StepShape) -> int:
        """Return the device time of a step of this shape, in nanoseconds, at least 1."""
        ...

    def chunk_within(self, beside: StepShape, start: int, limit_ns: float) -> float:
        """Return the longest chunk with which a step stays within a time; the inverse of `step_ns`.

        Args:
            beside: the shape of the step without the chunk.
            start: tokens of the chunk's request that are computed already.
            limit_ns: the time, not rounded.

        Returns:
            Tokens, not rounded; negative if none fit, infinite if any number fits.
            `largest_prefill` rounds it.
        """
        ...


class DeviceForm(StepTimeForm, Protocol):
    """The form of a device profile; it is immutable."""

    def decode_times(self, num_decodes: int, contexts: Sequence[int]) -> list[int]:
        """Return `step_ns` of steps that only decode, faster than one call for each.

        Args:
            num_decodes: requests of each step, at least 1.
            contexts: sum of the requests' context tokens, for each step.

        Returns:
            The exact time of each step.
        """
        ...


def largest_prefill(
    form: StepTimeForm,
    *,
    beside: StepShape,
    target_ns: int,
    most_tokens: int,
    start: int = 0,
    multiple: int = 1,
) -> int:
    """Return the longest chunk with which a step is predicted to take at most `target_ns`.

    The inverse is computed analytically (from a linear equation for rooflines and tables, from a
    quadratic one for DistServe's form), so the cost of a call does not depend on the budget.

    Args:
        form: the step-time form.
        beside: the shape of the step without the chunk.
        target_ns: maximum time of the step, from the running request with the tightest target.
        most_tokens: maximum tokens, such as the rest of the budget or of the prompt.
        start: tokens of the chunk's request that are computed already.
        multiple: round down to a multiple of this.

    Returns:
        Tokens, 0 to `most_tokens`; 0 if even one token is too many.
    """
    if target_ns < 1:
        return 0
    # Add half a nanosecond, because predictions are rounded.
    guess = form.chunk_within(beside, start, target_ns + 0.5)
    tokens = most_tokens if guess >= most_tokens else max(0, math.floor(guess))
    # A rounding error may have moved the guess across an integer.
    if tokens > 0 and form.step_ns(beside.with_chunk(start, tokens)) > target_ns:
        tokens -= 1
    elif tokens < most_tokens and (form.step_ns(beside.with_chunk(start, tokens + 1)) <= target_ns):
        tokens += 1
    return tokens - tokens % multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitForm:
    """A step takes one unit, or ceil(largest chunk / chunk_tokens) units; for worked examples.

    Args:
        unit_ns: length of one unit, at least 1.
        chunk_tokens: tokens of one request that fit into one unit, at least 1; None for any number.

    Raises:
        ValueError: a number is below 1.
    """

    unit_ns: int = 1_000_000
    chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if a number is below 1."""
        if self.unit_ns < 1 or (self.chunk_tokens is not None and self.chunk_tokens < 1):
            raise ValueError("unit_ns and chunk_tokens must be at least 1")

    def step_ns(self, shape: StepShape) -> int:
        """Return the device time of a step of this shape, in nanoseconds, at least 1."""
        if self.chunk_tokens is None:
            return self.unit_ns
        return self.unit_ns * max(1, math.ceil(shape.max_chunk_tokens / self.chunk_tokens))

    def decode_times(self, num_decodes: int, contexts: Sequence[int]) -> list[int]:
        """Return the times of steps that only decode; see `DeviceForm`."""
        # Context has no effect.
        return [self.step_ns(StepShape.of(decodes=num_decodes))] * len(contexts)

    def chunk_within(self, beside: StepShape, start: int, limit_ns: float) -> float:  # noqa: ARG002 - context has no effect
        """Invert the form; see `StepTimeForm`."""
        units = limit_ns // self.unit_ns
        if units < 1:
            return -1
        if self.chunk_tokens is None:
            return math.inf
        longest = units * self.chunk_tokens
        return -1 if beside.max_chunk_tokens > longest else longest


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineForm:
    """max(c0, c1·N) + c2·context + c4·B: a step is bound by reading weights or by arithmetic.

    There is no c3; the numbers are those of the fields.

    Args:
        c0_ns: time to read all weights once.
        c1_ns_per_token: arithmetic for each computed token.
        c2_ns_per_context_token: time to read the keys and values of one token.
        c4_ns_per_request: sampling and bookkeeping for each request.

    Source: Williams et al., "Roofline", CACM 2009, applied to decoder inference as in
    Agrawal et al., "Sarathi-Serve", OSDI 2024, section 3.
    """

    c0_ns: float
    c1_ns_per_token: float
    c2_ns_per_context_token: float
    c4_ns_per_request: float

    def step_ns(self, shape: StepShape) -> int:
        """Return the device time of a step of this shape, in nanoseconds, at least 1."""
        return max(
            1,
            round(
                max(self.c0_ns, self.c1_ns_per_token * shape.num_tokens)
                + self.c2_ns_per_context_token * shape.context_tokens
                + self.c4_ns_per_request * shape.num_requests
            ),
        )

    def decode_times(self, num_decodes: int, contexts: Sequence[int]) -> list[int]:
        """Return the times of steps that only decode; see `DeviceForm`."""
        roof_ns = max(self.c0_ns, self.c1_ns_per_token * num_decodes)
        requests_ns = self.c4_ns_per_request * num_decodes
        return linear_times(roof_ns, self.c2_ns_per_context_token, requests_ns, contexts)

    def chunk_within(self, beside: StepShape, start: int, limit_ns: float) -> float:
        """Invert the form; see `StepTimeForm`."""
        room_ns = (
            limit_ns
            - self.c2_ns_per_context_token * (beside.context_tokens + start)
            - self.c4_ns_per_request * (beside.num_requests + 1)
        )
        c1, c2 = self.c1_ns_per_token, self.c2_ns_per_context_token
        # The maximum of two terms is in time if each of them is.
        return min(
            tokens_in_time(room_ns - self.c0_ns, linear=c2),
            tokens_in_time(room_ns - c1 * beside.num_tokens, linear=c1 + c2),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTime:
    """Linear time of a step: fixed + context + requests.

    Args:
        fixed_ns: time of every step.
        ns_per_context_token: time for each token of context.
        ns_per_request: time for each request.
    """

    fixed_ns: float
    ns_per_context_token: float
    ns_per_request: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DistServeForm:
    """Prefill: p0 + p1·n + p2·Σ length². Decode: d0 + d1·context + d2·B, in two regimes of B.

    The published form describes steps with only complete prompts or only decodes. Here a chunk
    costs its share, end² − start², of the prompt's square. All chunks of a prompt together cost as
    much as the unsplit prompt, plus p0 for each further step. A step with chunks and decodes takes
    the sum of the two times; a device that fuses them is faster. At the threshold the published
    decode time may fall by a few percent, and this form reproduces that.

    Args:
        prefill_fixed_ns: p0, time of every step with a chunk.
        prefill_ns_per_token: p1, time for each prompt token.
        prefill_ns_per_square: p2, time for each unit of Σ length².
        small: decode time with fewer requests than the threshold.
        large: decode time with at least as many requests as the threshold.
        large_from_requests: the threshold, in requests that decode.

    Source: Zhong et al., "DistServe", OSDI 2024, appendix A, in the form of its simulator
    (simdistserve, time_estimator.py).
    """

    prefill_fixed_ns: float
    prefill_ns_per_token: float
    prefill_ns_per_square: float
    small: LinearTime
    large: LinearTime
    large_from_requests: int

    def step_ns(self, shape: StepShape) -> int:
        """Return the device time of a step of this shape, in nanoseconds, at least 1."""
        time_ns = self._decode_ns(shape)
        if shape.prefill_tokens:
            time_ns += self._prefill_ns(shape)
        return max(1, round(time_ns))

    def decode_times(self, num_decodes: int, contexts: Sequence[int]) -> list[int]:
        """Return the times of steps that only decode; see `DeviceForm`."""
        decode = self._decode_regime(num_decodes)
        requests_ns = decode.ns_per_request * num_decodes
        return linear_times(decode.fixed_ns, decode.ns_per_context_token, requests_ns, contexts)

    def chunk_within(self, beside: StepShape, start: int, limit_ns: float) -> float:
        """Invert the form; see `StepTimeForm`."""
        room_ns = limit_ns - self._decode_ns(beside) - self._prefill_ns(beside)
        square = self.prefill_ns_per_square
        linear = self.prefill_ns_per_token + 2 * square * start
        return tokens_in_time(room_ns, linear=linear, square=square)

    def _prefill_ns(self, shape: StepShape) -> float:
        return (
            self.prefill_fixed_ns
            + self.prefill_ns_per_token * shape.prefill_tokens
            + self.prefill_ns_per_square * shape.prefill_squares
        )

    def _decode_ns(self, shape: StepShape) -> float:
        if not shape.num_decodes:
            return 0
        decode = self._decode_regime(shape.num_decodes)
        return (
            decode.fixed_ns
            + decode.ns_per_context_token * shape.decode_context_tokens
            + decode.ns_per_request * shape.num_decodes
        )

    def _decode_regime(self, num_decodes: int) -> LinearTime:
        return self.small if num_decodes < self.large_from_requests else self.large


@dataclass(frozen=True, slots=True, kw_only=True)
class TableForm:
    """Measured step times by decodes and prefill tokens, interpolated along both axes.

    A published table seldom covers every step. Outside the table, these rules apply:
    - Steps with fewer decodes than the first row take the times of that row, an upper bound.
    - Each decode beyond the last row counts as one prefill token, since each computes one token.
    - Beyond the last column, the slope of the last two columns continues.

    Context has no effect: the times hold for the contexts at which they were measured.

    Args:
        decodes: numbers of decodes, increasing, at least one; one row for each.
        prefill_tokens: numbers of prefill tokens, increasing from 0, at least two; one column for
            each.
        times_ns: [decodes, prefill_tokens], not decreasing along either axis.

    Raises:
        ValueError: the table violates one of these conditions.
    """

    decodes: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    times_ns: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        """Check the conditions of the table.

        Raises:
            ValueError: the message names the violated condition.
        """
        for name, values in (("decodes", self.decodes), ("prefill_tokens", self.prefill_tokens)):
            if any(a >= b for a, b in pairwise(values)):
                raise ValueError(f"{name} must increase")
        if not self.decodes:
            raise ValueError("decodes must have at least one number")
        width = len(self.prefill_tokens)
        if width < 2 or self.prefill_tokens[0] != 0:
            raise ValueError("prefill_tokens must begin with 0 and have at least two numbers")
        if [len(row) for row in self.times_ns] != [width] * len(self.decodes):
            raise ValueError(
                "times must have one row for each of decodes, "
                "and each row one time for each of prefill_tokens"
            )
        for line in (*self.times_ns, *zip(*self.times_ns, strict=True)):
            if any(a > b for a, b in pairwise(line)):
                raise ValueError("times must not decrease as decodes or prefill tokens increase")

    def step_ns(self, shape: StepShape) -> int:
        """Return the device time of a step of this shape, in nanoseconds, at least 1."""
        tokens = shape.prefill_tokens + self._surplus(shape)
        columns = self.prefill_tokens
        at = min(bisect_right(columns, tokens), len(columns) - 1)
        left_ns, right_ns = self._time_ns(shape, at - 1), self._time_ns(shape, at)
        share = (tokens - columns[at - 1]) / (columns[at] - columns[at - 1])
        return max(1, round(left_ns + share * (right_ns - left_ns)))

    def decode_times(self, num_decodes: int, contexts: Sequence[int]) -> list[int]:
        """Return the times of steps that only decode; see `DeviceForm`."""
        # Context has no effect.
        return [self.step_ns(StepShape.of(decodes=num_decodes))] * len(contexts)

    def chunk_within(self, beside: StepShape, start: int, limit_ns: float) -> float:  # noqa: ARG002 - context has no effect
        """Invert the form; see `StepTimeForm`."""
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
        """Return the time of a column at the shape's number of decodes."""
        rows, times = self.decodes, self.times_ns
        below = bisect_right(rows, shape.num_decodes) - 1
        if below < 0:
            return times[0][column]
        if below == len(rows) - 1:
            return times[-1][column]
        share = (shape.num_decodes - rows[below]) / (rows[below + 1] - rows[below])
        return times[below][column] + share * (times[below + 1][column] - times[below][column])


def linear_times(
    base_ns: float, ns_per_context_token: float, requests_ns: float, contexts: Sequence[int]
) -> list[int]:
    """Return base + context + requests for each context.

    The terms are added in the order of `step_ns`, because sums of floats depend on the order.
    """
    return [
        time_ns
        if (time_ns := round(base_ns + ns_per_context_token * tokens + requests_ns)) > 1
        else 1
        for tokens in contexts
    ]


def tokens_in_time(room_ns: float, *, linear: float, square: float = 0.0) -> float:
    """Return the tokens q with square·q² + linear·q = room_ns, accurate for a small `square` too.

    The result is negative if there is no time left at all, and infinite if tokens cost nothing.
    """
    if room_ns < 0:
        return -1
    divisor = linear + math.sqrt(linear * linear + 4 * square * room_ns)
    return 2 * room_ns / divisor if divisor else math.inf

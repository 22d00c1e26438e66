"""Step time in the form that DistServe published: one law for prefills, another for decodes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_core.steptime.shape import StepShape

__all__ = ["DistServeForm", "LinearTime"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTime:
    """Time of decoding: fixed + by context + by request.

    Args:
        fixed_ns: of every step.
        ns_per_context_token: for each token of context.
        ns_per_request: for each request.
    """

    fixed_ns: float
    ns_per_context_token: float
    ns_per_request: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DistServeForm:
    """Prefill: p0 + p1·n + p2·Σ length². Decode: d0 + d1·context + d2·B, in two regimes of B.

    The published form knows whole prompts and steps of one kind. A chunk's share of its prompt's
    square is end² − start², so that the chunks of a prompt cost what the prompt costs, but for
    p0, which every step with a prefill pays. A step of both kinds takes the sum, as if one ran
    after the other; a device that fuses them is faster.

    Between the regimes the published time may fall by a few percent: it is left as it is.

    Args:
        prefill_fixed_ns: p0, of every step with a prefill.
        prefill_ns_per_token: p1.
        prefill_ns_per_square: p2, for each unit of Σ length².
        small: the law of decoding below the threshold.
        large: the law of decoding from the threshold on.
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
        """Device time of a step of this shape, in nanoseconds, at least 1."""
        time_ns = self._decode_ns(shape)
        if shape.prefill_tokens:
            time_ns += self._prefill_ns(shape)
        return max(1, round(time_ns))

    def decode_times(self, num_decodes: int, contexts: Sequence[int]) -> list[int]:
        """`step_ns` of steps that only decode; see `DeviceForm`."""
        law = self._decode_regime(num_decodes)
        fixed_ns, slope_ns = law.fixed_ns, law.ns_per_context_token
        requests_ns = law.ns_per_request * num_decodes
        # Added in the order of `step_ns`: sums of floats depend on it.
        return [
            time_ns if (time_ns := round(fixed_ns + slope_ns * tokens + requests_ns)) > 1 else 1
            for tokens in contexts
        ]

    def chunk_within(self, beside: StepShape, start: int, limit_ns: float) -> float:
        """The longest chunk with which a step stays within a time; see `StepTimeForm`."""
        room_ns = limit_ns - self._decode_ns(beside) - self._prefill_ns(beside)
        if room_ns < 0:
            return -1
        # square·q² + linear·q = room, solved so that nothing cancels where `square` is small.
        square = self.prefill_ns_per_square
        linear = self.prefill_ns_per_token + 2 * square * start
        divisor = linear + math.sqrt(linear * linear + 4 * square * room_ns)
        return 2 * room_ns / divisor if divisor else math.inf

    def _prefill_ns(self, shape: StepShape) -> float:
        return (
            self.prefill_fixed_ns
            + self.prefill_ns_per_token * shape.prefill_tokens
            + self.prefill_ns_per_square * shape.prefill_squares
        )

    def _decode_ns(self, shape: StepShape) -> float:
        if not shape.num_decodes:
            return 0
        law = self._decode_regime(shape.num_decodes)
        return (
            law.fixed_ns
            + law.ns_per_context_token * shape.decode_context_tokens
            + law.ns_per_request * shape.num_decodes
        )

    def _decode_regime(self, num_decodes: int) -> LinearTime:
        return self.small if num_decodes < self.large_from_requests else self.large

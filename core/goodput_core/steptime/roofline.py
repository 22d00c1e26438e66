"""Step time from two rooflines: reading the weights, and arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_core.steptime.shape import StepShape

__all__ = ["RooflineForm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineForm:
    """max(c0, c1·N) + c2·context + c4·B: a step is bound by weights or by arithmetic.

    Args:
        c0_ns: reading all weights once: the floor of a step.
        c1_ns_per_token: arithmetic per computed token.
        c2_ns_per_context_token: reading one token's keys and values.
        c4_ns_per_request: sampling and bookkeeping per request.

    Source: Williams et al., "Roofline", CACM 2009, applied to decoder inference as in
    Agrawal et al., "Sarathi-Serve", OSDI 2024, section 3.
    """

    c0_ns: float
    c1_ns_per_token: float
    c2_ns_per_context_token: float
    c4_ns_per_request: float

    def step_ns(self, shape: StepShape) -> int:
        """Device time of a step of this shape, in nanoseconds, at least 1."""
        return max(
            1,
            round(
                max(self.c0_ns, self.c1_ns_per_token * shape.num_tokens)
                + self.c2_ns_per_context_token * shape.context_tokens
                + self.c4_ns_per_request * shape.num_requests
            ),
        )

    def decode_times(self, num_decodes: int, contexts: Sequence[int]) -> list[int]:
        """`step_ns` of steps that only decode; see `DeviceForm`."""
        roof_ns = max(self.c0_ns, self.c1_ns_per_token * num_decodes)
        slope_ns = self.c2_ns_per_context_token
        requests_ns = self.c4_ns_per_request * num_decodes
        # Added in the order of `step_ns`: sums of floats depend on it.
        return [
            time_ns if (time_ns := round(roof_ns + slope_ns * tokens + requests_ns)) > 1 else 1
            for tokens in contexts
        ]

    def chunk_within(self, beside: StepShape, start: int, limit_ns: float) -> float:
        """The longest chunk with which a step stays within a time; see `StepTimeForm`."""
        room_ns = (
            limit_ns
            - self.c2_ns_per_context_token * (beside.context_tokens + start)
            - self.c4_ns_per_request * (beside.num_requests + 1)
        )
        c1, c2 = self.c1_ns_per_token, self.c2_ns_per_context_token
        # The larger of two roofs is within the time where both are.
        return min(
            _tokens(room_ns - self.c0_ns, c2), _tokens(room_ns - c1 * beside.num_tokens, c1 + c2)
        )


def _tokens(room_ns: float, ns_per_token: float) -> float:
    if room_ns < 0:
        return -1
    return room_ns / ns_per_token if ns_per_token else math.inf

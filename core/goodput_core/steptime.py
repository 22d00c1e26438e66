"""How long a step of a device takes: the forms a device profile may have, and their prediction.

The engine's emulated executor, the engine's own budget law and the operator's capacity law all
predict with these objects, so they agree on what a step costs. Nothing here reads a file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

__all__ = ["RooflineForm", "StepShape", "StepTimeForm", "UnitForm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What a step computes, summed over its requests.

    Args:
        num_requests: requests with at least one token in the step, B.
        num_tokens: tokens computed, prompt chunks and decodes together, N.
        context_tokens: context read by every request of the step, prefills included: for each,
            the tokens already in the KV cache plus those computed now.
        max_chunk_tokens: the largest number of tokens of any one request.
    """

    num_requests: int
    num_tokens: int
    context_tokens: int
    max_chunk_tokens: int


class StepTimeForm(Protocol):
    """A law from the shape of a step to its duration."""

    def step_ns(self, shape: StepShape) -> int:
        """Device time of a step of this shape, in nanoseconds, at least 1."""
        ...


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

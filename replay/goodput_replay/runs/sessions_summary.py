"""Counts of causal sessions in a run's summary; apart, because the plan computes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

__all__ = ["SessionsSummary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionsSummary:
    """Order of the requests of sessions with --sessions causal, warm-up rows included."""

    starts: Annotated[int, Meta(description="Requests sent at their times in the trace.")]
    follow_ups: Annotated[
        int,
        Meta(
            description="Requests sent a think time after the end of the request that they follow."
        ),
    ]
    think_recorded: Annotated[
        int, Meta(description="Follow-ups with a recorded think time (delay_ms).")
    ]
    think_from_ends: Annotated[
        int,
        Meta(
            description="Follow-ups whose think time is that from the recorded end of the request "
            "before to their arrival."
        ),
    ]
    think_from_arrivals: Annotated[
        int,
        Meta(
            description="Follow-ups whose think time is that between both arrivals, which includes "
            "the unknown duration of the request before."
        ),
    ]
    overlapping: Annotated[
        int,
        Meta(
            description="Follow-ups without a recorded think time that arrived before the recorded "
            "end of the request before; sent at its end."
        ),
    ]
    without_parent: Annotated[
        int,
        Meta(description="Starts whose parent_request_id is not an earlier request of the plan."),
    ]

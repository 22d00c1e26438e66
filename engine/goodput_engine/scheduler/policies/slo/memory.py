"""How much KV memory those who run will need at their peak, if answers end when expected."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["peak_tokens"]


def peak_tokens(requests: Iterable[tuple[int, float]]) -> float:
    """The most tokens held at once, when each grows by one a step and leaves at its end.

    Args:
        requests: of each, tokens it holds and tokens it is expected to get yet.

    Source: Gong et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees", ASPLOS
    2025, equation 3: the memory is fullest in a moment in which a request ends, and those are
    still there then that have more left.
    """
    held, peak = 0, 0.0
    ordered = sorted(requests, key=lambda request: -request[1])
    for number, (tokens, left) in enumerate(ordered, start=1):
        held += tokens
        peak = max(peak, held + number * left)
    return peak

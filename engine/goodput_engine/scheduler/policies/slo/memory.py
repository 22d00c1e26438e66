"""Peak demand of the running requests for KV memory, from predicted output lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["peak_tokens"]


def peak_tokens(requests: Iterable[tuple[int, float]]) -> float:
    """Return the largest number of tokens in memory at once.

    Each request gains one token per step and frees its tokens at its end.

    Args:
        requests: (tokens in memory, predicted remaining tokens) of each request.

    Source: Gong et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees", ASPLOS
    2025, equation 3: the peak is at the end of some request, when only requests with more
    remaining tokens are still in memory.
    """
    held, peak = 0, 0.0
    ordered = sorted(requests, key=lambda request: -request[1])
    for number, (tokens, left) in enumerate(ordered, start=1):
        held += tokens
        peak = max(peak, held + number * left)
    return peak

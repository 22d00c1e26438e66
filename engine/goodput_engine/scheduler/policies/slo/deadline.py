"""The deadline of a request's next token, and whether its targets can still be met.

Pure functions of a request, the time, and a prediction of its remaining tokens. The TTFT target is
the deadline of the first token. TPOT is a mean over the complete output, which may end at any
token. The target is met at every possible end if the n-th token follows the first one within n − 1
times the target. A request that is ahead of this schedule may pause, and one that is behind may
catch up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["NEVER_NS", "has_missed", "next_due_ns"]

NEVER_NS: Final = 1 << 62
"""The deadline of a request without a target."""


def next_due_ns(request: ScheduledRequest, sampled: int, now_ns: int) -> int:
    """Return the deadline of the next token to compute.

    Args:
        request: the request.
        sampled: its output tokens, those in flight included.
        now_ns: assumed time of its first token while that token is in flight.
    """
    targets = request.targets
    if not sampled:
        due_ns = NEVER_NS if targets.ttft_ns is None else request.arrival_ns + targets.ttft_ns
    elif targets.tpot_ns is not None:
        due_ns = (request.first_token_ns or now_ns) + sampled * targets.tpot_ns
    else:
        due_ns = NEVER_NS
    if targets.e2e_ns is not None:
        due_ns = min(due_ns, request.arrival_ns + targets.e2e_ns)
    return due_ns


def has_missed(
    request: ScheduledRequest,
    sampled: int,
    now_ns: int,
    *,
    tokens_left: Callable[[ScheduledRequest], float],
    token_ns: float,
) -> bool:
    """True if a request has missed one of its targets, or cannot meet it any more.

    Args:
        request: the request.
        sampled: its output tokens, those in flight included.
        now_ns: start of the next step.
        tokens_left: predicts its remaining output tokens; called if the request is behind.
        token_ns: shortest time from one token to the next.
    """
    targets, first_ns, arrival_ns = request.targets, request.first_token_ns, request.arrival_ns
    ttft_ns, tpot_ns, e2e_ns = targets.ttft_ns, targets.tpot_ns, targets.e2e_ns
    if ttft_ns is not None and (first_ns or now_ns) - arrival_ns > ttft_ns:
        return True
    if e2e_ns is not None and now_ns - arrival_ns > e2e_ns:
        return True
    if not first_ns or tpot_ns is None:
        return False
    behind_ns = now_ns - first_ns - sampled * tpot_ns
    return behind_ns > 0 and behind_ns > tokens_left(request) * (tpot_ns - token_ns)

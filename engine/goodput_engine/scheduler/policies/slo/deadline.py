"""When a request's next token is due so that its promises hold, and when they can hold no more.

Pure functions of a request, the time, and what is expected of its rest. TTFT sets the first
token's time. TPOT is a mean over the whole answer, which may end at any token: it holds at every
possible end if the n-th token comes within n − 1 times the target after the first. A request that
ran ahead of this schedule may pause, one that fell behind may catch up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["NEVER_NS", "has_missed", "next_due_ns"]

NEVER_NS: Final = 1 << 62
"""Due at no time: nothing was promised."""


def next_due_ns(request: ScheduledRequest, sampled: int, now_ns: int) -> int:
    """When the token after those it has, and those in flight, is due.

    Args:
        request: it.
        sampled: how many those are.
        now_ns: when its first token is taken to have come, while that one is in flight.
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
    """Whether one of its promises is broken whatever happens from now on.

    Args:
        request: it.
        sampled: tokens that it has, those in flight included.
        now_ns: when the next step begins.
        tokens_left: how many more it is expected to get; asked for if it is behind.
        token_ns: how soon one can follow another.
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

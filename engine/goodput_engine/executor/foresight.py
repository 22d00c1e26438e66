"""When steps will be done on an emulated device, many of them at once.

It must not know what the steps compute, nor whose they are: only how long the device takes for
each of them and the host before it. The rules are those by which `emulated` runs one plan.
"""

from __future__ import annotations

from itertools import accumulate
from operator import sub

__all__ = ["foresee"]


def foresee(
    under_way: list[int], times: list[int], *, host_ns: int, host_free_ns: int
) -> tuple[list[int], list[int] | None]:
    """The deadlines of steps of which each is planned when the oldest under way is done.

    Args:
        under_way: the deadlines of the steps under way, oldest first, at least one.
        times: device time of each step to come, nanoseconds, at least one.
        host_ns: host time before each of them.
        host_free_ns: when the host has done with those under way; not after the last deadline.

    Returns:
        The deadlines of all steps, those under way included; and when the host has done with
        each of the steps to come, None: `host_ns` after the deadline that it waited for.
    """
    if len(under_way) == 1:
        # Host and device wait for each other.
        waits = [time_ns + host_ns for time_ns in times]
        return list(accumulate(waits, initial=under_way[0])), None
    if (
        host_free_ns <= under_way[0]
        and min(times) >= host_ns
        and min(map(sub, under_way[1:], under_way)) >= host_ns
    ):
        # The host is always ahead, so the device never waits.
        return [*under_way[:-1], *accumulate(times, initial=under_way[-1])], None
    done = list(under_way)
    made: list[int] = []
    for step, time_ns in enumerate(times):
        host_free_ns = max(done[step], host_free_ns) + host_ns
        made.append(host_free_ns)
        done.append(max(done[-1], host_free_ns) + time_ns)
    return done, made

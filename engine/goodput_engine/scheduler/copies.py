"""Which blocks a step copies: as many as fit beside what it computes.

A copy that takes no longer than the step costs no time. So each plan takes along what fits into a
step like the last one, in each direction, oldest first; a longer copy goes on in the next plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_engine.scheduler.plan import Copy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from goodput_engine.scheduler.floor import Floor
    from goodput_engine.scheduler.request import ScheduledRequest

__all__ = ["take_copies"]


def take_copies(
    floor: Floor, *, plan_id: int, step_ns: int
) -> tuple[tuple[Copy, ...], list[ScheduledRequest]]:
    """The copies of the next plan.

    Args:
        floor: whose blocks are to be copied.
        plan_id: the plan's number.
        step_ns: how long the last step that computed took.

    Returns:
        The copies, and the requests that are done with them.
    """
    room = max(1, step_ns // floor.host.ns_per_block)
    copies: list[Copy] = []
    done: list[ScheduledRequest] = []
    for to_host, requests in ((True, floor.leaving), (False, floor.returning)):
        _take(requests.values(), room, plan_id, to_host=to_host, copies=copies, done=done)
    return tuple(copies), done


def _take(
    requests: Iterable[ScheduledRequest],
    room: int,
    plan_id: int,
    *,
    to_host: bool,
    copies: list[Copy],
    done: list[ScheduledRequest],
) -> None:
    for request in requests:
        start, blocks = request.copied_blocks, len(request.host_blocks)
        end = min(blocks, start + room)
        if end == start:
            continue  # its last blocks are in flight
        copies.append(
            Copy(
                rid=request.rid,
                to_host=to_host,
                device_blocks=tuple(request.blocks[start:end]),
                host_blocks=tuple(request.host_blocks[start:end]),
            )
        )
        request.copied_blocks = end
        request.last_plan = plan_id
        if end == blocks:
            done.append(request)
        room -= end - start
        if room <= 0:
            return

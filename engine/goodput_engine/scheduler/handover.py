"""Requests that come with keys and values computed elsewhere, and those kept for somebody else.

Prefill and decode on different replicas need three moves that a replica alone does not: keep the
blocks of a request that is over until another replica has them; reserve blocks for one that comes
with its tokens computed; let it decode when they are there. One that moves while it decodes needs
two more: it departs when most of it is copied, and its reservation grows with it until then. How
long the copy takes and over what it goes is the caller's to say; nothing here copies anything.

Source: Zhong et al., "DistServe", OSDI 2024, section 4.3: the decoding side pulls when it has
room, and the prefill side's memory is the queue. Sun et al., "Llumnix", OSDI 2024, section 4.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_engine.scheduler.request import RequestState

if TYPE_CHECKING:
    from goodput_engine.scheduler.door import Door
    from goodput_engine.scheduler.floor import Floor
    from goodput_engine.scheduler.policy import SchedulerView, SchedulingPolicy
    from goodput_engine.scheduler.request import ScheduledRequest

__all__ = ["HandOver"]


class HandOver:
    """The moves of one scheduler.

    Args:
        policy: says how many blocks an admission leaves free.
        floor: its requests.
        door: knows the longest answer.
        view: what the policy may look at.
    """

    __slots__ = ("_door", "_floor", "_policy", "_view")

    def __init__(
        self, *, policy: SchedulingPolicy, floor: Floor, door: Door, view: SchedulerView
    ) -> None:
        self._policy = policy
        self._floor = floor
        self._door = door
        self._view = view

    def take_over(self, request: ScheduledRequest, *, emitted: int, first_token_ns: int) -> bool:
        """Reserve blocks and a place for a request that got its first tokens elsewhere.

        Args:
            request: it, as if new.
            emitted: output tokens it has; all but the last are computed.
            first_token_ns: when it got the first of them.

        Returns:
            Whether there is room. Nobody is evicted for it, and who waits here comes first.
        """
        floor, kv, view = self._floor, self._floor.kv, self._view
        assert request.rid not in floor.requests, request.rid
        needed = kv.blocks_for(request.input_tokens + emitted)
        headroom = self._policy.headroom_blocks(view) if floor.num_running else 0
        if (
            len(floor.waiting)
            or floor.num_running >= view.limits.max_num_seqs
            or needed + headroom > kv.free_blocks
        ):
            return False
        floor.settled = False
        request.output_limit = self._door.output_limit(request)
        request.blocks = kv.allocate(needed)
        request.base_planned = request.input_tokens + emitted - 1
        request.base_sampled = request.base_emitted = emitted
        request.first_token_ns = first_token_ns
        request.admitted_ns = request.first_scheduled_ns = view.now_ns
        request.admitted_tokens = request.total_tokens
        request.state = RequestState.ARRIVING
        floor.requests[request.rid] = request
        floor.arriving[request.rid] = request
        return True

    def grow(self, rid: int, *, emitted: int) -> bool:
        """A request that was taken over has got more tokens elsewhere; whether there is room."""
        floor = self._floor
        request = floor.arriving[rid]
        more = floor.kv.blocks_for(request.input_tokens + emitted) - len(request.blocks)
        if more > floor.kv.free_blocks:
            return False
        floor.settled = False
        request.blocks += floor.kv.allocate(max(0, more))
        request.base_planned = request.input_tokens + emitted - 1
        request.base_sampled = request.base_emitted = emitted
        request.admitted_tokens = request.total_tokens
        return True

    def depart(self, rid: int) -> None:
        """A request that decodes gets no further tokens here but those in flight.

        It is `KEPT` as soon as no step in flight uses its blocks, unless it ends with one of them.
        """
        floor = self._floor
        request = floor.requests[rid]
        floor.withdraw(request, keep_tokens=True)
        request.keeps_blocks = True
        record = floor.record_of(request.last_plan)
        if record is None:
            request.state = RequestState.KEPT
        else:
            request.state = RequestState.DEPARTING
            record.releases.append(request)

    def arrived(self, rid: int) -> None:
        """The blocks of a request that was taken over are filled: it decodes from now on."""
        floor = self._floor
        floor.settled = False
        request = floor.arriving.pop(rid)
        floor.publish(request, request.input_tokens)
        floor.get_ready(request)

    def let_go(self, rid: int) -> None:
        """Nobody needs the blocks of a request that is over and kept them."""
        request = self._floor.requests[rid]
        assert request.state is RequestState.KEPT, request.state
        self._floor.settled = False
        self._floor.free(request)
        request.state = RequestState.FINISHED

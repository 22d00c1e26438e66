"""KV transfer: requests that move between replicas with their keys and values.

If a request is prefilled on one replica and decoded on another, the destination reserves blocks for
its computed tokens, and the request decodes there when these are filled. The source keeps the
blocks of the request until the destination has copied them.

If a request moves while it decodes, the reservation grows until most of the request is copied.
Then the source detaches the request. This module copies nothing: the caller determines the link of
a copy and the time that it takes.

Source: Zhong et al., "DistServe", OSDI 2024, section 4.3: the decode side pulls when it has room,
and the memory of the prefill side is the queue. Sun et al., "Llumnix", OSDI 2024, section 4.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_engine.scheduler.request_table import RequestState

if TYPE_CHECKING:
    from goodput_engine.scheduler.admission import Admission
    from goodput_engine.scheduler.policy import SchedulerView, SchedulingPolicy
    from goodput_engine.scheduler.request_table import RequestTable, ScheduledRequest

__all__ = ["KVTransfer"]


class KVTransfer:
    """Transfers to and from one scheduler.

    Args:
        policy: gives the headroom of an admission.
        table: requests and memory of the scheduler.
        admission: gives the output limit of a request.
        view: state and limits of the scheduler.
    """

    __slots__ = ("_admission", "_policy", "_table", "_view")

    def __init__(
        self,
        *,
        policy: SchedulingPolicy,
        table: RequestTable,
        admission: Admission,
        view: SchedulerView,
    ) -> None:
        self._policy = policy
        self._table = table
        self._admission = admission
        self._view = view

    # --- destination -------------------------------------------------------------------------
    def reserve(self, request: ScheduledRequest, *, emitted: int, first_token_ns: int) -> bool:
        """Reserve blocks and a slot for a request that started on another replica.

        Args:
            request: the request, without any scheduler state.
            emitted: number of its output tokens; all but the last one are computed.
            first_token_ns: time of its first token.

        Returns:
            False if there is no slot, if there are too few blocks, or if requests wait here. No
            request is evicted for a transfer.
        """
        table, kv, view = self._table, self._table.kv, self._view
        assert request.rid not in table.requests, request.rid
        needed = kv.blocks_for(request.input_tokens + emitted)
        headroom = self._policy.headroom_blocks() if table.num_running else 0
        if (
            len(table.waiting)
            or table.num_running >= view.limits.max_num_seqs
            or needed + headroom > kv.free_blocks
        ):
            return False
        request.output_limit = self._admission.output_limit(request)
        request.first_token_ns = first_token_ns
        request.admitted_ns = request.first_scheduled_ns = view.now_ns
        request.state = RequestState.RECEIVING
        self._extend(request, blocks=needed, emitted=emitted)
        table.requests[request.rid] = request
        table.receiving[request.rid] = request
        return True

    def grow(self, rid: int, *, emitted: int) -> bool:
        """Extend a reservation to this many output tokens.

        Returns:
            False if too few blocks are free.
        """
        kv, request = self._table.kv, self._table.receiving[rid]
        more = kv.blocks_for(request.input_tokens + emitted) - len(request.blocks)
        if more > kv.free_blocks:
            return False
        self._extend(request, blocks=max(0, more), emitted=emitted)
        return True

    def finish(self, rid: int) -> None:
        """Make a request ready to decode after its reserved blocks were filled."""
        table = self._table
        table.settled = False
        request = table.receiving.pop(rid)
        table.publish(request, request.input_tokens)
        table.set_ready(request)
        self._admission.watch(request)

    def _extend(self, request: ScheduledRequest, *, blocks: int, emitted: int) -> None:
        self._table.settled = False
        request.blocks += self._table.kv.allocate(blocks)
        request.base_computed = request.input_tokens + emitted - 1
        request.base_sampled = request.base_emitted = emitted
        request.admitted_tokens = request.total_tokens

    # --- source ------------------------------------------------------------------------------
    def detach(self, rid: int) -> None:
        """Stop scheduling a decoding request; tokens in flight are still emitted.

        It becomes HELD when no step in flight uses its blocks, unless it ends in one of them.
        """
        table = self._table
        request = table.requests[rid]
        table.withdraw(request, keep_tokens=True)
        request.holds_blocks = True
        record = table.record_of(request.last_plan)
        if record is None:
            request.state = RequestState.HELD
        else:
            request.state = RequestState.DETACHING
            record.releases.append(request)

    def release(self, rid: int) -> None:
        """Free the blocks of a held request after the destination has copied them."""
        request = self._table.requests[rid]
        assert request.state is RequestState.HELD, request.state
        self._table.settled = False
        self._table.free(request)
        request.state = RequestState.FINISHED

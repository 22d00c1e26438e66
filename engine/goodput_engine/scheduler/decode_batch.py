"""The decode batch: the requests that decode one token in every step.

In steady decoding, two steps differ only in that every member has one more token. The batch
therefore does not visit its members in each step. It counts *epochs*, the steps that decode. A
member stores the epoch after which it joined; its token counts follow from the epochs since then.
The next *event* of a member is the epoch in which it needs a block or decodes for the last time.
The batch files each member under that epoch.

`schedule_decodes` plans the decodes of a step.
"""

from __future__ import annotations

import heapq
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

from goodput_engine.scheduler.plan import Join
from goodput_engine.scheduler.request_table import RequestState

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from goodput_engine.kv.blocks import BlockPool
    from goodput_engine.scheduler.plan import StepBuilder
    from goodput_engine.scheduler.policy import Phase
    from goodput_engine.scheduler.preemption import Evictor
    from goodput_engine.scheduler.request_table import RequestTable, ScheduledRequest

__all__ = ["DecodeBatch", "schedule_decodes"]


class DecodeBatch:
    """The decoding requests, ordered by the epoch in which they joined.

    Args:
        block_size: tokens per KV block.

    Attributes:
        members: the requests by rid.
        epoch: number of steps so far that decode, those in flight included.
        committed_epoch: number of committed steps that decode.
        last_plan: number of the plan of the latest epoch.
        total_context: number of computed tokens of all members, those in flight included.
    """

    __slots__ = (
        "_block_size",
        "_events",
        "_joined",
        "_left",
        "_tpots_ns",
        "committed_epoch",
        "epoch",
        "last_plan",
        "members",
        "total_context",
    )

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.members: dict[int, ScheduledRequest] = {}
        self.epoch = 0
        self.committed_epoch = 0
        self.last_plan = 0
        self.total_context = 0
        self._events: dict[int, list[ScheduledRequest]] = {}
        self._joined: list[ScheduledRequest] = []
        self._left: list[int] = []
        self._tpots_ns: dict[int, int] = {}
        """Number of members by their target time per token."""

    @property
    def tightest_ns(self) -> int | None:
        """The smallest target time per token of a member; None if no member has a target."""
        return min(self._tpots_ns, default=None)

    # --- members -----------------------------------------------------------------------------
    def join(self, request: ScheduledRequest) -> None:
        """Add a request, which decodes from the next epoch.

        Its blocks must have room for the keys and values of its next token, and it must be below
        its output limit.
        """
        request.batch = self
        request.state = RequestState.DECODING
        request.joined_epoch = self.epoch
        request.last_epoch = self.epoch + request.output_limit - request.base_sampled
        self.members[request.rid] = request
        self.total_context += request.base_computed
        self._joined.append(request)
        tpot_ns = request.targets.pace_ns
        if tpot_ns is not None:
            self._tpots_ns[tpot_ns] = self._tpots_ns.get(tpot_ns, 0) + 1
        self.file(request)

    def leave(self, request: ScheduledRequest) -> None:
        """Remove a member and update its `base_` counters; the caller sets its state."""
        decoded = self.epoch - request.joined_epoch
        request.base_computed += decoded
        request.base_sampled += decoded
        request.base_emitted += max(0, self.committed_epoch - request.joined_epoch)
        request.batch = None
        del self.members[request.rid]
        tpot_ns = request.targets.pace_ns
        if tpot_ns is not None:
            self._tpots_ns[tpot_ns] -= 1
            if not self._tpots_ns[tpot_ns]:
                del self._tpots_ns[tpot_ns]
        self.total_context -= request.base_computed
        if decoded:
            request.last_plan = self.last_plan
            self._left.append(request.rid)
        else:  # it joined after the latest plan
            self._joined.remove(request)

    def take_changes(self) -> tuple[tuple[Join, ...], tuple[int, ...]]:
        """Return and clear the requests that joined or left since the previous plan."""
        joined: tuple[Join, ...] = ()
        left: tuple[int, ...] = ()
        if self._joined:
            joined = tuple(
                Join(rid=r.rid, start=r.base_computed, output_tokens=r.base_sampled)
                for r in self._joined
            )
            self._joined.clear()
        if self._left:
            left = tuple(self._left)
            self._left.clear()
        return joined, left

    def decoded_in(self, epoch: int) -> list[int]:
        """Return the rids of the members that decoded in an epoch, in the order of joining."""
        members = self.members
        later = 0
        for request in reversed(members.values()):
            if request.joined_epoch < epoch:
                break
            later += 1
        return list(islice(members, len(members) - later)) if later else list(members)

    # --- epochs ------------------------------------------------------------------------------
    def advance(self, plan_id: int) -> None:
        """Count one epoch: every member decodes one token in this plan."""
        self.epoch += 1
        self.total_context += len(self.members)
        self.last_plan = plan_id

    def advance_by(self, epochs: int, *, committed: int, plan_id: int) -> None:
        """Count several epochs in which no member joins or leaves.

        Args:
            epochs: number of epochs to count.
            committed: the latest committed epoch.
            plan_id: number of the plan of the latest epoch.
        """
        self.epoch += epochs
        self.committed_epoch = committed
        self.total_context += epochs * len(self.members)
        self.last_plan = plan_id

    # --- blocks ------------------------------------------------------------------------------
    def file(self, request: ScheduledRequest) -> None:
        """File the next event of a member: it needs a block, or decodes for the last time."""
        room = len(request.blocks) * self._block_size - request.base_computed
        self._file(request, min(request.joined_epoch + room + 1, request.last_epoch))

    def _file(self, request: ScheduledRequest, epoch: int) -> None:
        request.event_epoch = epoch
        requests = self._events.get(epoch)
        if requests is None:
            self._events[epoch] = [request]
        else:
            requests.append(request)

    @property
    def event_epochs(self) -> Container[int]:
        """Epochs with a filed event."""
        return self._events

    def take_events(self, epoch: int) -> list[ScheduledRequest]:
        """Remove and return the members with an event in this epoch."""
        requests = self._events.pop(epoch, None)
        if requests is None:
            return []
        due: list[ScheduledRequest] = []
        for request in requests:
            if request.batch is not None and request.event_epoch == epoch:
                request.event_epoch = 0  # a member that left and joined again may be filed twice
                due.append(request)
        return due

    def give_blocks(self, epoch: int, kv: BlockPool, spare: int) -> list[tuple[int, int]] | None:
        """Allocate the blocks that members need for an epoch.

        Args:
            epoch: a future epoch under which members are filed.
            kv: the pool of KV blocks.
            spare: number of blocks that must stay free.

        Returns:
            The allocated (rid, block) pairs. None if there may be too few blocks, or if a member
            decodes for the last time; nothing is changed then.
        """
        requests = self._events[epoch]
        if len(requests) > kv.free_blocks - spare:
            return None
        for request in requests:
            if request.last_epoch == epoch and request.event_epoch == epoch:
                return None
        del self._events[epoch]
        next_epoch = epoch + self._block_size
        new_blocks: list[tuple[int, int]] = []
        for request in requests:
            if request.event_epoch == epoch and request.batch is not None:
                block = kv.allocate_one()
                assert block is not None
                request.blocks.append(block)
                new_blocks.append((request.rid, block))
                self._file(request, min(next_epoch, request.last_epoch))
        return new_blocks

    def needs_block(self, request: ScheduledRequest) -> bool:
        """Return True if the blocks of a member have no room for its next token."""
        return request.computed_tokens == len(request.blocks) * self._block_size

    def max_blocks_needed(self, epochs: int) -> int:
        """Return an upper bound of the number of blocks that members need in the next epochs."""
        return len(self.members) * (-(-epochs // self._block_size))

    def members_needing_blocks(self, epochs: int) -> list[ScheduledRequest]:
        """Return the members that need a block in the next epochs, earliest first."""
        due: list[ScheduledRequest] = []
        for epoch in range(self.epoch + 1, self.epoch + epochs + 1):
            due += [
                r
                for r in self._events.get(epoch, ())
                if r.batch is not None
                and r.event_epoch == epoch
                and r.computed_tokens + epoch - self.epoch > len(r.blocks) * self._block_size
            ]
        return due

    def check_integrity(self) -> None:
        """Raise AssertionError unless the sums over all members match the counters."""
        assert self.total_context == sum(r.computed_tokens for r in self.members.values())
        epochs = [r.joined_epoch for r in self.members.values()]
        assert epochs == sorted(epochs), "members are out of order"
        tpots_ns = [r.targets.pace_ns for r in self.members.values()]
        assert self._tpots_ns == Counter(t for t in tpots_ns if t is not None)
        for request in self.members.values():
            assert request.state is RequestState.DECODING
            assert request.total_tokens == request.computed_tokens + 1
            assert any(r is request for r in self._events[request.event_epoch])


def schedule_decodes(
    step: StepBuilder, table: RequestTable, phase: Phase, evictor: Evictor
) -> None:
    """Schedule every decode that the phase, the budget and the blocks allow.

    Args:
        step: the plan under construction.
        table: requests and memory of the scheduler.
        phase: kinds of work of the step; requests that fail its filter are held back.
        evictor: evicts requests if blocks run out. Its eviction keys also determine the requests
            that are held back if the budget is too small: those with the largest keys.
    """
    batch, only = table.batch, phase.only
    if table.host.free_blocks:
        evictor.offload_ahead()
    if only is not None:
        for request in [r for r in batch.members.values() if not only(r)]:
            table.hold_back(request)
    excess = len(batch.members) - step.left
    if excess > 0:
        for request in heapq.nlargest(excess, batch.members.values(), key=evictor.key):
            table.hold_back(request)
    elif table.ready and excess < 0:
        ready = [r for r in table.ready.values() if only is None or only(r)]
        if len(ready) > min(-excess, table.kv.free_blocks):
            ready = heapq.nsmallest(-excess, ready, key=evictor.key)
        _join_ready(ready, step, table, evictor)
    _extend_members(step, table, evictor)
    step.decodes = len(batch.members)
    step.left -= step.decodes


def _join_ready(
    ready: Iterable[ScheduledRequest], step: StepBuilder, table: RequestTable, evictor: Evictor
) -> None:
    """Add ready requests to the decode batch, each with room for its next token."""
    block_size = table.kv.block_size
    for request in ready:
        if request.state is not RequestState.READY:
            continue  # evicted for an earlier request
        full = request.base_computed == len(request.blocks) * block_size
        if full and not _claim_block(request, step, table, evictor):
            continue
        del table.ready[request.rid]
        table.batch.join(request)


def _extend_members(step: StepBuilder, table: RequestTable, evictor: Evictor) -> None:
    """Add a block to each member that needs one for its next token, or hold the member back."""
    batch = table.batch
    epoch = batch.epoch + 1
    due = batch.take_events(epoch)
    if len(due) > table.kv.free_blocks:
        due.sort(key=evictor.key)
    for request in due:
        if request.batch is None:
            continue  # evicted for an earlier request
        if batch.needs_block(request) and not _claim_block(request, step, table, evictor):
            if request.batch is not None:
                table.hold_back(request)
            continue
        if request.last_epoch == epoch:
            step.last.append(request)
        else:
            batch.file(request)


def _claim_block(
    request: ScheduledRequest, step: StepBuilder, table: RequestTable, evictor: Evictor
) -> bool:
    """Append a block to a running request, evicting others if none is free."""
    block = table.kv.allocate_one()
    if block is None:
        block = evictor.claim_block(request, step)
        if block is None:
            return False
    request.blocks.append(block)
    step.new_blocks.append((request.rid, block))
    return True

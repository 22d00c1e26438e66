"""Where every request stands, and the moves from one place to another.

Planning and committing are the two callers. What they share, and what must never go wrong,
is here: each request has one owner, tokens in flight are given out or discarded exactly once,
and blocks are let go when the last plan that uses them commits.
"""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import TYPE_CHECKING

from goodput_engine.scheduler.cohort import DecodeCohort
from goodput_engine.scheduler.request import RequestState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_engine.kv.blocks import BlockPool
    from goodput_engine.kv.host import HostPool
    from goodput_engine.scheduler.draft import InFlight
    from goodput_engine.scheduler.queue import WaitingQueue
    from goodput_engine.scheduler.request import ScheduledRequest

__all__ = ["Floor"]


class Floor:
    """All requests of one scheduler.

    Args:
        kv: the pool of blocks.
        host: the pool of their copies in host memory.
        waiting: an empty queue.

    Attributes:
        requests: everyone who waits, runs, or holds blocks until a step commits.
        prefilling: admitted, and more than one step from the next token, in order of admission.
        ready: one token behind and not in the cohort: new to it, or held back.
        cohort: who decodes.
        arriving: taken over from elsewhere, their blocks being filled.
        leaving: evicted, their blocks being copied to host memory, in order of eviction.
        returning: admitted, their blocks being copied back, in order of admission.
        in_flight: plans under way, oldest first; their numbers are consecutive.
        settled: the last plan took in nobody and left nobody out, and nothing has happened since
            that it did not know. Whoever changes what a plan depends on, other than by
            committing a step, must set it to False.
        waiting_blocks: blocks that all who wait would need for what they have so far.
    """

    __slots__ = (
        "arriving",
        "cohort",
        "host",
        "in_flight",
        "kv",
        "leaving",
        "prefilling",
        "ready",
        "requests",
        "returning",
        "settled",
        "waiting",
        "waiting_blocks",
    )

    def __init__(self, kv: BlockPool, host: HostPool, waiting: WaitingQueue) -> None:
        self.kv = kv
        self.host = host
        self.waiting = waiting
        self.requests: dict[int, ScheduledRequest] = {}
        self.prefilling: dict[int, ScheduledRequest] = {}
        self.ready: dict[int, ScheduledRequest] = {}
        self.arriving: dict[int, ScheduledRequest] = {}
        self.leaving: dict[int, ScheduledRequest] = {}
        self.returning: dict[int, ScheduledRequest] = {}
        self.cohort = DecodeCohort(kv.block_size)
        self.in_flight: deque[InFlight] = deque()
        self.waiting_blocks = 0
        self.settled = False

    @property
    def num_running(self) -> int:
        """Admitted requests whose last token is not in flight."""
        coming = len(self.returning) + len(self.arriving)
        return len(self.cohort.members) + len(self.ready) + len(self.prefilling) + coming

    def running(self) -> Iterator[ScheduledRequest]:
        """Every running request, but those whose blocks are still being copied back."""
        return chain(self.cohort.members.values(), self.ready.values(), self.prefilling.values())

    def record_of(self, plan_id: int) -> InFlight | None:
        """The record of a plan, or None when it has committed."""
        if not self.in_flight:
            return None
        position = plan_id - self.in_flight[0].plan.plan_id
        return self.in_flight[position] if position >= 0 else None

    # --- the queue -------------------------------------------------------------------------
    def enter(self, request: ScheduledRequest) -> None:
        """A new request waits."""
        self.settled = False
        self.requests[request.rid] = request
        self.waiting_blocks += self.kv.blocks_for(request.total_tokens)
        self.waiting.push(request)

    def leave_queue(self, request: ScheduledRequest) -> None:
        """Admitted or cancelled: it waits no more."""
        self.settled = False
        self.waiting.remove(request)
        self.waiting_blocks -= self.kv.blocks_for(request.total_tokens)

    def vacate(self, request: ScheduledRequest) -> None:
        """No plan uses an evicted request's blocks any more: it gives them up, or copies them."""
        if request.host_blocks:
            request.state = RequestState.LEAVING
            self.leaving[request.rid] = request
        else:
            request.base_planned = 0
            self._requeue(request)

    def bring_back(self, request: ScheduledRequest, *, found: int) -> None:
        """A request with a copy was admitted: its blocks return, but those that were found."""
        request.state = RequestState.RETURNING
        request.copied_blocks = found
        self.returning[request.rid] = request

    def copied(self, request: ScheduledRequest) -> None:
        """The last of its blocks is where it was to go."""
        request.copied_blocks = 0
        if request.state is RequestState.LEAVING:
            del self.leaving[request.rid]
            self._requeue(request)
            return
        del self.returning[request.rid]
        self.host.release(request.host_blocks)
        request.host_blocks = []
        self.publish(request, min(request.base_planned, request.input_tokens))
        if request.base_planned + 1 == request.total_tokens and request.base_sampled:
            self.get_ready(request)
        else:
            request.state = RequestState.PREFILLING
            self.prefilling[request.rid] = request

    def _requeue(self, request: ScheduledRequest) -> None:
        self.kv.release(request.blocks)
        request.blocks = []
        request.published_blocks = 0
        request.state = RequestState.WAITING
        self.waiting_blocks += self.kv.blocks_for(request.total_tokens)
        self.waiting.push_back(request)

    @property
    def blocks_to_copy(self) -> int:
        """Blocks on their way to or from host memory that no plan has taken along."""
        return sum(
            len(r.host_blocks) - r.copied_blocks
            for r in chain(self.leaving.values(), self.returning.values())
        )

    @property
    def blocks_owed(self) -> int:
        """Blocks that running requests need to go on at all: they come before who is new.

        Somebody may have been evicted for one of them, whose blocks were free only later.
        """
        size = self.kv.block_size
        return sum(r.base_planned == len(r.blocks) * size for r in self.ready.values())

    def promised_blocks(self) -> int:
        """Blocks that are in use and will be free without anybody else being evicted."""
        kv = self.kv
        going = chain(self.leaving.values(), *(record.releases for record in self.in_flight))
        return sum(kv.exclusive(r.blocks) for r in going if not r.keeps_blocks)

    # --- running ---------------------------------------------------------------------------
    def get_ready(self, request: ScheduledRequest) -> None:
        """It is one token behind, and belongs to nobody else."""
        request.state = RequestState.READY
        self.ready[request.rid] = request

    def leave_cohort(self, request: ScheduledRequest) -> None:
        """Leave, and be given the tokens that are in flight one by one."""
        joined = request.joined_epoch
        self.cohort.leave(request)
        for record in self.in_flight:
            if record.plan.decode_epoch > joined:
                record.leavers.append(request)

    def withdraw(self, request: ScheduledRequest, *, keep_tokens: bool = False) -> None:
        """Take a running request out of what runs; tokens in flight are kept or discarded."""
        self.settled = False
        state = request.state
        if state is RequestState.DECODING:
            if keep_tokens:
                self.leave_cohort(request)
            else:
                self.cohort.leave(request)
        elif state is RequestState.READY:
            del self.ready[request.rid]
        elif state is RequestState.LEAVING:
            del self.leaving[request.rid]
        elif state is RequestState.RETURNING:
            del self.returning[request.rid]
        elif state is RequestState.ARRIVING:
            del self.arriving[request.rid]
        elif state is not RequestState.KEPT:
            assert state is RequestState.PREFILLING, state
            del self.prefilling[request.rid]

    def publish(self, request: ScheduledRequest, computed: int) -> None:
        """Full blocks that a committed step computed may be found by others."""
        full = min(computed // self.kv.block_size, len(request.block_hashes))
        known = request.published_blocks
        if full > known:
            self.kv.publish(request.blocks[known:full], request.block_hashes[known:full])
            request.published_blocks = full

    # --- the end ---------------------------------------------------------------------------
    def let_go(self, request: ScheduledRequest) -> bool:
        """Free a request that is over, now or when the last plan that uses it commits."""
        record = self.record_of(request.last_plan)
        if record is None:
            self.free(request)
            return True
        record.releases.append(request)
        return False

    def free(self, request: ScheduledRequest) -> None:
        """It is gone for good."""
        self.kv.release(request.blocks)
        self.host.release(request.host_blocks)
        request.blocks = []
        request.host_blocks = []
        del self.requests[request.rid]

    def check_integrity(self) -> None:
        """Raise AssertionError unless every invariant holds."""
        kv, live = self.kv, list(self.requests.values())
        kv.check_integrity(r.blocks for r in live)
        self.host.check_integrity(r.host_blocks for r in live)
        self.cohort.check_integrity()
        for request in live:
            if request.state is RequestState.WAITING:
                assert not request.blocks
                assert request.base_sampled == request.base_emitted
                continue
            assert request.computed_tokens <= len(request.blocks) * kv.block_size
            assert request.output_tokens <= request.sampled_tokens <= request.output_limit
            for position in range(request.computed_tokens // kv.block_size, len(request.blocks)):
                assert kv.writable(request.blocks[position]), "a writable block is shared"
        assert self.waiting_blocks == sum(kv.blocks_for(r.total_tokens) for r in self.waiting)
        if not live:
            assert kv.free_blocks == kv.total_blocks, "idle, but not all blocks are free"
            assert self.host.free_blocks == self.host.total_blocks, "a copy is left"
            assert not self.num_running

"""Requests of one scheduler, their states, and the transitions between them.

Both `Scheduler.plan` and `Scheduler.commit` change states. This module keeps the invariants: each
request has one state, tokens in flight are emitted or discarded exactly once, and blocks are
released when the last plan that uses them commits.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain
from typing import TYPE_CHECKING, Final

from goodput_core.slo.targets import Targets
from goodput_engine.scheduler.plan import InFlight, Progress

if TYPE_CHECKING:
    from goodput_engine.kv.blocks import BlockPool, HostPool
    from goodput_engine.scheduler.decode_batch import DecodeBatch  # noqa: TC004 - a cycle
    from goodput_engine.scheduler.policy import WaitingQueue

__all__ = [
    "FcfsQueue",
    "RequestState",
    "RequestTable",
    "ScheduledRequest",
]


class RequestState(Enum):
    """The state of a request in the scheduler."""

    WAITING = auto()
    """In the queue; it has no KV blocks, but may have a copy in host memory."""
    PREFILLING = auto()
    """Admitted; its prompt, or the tokens to recompute, are not completely scheduled."""
    READY = auto()
    """All its tokens but the newest are computed; not in the decode batch yet."""
    DECODING = auto()
    """A member of the decode batch, which decodes one token of each member in a step."""
    FINISHING = auto()
    """Its last token is in flight."""
    PREEMPTING = auto()
    """Evicted; releases its blocks when the last step that uses them commits."""
    SWAPPING_OUT = auto()
    """Evicted; its blocks are being copied to host memory."""
    SWAPPING_IN = auto()
    """Admitted; its blocks are being copied back from host memory."""
    RECEIVING = auto()
    """In transfer from another replica; its blocks are being filled."""
    DETACHING = auto()
    """In transfer to another replica; HELD after the last step that uses its blocks."""
    HELD = auto()
    """No longer scheduled here; holds its blocks until another replica has copied them."""
    FINISHED = auto()
    CANCELLED = auto()


_ENDED: Final = (RequestState.FINISHED, RequestState.CANCELLED)
_RELEASED_LATER: Final = (RequestState.FINISHING, RequestState.PREEMPTING, RequestState.DETACHING)
"""States of requests that are in the releases of a plan in flight."""


@dataclass(slots=True, kw_only=True, eq=False)
class ScheduledRequest:
    """One request and its mutable state in the scheduler.

    The properties are valid in every state. The `base_` counters do not include the tokens that a
    member of the decode batch gained since it joined. That number equals the epochs since then. An
    *epoch* is a step in which the batch decodes.

    Args:
        rid: identifier, never reused within a process.
        arrival_ns: time of arrival.
        input_tokens: tokens of its prompt.
        max_output_tokens: limit of output tokens set by the client; None for the model's limit.
        block_hashes: chained hashes of the full blocks of the prompt; other blocks have none.
        slo_class: name of its class.
        targets: its SLO targets; the first token is due at `arrival_ns + targets.ttft_ns`.
        priority: larger is more urgent.
        weight: value of serving it in time, relative to others of its priority; at least 1.
        holds_blocks: True if it keeps its blocks after its end, until `KVTransfer.release`.
    """

    rid: int
    arrival_ns: int
    input_tokens: int
    max_output_tokens: int | None = None
    block_hashes: Sequence[int] = ()
    slo_class: str = ""
    targets: Targets = field(default_factory=Targets)
    priority: int = 0
    weight: int = 1
    holds_blocks: bool = False

    # --- set by the scheduler ----------------------------------------------------------------
    state: RequestState = RequestState.WAITING
    output_limit: int = 0
    """Maximum number of output tokens: the client's limit, or else that of the model and pool."""
    blocks: list[int] = field(default_factory=list)
    published_blocks: int = 0
    """Number of its leading blocks that are in the prefix cache."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at its first admission; before, the expected ones."""
    shared_tokens: int = 0
    """Those in blocks that other requests held at its last admission; before, the expected ones."""
    awaited_tokens: int = 0
    """Before its start: prompt tokens that others compute first, so that it will find them."""
    first_scheduled_ns: int = 0
    preemptions: int = 0
    last_plan: int = 0
    """Number of the last plan that uses its blocks; not updated while it is in the batch."""
    host_blocks: list[int] = field(default_factory=list)
    """Blocks of its copy in host memory, or reserved for that copy."""
    copied_blocks: int = 0
    """During a copy: number of copied blocks, those in flight included."""
    admitted_ns: int = 0
    """Time of its last admission."""
    ran_ns: int = 0
    """Total time that it ran before its last eviction."""
    admitted_tokens: int = 0
    """Its total tokens at its last admission."""
    chance: float | None = None
    """Predicted chance to meet its end-to-end target; None if its policy predicts none."""
    counted_late: bool = False
    """True if its policy has counted it as a missed promise before its end."""
    gained_nothing: bool = False
    """True if it gained no token between its last two evictions."""
    first_token_ns: int = 0
    """Commit time of the step that gave its first token; 0 before."""
    batch: DecodeBatch | None = None
    """The decode batch while it is a member, else None."""
    joined_epoch: int = 0
    """As a member: the latest epoch before it joined."""
    event_epoch: int = 0
    """As a member: the next epoch in which it needs a block or decodes for the last time."""
    last_epoch: int = 0
    """As a member: the epoch of its last decode, at its output limit."""
    base_computed: int = 0
    """`computed_tokens` without epochs since it joined."""
    base_sampled: int = 0
    """`sampled_tokens` without epochs since it joined."""
    base_emitted: int = 0
    """`output_tokens` without epochs since it joined."""

    @property
    def computed_tokens(self) -> int:
        """Tokens whose keys and values are computed, those in flight included."""
        if self.batch is None:
            return self.base_computed
        return self.base_computed + self.batch.epoch - self.joined_epoch

    @property
    def sampled_tokens(self) -> int:
        """Output tokens, those in flight included."""
        if self.batch is None:
            return self.base_sampled
        return self.base_sampled + self.batch.epoch - self.joined_epoch

    @property
    def output_tokens(self) -> int:
        """Output tokens of committed steps."""
        if self.batch is None:
            return self.base_emitted
        return self.base_emitted + max(0, self.batch.committed_epoch - self.joined_epoch)

    @property
    def total_tokens(self) -> int:
        """Prompt and output tokens, those in flight included."""
        return self.input_tokens + self.sampled_tokens

    @property
    def expected_hits(self) -> int:
        """Before its start: prompt tokens that it will find in the prefix cache."""
        return self.cached_tokens + self.awaited_tokens

    @property
    def own_tokens(self) -> int:
        """Total tokens without those in blocks that it takes from other requests."""
        return self.total_tokens - self.shared_tokens - self.awaited_tokens

    @property
    def displaceable(self) -> bool:
        """True if it may be evicted for a waiting request; a late one may be, even if stuck."""
        return self.counted_late or not self.is_stuck

    @property
    def is_stuck(self) -> bool:
        """True if it must gain a token first, so that no two evict each other without progress."""
        return self.gained_nothing and self.total_tokens == self.admitted_tokens


class FcfsQueue:
    """The default queue: first come, first served, in constant time per operation."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, ScheduledRequest] = OrderedDict()

    def push(self, request: ScheduledRequest) -> None:
        """Add a new request at the tail."""
        self._waiting[request.rid] = request

    def requeue(self, request: ScheduledRequest) -> None:
        """Add a preempted request at the head."""
        self._waiting[request.rid] = request
        self._waiting.move_to_end(request.rid, last=False)

    def peek(self, now_ns: int) -> ScheduledRequest | None:  # noqa: ARG002 - time is irrelevant
        """Return the head."""
        return next(iter(self._waiting.values()), None)

    def remove(self, request: ScheduledRequest) -> None:
        """Remove an admitted or cancelled request."""
        del self._waiting[request.rid]

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return iter(self._waiting.values())


class RequestTable:
    """All requests of one scheduler.

    Args:
        kv: the pool of KV blocks on the device.
        host: the pool of blocks in host memory.
        waiting: an empty queue.
        batch: an empty decode batch.

    Attributes:
        requests: all requests, including ended ones with blocks that a plan in flight uses.
        prefilling: requests in the state PREFILLING, in order of admission.
        ready: requests in the state READY.
        receiving: requests in the state RECEIVING.
        swapping_out: requests in the state SWAPPING_OUT, in order of eviction.
        swapping_in: requests in the state SWAPPING_IN, in order of admission.
        in_flight: plans in flight, oldest first, with consecutive ids.
        settled: True if the last plan neither admitted nor starved a request, and nothing has
            changed since. Any change that affects plans, except a commit, must set it to False.
        waiting_blocks: number of blocks that all waiting requests need for their current tokens.
    """

    __slots__ = (
        "batch",
        "host",
        "in_flight",
        "kv",
        "prefilling",
        "ready",
        "receiving",
        "requests",
        "settled",
        "swapping_in",
        "swapping_out",
        "waiting",
        "waiting_blocks",
    )

    def __init__(
        self, kv: BlockPool, host: HostPool, waiting: WaitingQueue, batch: DecodeBatch
    ) -> None:
        self.kv = kv
        self.host = host
        self.waiting = waiting
        self.batch = batch
        self.requests: dict[int, ScheduledRequest] = {}
        self.prefilling: dict[int, ScheduledRequest] = {}
        self.ready: dict[int, ScheduledRequest] = {}
        self.receiving: dict[int, ScheduledRequest] = {}
        self.swapping_out: dict[int, ScheduledRequest] = {}
        self.swapping_in: dict[int, ScheduledRequest] = {}
        self.in_flight: deque[InFlight] = deque()
        self.waiting_blocks = 0
        self.settled = False

    @property
    def num_running(self) -> int:
        """Number of admitted requests whose last token is not in flight."""
        copied_in = len(self.swapping_in) + len(self.receiving)
        return len(self.batch.members) + len(self.ready) + len(self.prefilling) + copied_in

    def running(self) -> Iterator[ScheduledRequest]:
        """Iterate over the running requests whose blocks are on the device."""
        return chain(self.batch.members.values(), self.ready.values(), self.prefilling.values())

    def record_of(self, plan_id: int) -> InFlight | None:
        """Return the record of a plan, or None if it has committed."""
        if not self.in_flight:
            return None
        position = plan_id - self.in_flight[0].plan.plan_id
        return self.in_flight[position] if position >= 0 else None

    # --- queue -------------------------------------------------------------------------------
    def enqueue(self, request: ScheduledRequest) -> None:
        """Add a new request to the queue."""
        self.settled = False
        self.requests[request.rid] = request
        self.waiting_blocks += self.kv.blocks_for(request.total_tokens)
        self.waiting.push(request)

    def dequeue(self, request: ScheduledRequest) -> None:
        """Remove an admitted or cancelled request from the queue."""
        self.settled = False
        self.waiting.remove(request)
        self.waiting_blocks -= self.kv.blocks_for(request.total_tokens)

    def requeue(self, request: ScheduledRequest) -> None:
        """Release the blocks of an evicted request and put it back into the queue."""
        self.kv.release(request.blocks)
        request.blocks = []
        request.published_blocks = 0
        request.state = RequestState.WAITING
        self.waiting_blocks += self.kv.blocks_for(request.total_tokens)
        self.waiting.requeue(request)

    @property
    def blocks_owed(self) -> int:
        """Number of blocks that ready requests need for their next tokens.

        Admissions must leave them free. A request may have been evicted for these blocks, which
        became free only at a later commit; an admission must not take them first.
        """
        size = self.kv.block_size
        return sum(r.base_computed == len(r.blocks) * size for r in self.ready.values())

    def pending_blocks(self) -> int:
        """Return the number of used blocks that will become free without a further eviction."""
        kv = self.kv
        leaving = chain(self.swapping_out.values(), *(plan.releases for plan in self.in_flight))
        return sum(kv.exclusive(r.blocks) for r in leaving if not r.holds_blocks)

    # --- running -----------------------------------------------------------------------------
    def set_ready(self, request: ScheduledRequest) -> None:
        """Make a request ready to decode its next token."""
        request.state = RequestState.READY
        self.ready[request.rid] = request

    def leave_batch(self, request: ScheduledRequest) -> None:
        """Remove a member from the batch; its tokens in flight will be emitted."""
        joined = request.joined_epoch
        self.batch.leave(request)
        for record in self.in_flight:
            if record.plan.decode_epoch > joined:
                record.leavers.append(request)

    def hold_back(self, request: ScheduledRequest) -> None:
        """Exclude a member from the next step; it keeps its blocks and becomes READY."""
        self.leave_batch(request)
        self.set_ready(request)

    def withdraw(self, request: ScheduledRequest, *, keep_tokens: bool = False) -> None:
        """Remove a request from the collection of its state; the caller sets the new state.

        Args:
            request: a request that runs, is copied, or is transferred.
            keep_tokens: True to emit its tokens in flight, False to discard them.
        """
        self.settled = False
        state, rid = request.state, request.rid
        if state is RequestState.DECODING:
            if keep_tokens:
                self.leave_batch(request)
            else:
                self.batch.leave(request)
        elif state is RequestState.READY:
            del self.ready[rid]
        elif state is RequestState.SWAPPING_OUT:
            del self.swapping_out[rid]
        elif state is RequestState.SWAPPING_IN:
            del self.swapping_in[rid]
        elif state is RequestState.RECEIVING:
            del self.receiving[rid]
        elif state is not RequestState.HELD:
            assert state is RequestState.PREFILLING, state
            del self.prefilling[rid]

    def publish(self, request: ScheduledRequest, computed: int) -> None:
        """Put the full blocks of the first `computed` tokens into the prefix cache."""
        full = min(computed // self.kv.block_size, len(request.block_hashes))
        first = request.published_blocks
        if full > first:
            self.kv.publish(request.blocks[first:full], request.block_hashes[first:full])
            request.published_blocks = full

    # --- end ---------------------------------------------------------------------------------
    def emit(
        self,
        request: ScheduledRequest,
        reason: str | None,
        now_ns: int,
        progress: list[Progress],
        released: list[int],
    ) -> None:
        """Emit one token of a request outside the decode batch; discard it if the request ended.

        Args:
            request: a request that sampled in the committed step.
            reason: finish reason if the executor ended the request with this token, else None.
            now_ns: time of the commit.
            progress: list to which the token is added.
            released: list to which the rid is added if the request is removed.
        """
        if request.state in _ENDED:
            return
        request.base_emitted += 1
        if request.base_emitted == 1:
            request.first_token_ns = now_ns
        if reason is None and request.output_tokens >= request.output_limit:
            reason = "length"
        if reason is not None:
            self.finish(request, released)
        progress.append(Progress(request=request, finish_reason=reason))

    def finish(self, request: ScheduledRequest, released: list[int]) -> None:
        """End a request after its last token."""
        if request.state is RequestState.DETACHING:
            request.holds_blocks = False
        if request.state not in _RELEASED_LATER:
            self.withdraw(request)
            if self.free_when_unused(request):
                released.append(request.rid)
        request.state = RequestState.FINISHED

    def cancel(self, request: ScheduledRequest) -> bool:
        """Cancel a request; return True if it is removed now."""
        if request.state in _ENDED:
            return False
        removed = False
        if request.state is RequestState.WAITING:
            self.dequeue(request)
            self.free(request)
            removed = True
        elif request.state not in _RELEASED_LATER:
            self.withdraw(request)
            removed = self.free_when_unused(request)
        request.state = RequestState.CANCELLED
        return removed

    def free_when_unused(self, request: ScheduledRequest) -> bool:
        """Free an ended request now, or when the last plan that uses its blocks commits.

        Returns:
            True if it is freed now.
        """
        record = self.record_of(request.last_plan)
        if record is None:
            self.free(request)
            return True
        record.releases.append(request)
        return False

    def free(self, request: ScheduledRequest) -> None:
        """Remove a request and free its blocks on the device and in host memory."""
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
        self.batch.check_integrity()
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

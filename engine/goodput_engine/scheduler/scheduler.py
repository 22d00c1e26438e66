"""The one scheduler: every policy runs on it, in real and in virtual time.

One notion only: a request's computed tokens catch up with its total. `plan` decides the next
step, `commit` takes in what a step gave; between them up to `depth` further plans may wait, so
that a device never waits for the host. Tokens in flight count as computed. What follows:

- a request that stops by itself may still be in later plans: their surplus is discarded;
- blocks are let go when the last plan that uses them commits, never earlier;
- a cancellation frees what it holds within depth + 1 commits.

Cost: members of the cohort (see `cohort`) are not visited, so a step in which everybody just
decodes costs the same for ten requests as for a thousand, but for the list of who advanced.
"""

from __future__ import annotations

import heapq
from collections import deque
from itertools import chain
from typing import TYPE_CHECKING

from goodput_core.errors import InternalError
from goodput_core.spec.llmservice import Preemption
from goodput_core.steptime import StepShape
from goodput_engine.scheduler.cohort import DecodeCohort
from goodput_engine.scheduler.door import Door
from goodput_engine.scheduler.draft import Draft, InFlight
from goodput_engine.scheduler.plan import Admitted, Progress, StepOutcome, StepPlan
from goodput_engine.scheduler.request import RequestState
from goodput_engine.scheduler.stats import SchedulerStats

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_engine.kv.blocks import BlockPool
    from goodput_engine.scheduler.door import Refusal
    from goodput_engine.scheduler.plan import StepResult
    from goodput_engine.scheduler.policy import SchedulerLimits, SchedulingPolicy
    from goodput_engine.scheduler.queue import WaitingQueue
    from goodput_engine.scheduler.request import ScheduledRequest

__all__ = ["Scheduler"]

_WAITING = RequestState.WAITING
_PREFILLING = RequestState.PREFILLING
_READY = RequestState.READY
_DECODING = RequestState.DECODING
_FINISHING = RequestState.FINISHING
_PREEMPTING = RequestState.PREEMPTING
_FINISHED = RequestState.FINISHED
_CANCELLED = RequestState.CANCELLED


class Scheduler:
    """Requests in, plans out.

    Args:
        policy: its preferences; belongs to this scheduler from now on.
        kv: the pool of blocks; belongs to this scheduler from now on.
        limits: the bounds to start with.
        max_model_tokens: prompt and answer together.
        depth: plans that may wait uncommitted beside the one that runs, 0 to 2.
    """

    def __init__(
        self,
        *,
        policy: SchedulingPolicy,
        kv: BlockPool,
        limits: SchedulerLimits,
        max_model_tokens: int,
        depth: int = 0,
    ) -> None:
        assert 0 <= depth <= 2, depth
        self.now_ns = 0
        self.limits = limits
        self.depth = depth
        self.stats = SchedulerStats()
        self.waiting: WaitingQueue = policy.new_queue()
        self._policy = policy
        self._kv = kv
        self._door = Door(
            max_total_tokens=min(max_model_tokens, kv.total_blocks * kv.block_size + 1)
        )
        self._requests: dict[int, ScheduledRequest] = {}
        self._prefilling: dict[int, ScheduledRequest] = {}
        self._ready: dict[int, ScheduledRequest] = {}
        self._cohort = DecodeCohort(kv.block_size)
        self._in_flight: deque[InFlight] = deque()
        self._next_plan_id = 1
        self._waiting_blocks = 0
        # The head of the queue and the pool's generation when it last found too few blocks.
        self._blocked: tuple[int, int] | None = None

    # --- what policies and the engine core may look at -------------------------------------
    @property
    def num_running(self) -> int:
        """Admitted requests whose last token is not in flight."""
        return len(self._cohort.members) + len(self._ready) + len(self._prefilling)

    @property
    def num_decoding(self) -> int:
        """Members of the cohort."""
        return len(self._cohort.members)

    @property
    def num_requests(self) -> int:
        """Requests that wait, run, or hold blocks until a step commits."""
        return len(self._requests)

    @property
    def num_in_flight(self) -> int:
        """Plans that have not been committed."""
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Whether any request is not gone for good."""
        return bool(self._requests)

    @property
    def free_blocks(self) -> int:
        """KV blocks that can be handed out at once."""
        return self._kv.free_blocks

    @property
    def cached_blocks(self) -> int:
        """Free KV blocks that hold a reusable prefix."""
        return self._kv.cached_blocks

    @property
    def total_blocks(self) -> int:
        """KV blocks there are."""
        return self._kv.total_blocks

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""
        return self._kv.block_size

    @property
    def max_total_tokens(self) -> int:
        """The longest prompt and answer together that may be asked for."""
        return self._door.max_total_tokens

    def running(self) -> Iterator[ScheduledRequest]:
        """Every running request: decoding, ready to decode, prefilling."""
        return chain(self._cohort.members.values(), self._ready.values(), self._prefilling.values())

    # --- requests --------------------------------------------------------------------------
    def add(self, request: ScheduledRequest, now_ns: int) -> Refusal | None:
        """A new request waits from now on, unless it is refused."""
        assert request.rid not in self._requests, request.rid
        self.now_ns = now_ns
        needed = self._kv.blocks_for(request.input_tokens)
        slots = self.limits.max_num_seqs - self.num_running - len(self.waiting)
        blocks = self.free_blocks - self._waiting_blocks
        if self._requests:
            blocks -= self._policy.headroom_blocks(self)
        refusal = self._door.check(
            request,
            waiting=len(self.waiting),
            max_waiting=self.limits.max_waiting,
            starts_at_once=slots > 0 and needed <= blocks,
            now_ns=now_ns,
        )
        if refusal is not None:
            self.stats.shed += refusal.reason == "queue_full"
            return refusal
        request.output_limit = self._door.output_limit(request)
        self._requests[request.rid] = request
        self._waiting_blocks += needed
        self.waiting.push(request)
        return None

    def cancel(self, rid: int) -> bool:
        """Nobody wants this request any more; unknown and finished ones are no error.

        Returns:
            Whether it is gone at once; else a later outcome's `released` names it, or none does
            because it was gone before.
        """
        request = self._requests.get(rid)
        if request is None:
            return False
        state = request.state
        if state is _FINISHED or state is _CANCELLED:
            return False
        request.state = _CANCELLED
        if state is _WAITING:
            self._leave_queue(request)
            del self._requests[rid]
            return True
        if state is _FINISHING or state is _PREEMPTING:
            return False  # the commit that would have moved it on lets it go
        self._withdraw(request, state)
        return self._let_go(request)

    def set_limits(self, limits: SchedulerLimits) -> None:
        """New bounds, in force from the next plan on."""
        self.limits = limits

    # --- planning --------------------------------------------------------------------------
    def plan(self, now_ns: int) -> StepPlan | None:
        """Decide the next step; None: nothing to compute, or enough plans wait already."""
        if len(self._in_flight) > self.depth:
            return None
        self.now_ns = now_ns
        policy, cohort, limits = self._policy, self._cohort, self.limits
        phase = policy.phase(self)
        budget = min(policy.budget(self), limits.token_budget)
        draft = Draft(plan_id=self._next_plan_id, left=budget)
        decodes = 0
        if phase.decodes:
            self._prepare_decodes(draft, budget)
            decodes = len(cohort.members)
            draft.left -= decodes
        if phase.prefills and self._prefilling and draft.left > 0:
            self._continue_prefills(draft)
        if phase.admissions and draft.left > 0 and not draft.starved and len(self.waiting):
            self._admit(draft)
        if not decodes and not draft.chunks:
            return None
        return self._seal(draft, decodes)

    def _prepare_decodes(self, draft: Draft, budget: int) -> None:
        cohort, members = self._cohort, self._cohort.members
        excess = len(members) - budget
        if excess > 0:
            for request in heapq.nlargest(excess, members.values(), key=self._rank):
                self._hold(request)
        elif self._ready and excess < 0:
            self._join_ready(draft, -excess)
        due = cohort.take_due()
        if len(due) > self._kv.free_blocks:
            due.sort(key=self._rank)
        epoch = cohort.epoch + 1
        for request in due:
            if request.cohort is None:
                continue  # evicted for one before it
            if cohort.needs_block(request) and not self._claim_block(request, draft):
                if request.cohort is not None:
                    self._hold(request)
                continue
            if request.joined_epoch + request.output_limit - request.base_sampled == epoch:
                draft.last.append(request)
            else:
                cohort.file(request)

    def _join_ready(self, draft: Draft, room: int) -> None:
        ready = list(self._ready.values())
        if len(ready) > min(room, self._kv.free_blocks):
            ready = heapq.nsmallest(room, ready, key=self._rank)
        block_size = self._kv.block_size
        for request in ready:
            if request.state is not _READY:
                continue  # evicted for one before it
            full = request.base_planned == len(request.blocks) * block_size
            if full and not self._claim_block(request, draft):
                continue
            del self._ready[request.rid]
            self._cohort.join(request)

    def _hold(self, request: ScheduledRequest) -> None:
        """A member sits out with its blocks, first in line when there is room again."""
        self._leave_cohort(request)
        request.state = _READY
        self._ready[request.rid] = request

    def _claim_block(self, request: ScheduledRequest, draft: Draft) -> bool:
        """Append a block to a running request, evicting others for it if the policy says so."""
        kv = self._kv
        while (block := kv.allocate_one()) is None:
            draft.starved = True
            if draft.promised is None:
                draft.promised = sum(
                    kv.exclusive(r.blocks) for record in self._in_flight for r in record.releases
                )
            if draft.promised > 0:  # the next commit frees one
                draft.promised -= 1
                return False
            victim = self._policy.victim(request, self)
            if victim is None:
                return False
            draft.promised += self._evict(victim)
            if victim is request:
                return False
        request.blocks.append(block)
        draft.new_blocks.append((request.rid, block))
        return True

    def _evict(self, victim: ScheduledRequest) -> int:
        """Send a running request back to wait; returns the blocks that a commit will free."""
        mode = self._policy.evict_mode(victim, self)
        if mode is not Preemption.RECOMPUTE:
            raise InternalError(f"policy {self._policy.name} asks for {mode}, which is not built")
        self._withdraw(victim, victim.state, keep_tokens=True)
        victim.state = _PREEMPTING
        victim.preemptions += 1
        self.stats.preemptions += 1
        record = self._record_of(victim.last_plan)
        if record is None:
            self._requeue(victim)
            return 0
        record.releases.append(victim)
        return self._kv.exclusive(victim.blocks)

    def _continue_prefills(self, draft: Draft) -> None:
        for request in list(self._prefilling.values()):
            remaining = request.input_tokens + request.base_sampled - request.base_planned
            tokens = self._policy.chunk_tokens(request, remaining, draft.left, self)
            if tokens > 0:
                self._compute(request, min(tokens, remaining, draft.left), draft)
                if draft.left <= 0:
                    return

    def _admit(self, draft: Draft) -> None:
        policy, kv, queue = self._policy, self._kv, self.waiting
        while draft.left > 0 and self.num_running < self.limits.max_num_seqs:
            request = queue.peek(self.now_ns)
            if request is None or self._blocked == (request.rid, kv.generation):
                return
            if not policy.may_admit(request, self):
                return
            total = request.input_tokens + request.base_sampled
            # Its last token is always computed: that is what samples the next one.
            hits = kv.match(request.block_hashes, (total - 1) // kv.block_size)
            cached = len(hits) * kv.block_size
            tokens = policy.chunk_tokens(request, total - cached, draft.left, self)
            if tokens <= 0:
                return
            reserved = min(policy.reserve_tokens(request, self), self.max_total_tokens - 1)
            needed = kv.blocks_for(max(total, reserved)) - len(hits)
            headroom = policy.headroom_blocks(self) if self.num_running else 0
            if needed + kv.idle(hits) + headroom > kv.free_blocks:
                self._blocked = (request.rid, kv.generation)
                return
            self._leave_queue(request)
            kv.share(hits)
            request.blocks = hits + kv.allocate(needed)
            request.published_blocks = len(hits)
            request.base_planned = cached
            request.state = _PREFILLING
            self._prefilling[request.rid] = request
            if not request.preemptions:
                request.cached_tokens = cached
                request.first_scheduled_ns = self.now_ns
            self.stats.prefix_queried_tokens += total
            self.stats.prefix_hit_tokens += cached
            self._door.rate.admitted(self.now_ns)
            draft.admitted.append(
                Admitted(rid=request.rid, blocks=tuple(request.blocks), cached_tokens=cached)
            )
            self._compute(request, min(tokens, total - cached, draft.left), draft)

    def _compute(self, request: ScheduledRequest, tokens: int, draft: Draft) -> None:
        """Put a chunk of a prefilling request into the draft."""
        total = request.input_tokens + request.base_sampled
        samples = draft.add(request, tokens, total)
        if not samples:
            return
        del self._prefilling[request.rid]
        request.base_sampled += 1
        if request.base_sampled < request.output_limit:
            request.state = _READY
            self._ready[request.rid] = request
        else:
            request.state = _FINISHING
            draft.last.append(request)

    def _seal(self, draft: Draft, decodes: int) -> StepPlan:
        cohort, epoch, context, longest = self._cohort, 0, draft.context, draft.longest
        if decodes:
            cohort.advance(draft.plan_id)
            epoch = cohort.epoch
            context += cohort.total_context
            longest = longest or 1
        joined, left = cohort.take_changes()
        new_blocks = draft.new_blocks
        if draft.starved:  # who got a block may have been evicted for another one since
            new_blocks = [(rid, block) for rid, block in new_blocks if rid in cohort.members]
        plan = StepPlan(
            plan_id=draft.plan_id,
            at_ns=self.now_ns,
            left=left,
            admitted=tuple(draft.admitted),
            joined=joined,
            new_blocks=tuple(new_blocks),
            decode_epoch=epoch,
            num_decodes=decodes,
            chunks=tuple(draft.chunks),
            shape=StepShape(
                num_requests=decodes + len(draft.chunks),
                num_tokens=decodes + draft.tokens,
                context_tokens=context,
                max_chunk_tokens=longest,
            ),
        )
        record = InFlight(plan, draft.requests)
        self._in_flight.append(record)
        self._next_plan_id += 1
        for request in draft.last:
            if request.cohort is not None:
                self._leave_cohort(request)
                request.state = _FINISHING
            if request.state is _FINISHING:
                record.releases.append(request)
        return plan

    # --- committing ------------------------------------------------------------------------
    def commit(self, plan: StepPlan, result: StepResult, now_ns: int) -> StepOutcome:
        """Take in what the oldest plan in flight gave.

        Raises:
            InternalError: plans come back in another order than they were made.
        """
        record = self._in_flight.popleft()
        if record.plan is not plan or result.plan_id != plan.plan_id:
            raise InternalError(
                f"plan {record.plan.plan_id} is the oldest in flight, not {result.plan_id}"
            )
        self.now_ns = now_ns
        cohort, epoch, stopped = self._cohort, plan.decode_epoch, result.stopped
        if epoch:
            cohort.committed_epoch = epoch
        progress: list[Progress] = []
        released: list[int] = []
        for chunk, request in zip(plan.chunks, record.requests, strict=True):
            self._publish(request, chunk.start + chunk.num_tokens)
            if chunk.samples:
                self._gain(request, stopped.get(chunk.rid), progress, released)
        for request in record.leavers:
            self._gain(request, stopped.get(request.rid), progress, released)
        for rid, reason in stopped.items():
            member = cohort.members.get(rid)
            if member is not None and member.joined_epoch < epoch:
                self._finish(member, released)
                progress.append(Progress(request=member, finish_reason=reason))
        for request in record.releases:
            if request.state is _PREEMPTING:
                self._requeue(request)
            else:
                self._free(request)
                released.append(request.rid)
        outcome = StepOutcome(
            plan=plan,
            result=result,
            advanced=cohort.decoded_in(epoch) if epoch else [],
            progress=progress,
            released=released,
        )
        stats = self.stats
        stats.steps += 1
        stats.step_ns += result.step_ns
        stats.scheduled_tokens += plan.shape.num_tokens
        stats.output_tokens += len(outcome.advanced) + len(progress)
        self._policy.after_step(outcome, self)
        return outcome

    def _gain(
        self,
        request: ScheduledRequest,
        stopped: str | None,
        progress: list[Progress],
        released: list[int],
    ) -> None:
        """One more token for a request that is not, or was not, counted by the cohort."""
        if request.state is _FINISHED or request.state is _CANCELLED:
            return  # surplus
        request.base_emitted += 1
        if stopped is None and request.output_tokens >= request.output_limit:
            stopped = "length"
        if stopped is not None:
            self._finish(request, released)
        progress.append(Progress(request=request, finish_reason=stopped))

    def _finish(self, request: ScheduledRequest, released: list[int]) -> None:
        state = request.state
        request.state = _FINISHED
        if state is _FINISHING or state is _PREEMPTING:
            return  # some record's releases hold it already
        self._withdraw(request, state)
        if self._let_go(request):
            released.append(request.rid)

    def _publish(self, request: ScheduledRequest, computed: int) -> None:
        """Full blocks that a committed step computed may be found by others."""
        full = min(computed // self._kv.block_size, len(request.block_hashes))
        for position in range(request.published_blocks, full):
            self._kv.publish(request.blocks[position], request.block_hashes[position])
        request.published_blocks = max(full, request.published_blocks)

    # --- moving a request from one owner to another ----------------------------------------
    def _withdraw(
        self, request: ScheduledRequest, state: RequestState, *, keep_tokens: bool = False
    ) -> None:
        """Take a running request out of what runs; tokens in flight are kept or discarded."""
        if state is _DECODING:
            if keep_tokens:
                self._leave_cohort(request)
            else:
                self._cohort.leave(request)
        elif state is _READY:
            del self._ready[request.rid]
        else:
            assert state is _PREFILLING, state
            del self._prefilling[request.rid]

    def _leave_cohort(self, request: ScheduledRequest) -> None:
        """Leave, and be given the tokens that are in flight one by one."""
        joined = request.joined_epoch
        self._cohort.leave(request)
        for record in self._in_flight:
            if record.plan.decode_epoch > joined:
                record.leavers.append(request)

    def _leave_queue(self, request: ScheduledRequest) -> None:
        self.waiting.remove(request)
        self._waiting_blocks -= self._kv.blocks_for(request.total_tokens)

    def _requeue(self, request: ScheduledRequest) -> None:
        self._kv.release(request.blocks)
        request.blocks = []
        request.published_blocks = 0
        request.base_planned = 0
        request.state = _WAITING
        self._waiting_blocks += self._kv.blocks_for(request.total_tokens)
        self.waiting.push_back(request)

    def _let_go(self, request: ScheduledRequest) -> bool:
        """Free a request that is over, now or when the last plan that uses it commits."""
        record = self._record_of(request.last_plan)
        if record is None:
            self._free(request)
            return True
        record.releases.append(request)
        return False

    def _free(self, request: ScheduledRequest) -> None:
        self._kv.release(request.blocks)
        request.blocks = []
        del self._requests[request.rid]

    def _record_of(self, plan_id: int) -> InFlight | None:
        """The record of a plan, or None when it has committed."""
        if not self._in_flight:
            return None
        position = plan_id - self._in_flight[0].plan.plan_id
        return self._in_flight[position] if position >= 0 else None

    def _rank(self, request: ScheduledRequest) -> tuple[int, ...]:
        return self._policy.rank(request, self)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every invariant holds; for tests and when idle."""
        kv, live = self._kv, list(self._requests.values())
        kv.check_integrity(r.blocks for r in live)
        self._cohort.check_integrity()
        for request in live:
            if request.state is _WAITING:
                assert not request.blocks
                assert request.base_sampled == request.base_emitted
                continue
            assert request.computed_tokens <= len(request.blocks) * kv.block_size
            assert request.output_tokens <= request.sampled_tokens <= request.output_limit
            for position in range(request.computed_tokens // kv.block_size, len(request.blocks)):
                assert kv.writable(request.blocks[position]), "a writable block is shared"
        assert self._waiting_blocks == sum(kv.blocks_for(r.total_tokens) for r in self.waiting)
        if not live:
            assert kv.free_blocks == kv.total_blocks, "idle, but not all blocks are free"
            assert not self.num_running

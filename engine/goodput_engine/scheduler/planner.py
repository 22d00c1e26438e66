"""Deciding one step: who decodes, who is evicted for whom, what is left for prompts.

Decodes come first, then the prefills that run, then admissions; the policy's hooks say how much
of each. Everything is drafted in one pass and sealed into a `StepPlan`.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from goodput_core.errors import InternalError
from goodput_core.spec.llmservice import Preemption
from goodput_core.steptime import StepShape
from goodput_engine.scheduler.draft import Draft, InFlight
from goodput_engine.scheduler.plan import Admitted, StepPlan
from goodput_engine.scheduler.request import RequestState

if TYPE_CHECKING:
    from goodput_engine.scheduler.door import Door
    from goodput_engine.scheduler.floor import Floor
    from goodput_engine.scheduler.policy import SchedulerView, SchedulingPolicy
    from goodput_engine.scheduler.request import ScheduledRequest
    from goodput_engine.scheduler.stats import SchedulerStats

__all__ = ["Planner"]


class Planner:
    """Makes the plans of one scheduler.

    Args:
        policy: its preferences.
        floor: its requests.
        door: knows the longest request and is told of admissions.
        stats: its counters.
        view: what the policy may look at.
    """

    __slots__ = (
        "_blocked",
        "_door",
        "_floor",
        "_next_plan_id",
        "_policy",
        "_stats",
        "_view",
    )

    def __init__(
        self,
        *,
        policy: SchedulingPolicy,
        floor: Floor,
        door: Door,
        stats: SchedulerStats,
        view: SchedulerView,
    ) -> None:
        self._policy = policy
        self._floor = floor
        self._door = door
        self._stats = stats
        self._view = view
        self._next_plan_id = 1
        # Who stood at the head of the queue, and the pool's generation, when there were too few
        # blocks: a long prompt's hashes are not looked up again until something has changed.
        self._blocked: tuple[int, int] | None = None

    def plan(self) -> StepPlan | None:
        """Decide the next step; None: there is nothing to compute."""
        policy, floor, view = self._policy, self._floor, self._view
        phase = policy.phase(view)
        budget = min(policy.budget(view), view.limits.token_budget)
        draft = Draft(plan_id=self._next_plan_id, left=budget)
        decodes = 0
        if phase.decodes and not phase.prompts_alone:
            decodes = self._decode(draft)
        if phase.prefills and floor.prefilling and draft.left > 0:
            self._continue_prefills(draft)
        if phase.admissions and draft.left > 0 and not draft.starved and len(floor.waiting):
            self._admit(draft)
        if phase.decodes and phase.prompts_alone and not draft.chunks:
            decodes = self._decode(draft)
        if not decodes and not draft.chunks:
            return None
        return self._seal(draft, decodes)

    # --- decodes ---------------------------------------------------------------------------
    def _decode(self, draft: Draft) -> int:
        """Let everybody decode whom the budget and the blocks allow; returns how many do."""
        self._prepare_decodes(draft, draft.left)
        decodes = len(self._floor.cohort.members)
        draft.left -= decodes
        return decodes

    def _prepare_decodes(self, draft: Draft, budget: int) -> None:
        """Settle who is in the cohort, and give each member a slot for its next token."""
        floor, cohort = self._floor, self._floor.cohort
        excess = len(cohort.members) - budget
        if excess > 0:
            for request in heapq.nlargest(excess, cohort.members.values(), key=self._rank):
                self._hold(request)
        elif floor.ready and excess < 0:
            self._join_ready(draft, -excess)
        due = cohort.take_due()
        if len(due) > floor.kv.free_blocks:
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
        floor = self._floor
        ready = list(floor.ready.values())
        if len(ready) > min(room, floor.kv.free_blocks):
            ready = heapq.nsmallest(room, ready, key=self._rank)
        block_size = floor.kv.block_size
        for request in ready:
            if request.state is not RequestState.READY:
                continue  # evicted for one before it
            full = request.base_planned == len(request.blocks) * block_size
            if full and not self._claim_block(request, draft):
                continue
            del floor.ready[request.rid]
            floor.cohort.join(request)

    def _hold(self, request: ScheduledRequest) -> None:
        """A member sits out with its blocks until there is room again."""
        self._floor.leave_cohort(request)
        self._floor.get_ready(request)

    def _claim_block(self, request: ScheduledRequest, draft: Draft) -> bool:
        """Append a block to a running request, evicting others for it if the policy says so."""
        floor, kv = self._floor, self._floor.kv
        while (block := kv.allocate_one()) is None:
            draft.starved = True
            if draft.promised is None:
                draft.promised = sum(
                    kv.exclusive(r.blocks) for record in floor.in_flight for r in record.releases
                )
            if draft.promised > 0:  # a commit to come frees one
                draft.promised -= 1
                return False
            victim = self._policy.victim(request, self._view)
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
        mode = self._policy.evict_mode(victim, self._view)
        if mode is not Preemption.RECOMPUTE:
            raise InternalError(f"policy {self._policy.name} asks for {mode}, which is not built")
        floor = self._floor
        floor.withdraw(victim, keep_tokens=True)
        victim.state = RequestState.PREEMPTING
        victim.preemptions += 1
        self._stats.preemptions += 1
        record = floor.record_of(victim.last_plan)
        if record is None:
            floor.requeue(victim)
            return 0
        record.releases.append(victim)
        return floor.kv.exclusive(victim.blocks)

    # --- prompts ---------------------------------------------------------------------------
    def _continue_prefills(self, draft: Draft) -> None:
        for request in list(self._floor.prefilling.values()):
            remaining = request.input_tokens + request.base_sampled - request.base_planned
            tokens = self._policy.chunk_tokens(request, remaining, draft.left, self._view)
            if tokens > 0:
                self._compute(request, min(tokens, remaining, draft.left), draft)
                if draft.left <= 0:
                    return

    def _admit(self, draft: Draft) -> None:
        policy, floor, kv, view = self._policy, self._floor, self._floor.kv, self._view
        width = view.limits.max_num_seqs
        while draft.left > 0 and floor.num_running + draft.ended < width:
            request = floor.waiting.peek(view.now_ns)
            if request is None or self._blocked == (request.rid, kv.generation):
                return
            if not policy.may_admit(request, view):
                return
            total = request.input_tokens + request.base_sampled
            # Its last token is always computed: that is what samples the next one.
            hits = kv.match(request.block_hashes, (total - 1) // kv.block_size)
            cached = len(hits) * kv.block_size
            tokens = policy.chunk_tokens(request, total - cached, draft.left, view)
            if tokens <= 0:
                return
            reserved = min(policy.reserve_tokens(request, view), self._door.max_total_tokens - 1)
            needed = kv.blocks_for(max(total, reserved)) - len(hits)
            headroom = policy.headroom_blocks(view) if floor.num_running else 0
            if needed + kv.idle(hits) + headroom > kv.free_blocks:
                self._blocked = (request.rid, kv.generation)
                return
            floor.leave_queue(request)
            kv.share(hits)
            request.blocks = hits + kv.allocate(needed)
            request.published_blocks = len(hits)
            request.base_planned = cached
            request.state = RequestState.PREFILLING
            floor.prefilling[request.rid] = request
            if not request.preemptions:
                request.cached_tokens = cached
                request.first_scheduled_ns = view.now_ns
            self._stats.prefix_queried_tokens += total
            self._stats.prefix_hit_tokens += cached
            self._door.rate.admitted(view.now_ns)
            draft.admitted.append(
                Admitted(rid=request.rid, blocks=tuple(request.blocks), cached_tokens=cached)
            )
            self._compute(request, min(tokens, total - cached, draft.left), draft)

    def _compute(self, request: ScheduledRequest, tokens: int, draft: Draft) -> None:
        """Put a chunk of a prefilling request into the draft."""
        total = request.input_tokens + request.base_sampled
        if not draft.add(request, tokens, total):
            return
        del self._floor.prefilling[request.rid]
        request.base_sampled += 1
        if request.base_sampled < request.output_limit:
            self._floor.get_ready(request)
        else:
            request.state = RequestState.FINISHING
            draft.ended += 1
            draft.last.append(request)

    # --- sealing ---------------------------------------------------------------------------
    def _seal(self, draft: Draft, decodes: int) -> StepPlan:
        floor, cohort = self._floor, self._floor.cohort
        epoch, decode_context, longest = 0, 0, draft.longest
        if decodes:
            cohort.advance(draft.plan_id)
            epoch = cohort.epoch
            decode_context = cohort.total_context
            longest = longest or 1
        joined, left = cohort.take_changes()
        new_blocks = draft.new_blocks
        if draft.starved:  # who got a block may have been evicted for another one since
            new_blocks = [(rid, block) for rid, block in new_blocks if rid in cohort.members]
        plan = StepPlan(
            plan_id=draft.plan_id,
            at_ns=self._view.now_ns,
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
                context_tokens=decode_context + draft.context,
                max_chunk_tokens=longest,
                num_decodes=decodes,
                decode_context_tokens=decode_context,
                prefill_squares=draft.squares,
            ),
        )
        record = InFlight(plan, draft.requests)
        floor.in_flight.append(record)
        self._next_plan_id += 1
        for request in draft.last:
            if request.cohort is not None:
                floor.leave_cohort(request)
                request.state = RequestState.FINISHING
            if request.state is RequestState.FINISHING:
                record.releases.append(request)
        return plan

    def _rank(self, request: ScheduledRequest) -> tuple[int, ...]:
        return self._policy.rank(request, self._view)

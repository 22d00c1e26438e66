"""The scheduler: one loop for every policy, in real and in virtual time.

Prefill and decode follow one rule: the computed tokens of a request catch up with its total.
`plan` decides the next step, and `commit` applies its result. Between the two, up to `depth`
further plans may be made, so that the device never waits for the host. Tokens of plans that are
not committed (tokens *in flight*) count as computed. Therefore

- a request that stops may still be part of later plans, whose tokens for it are discarded;
- blocks are released when the last plan that uses them commits, never earlier;
- a cancelled request frees its blocks within depth + 1 commits.

A plan is built in one pass: decodes, then started prompts, then admissions, as far as the policy's
phase allows. The pass does not visit the members of the decode batch. Planning a step that only
decodes costs the same for ten requests as for a thousand, except for the list of advanced ones.

`request_table` moves requests between their states, and `decode_batch` schedules the decodes.
`admission` rejects requests, `preemption` evicts them, and `fast_forward` skips steps that are
known in advance.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from goodput_core.engine_state import EngineStatistics
from goodput_core.errors import InternalError
from goodput_core.spec.choices import LateRequests, Preemption
from goodput_core.steptime import StepShape
from goodput_engine.kv.blocks import HostPool
from goodput_engine.scheduler.admission import Admission
from goodput_engine.scheduler.decode_batch import DecodeBatch, schedule_decodes
from goodput_engine.scheduler.fast_forward import FastForward
from goodput_engine.scheduler.plan import (
    Admitted,
    Chunk,
    InFlight,
    Progress,
    StepBuilder,
    StepOutcome,
    StepPlan,
)
from goodput_engine.scheduler.policy import SchedulerView
from goodput_engine.scheduler.preemption import Evictor
from goodput_engine.scheduler.request_table import RequestState, RequestTable
from goodput_engine.scheduler.transfer.kv_transfer import KVTransfer

if TYPE_CHECKING:
    from goodput_engine.kv.blocks import BlockPool
    from goodput_engine.scheduler.admission import Rejection
    from goodput_engine.scheduler.plan import Copy, StepResult
    from goodput_engine.scheduler.policy import Phase, SchedulerLimits, SchedulingPolicy
    from goodput_engine.scheduler.prefill_budget import PrefillBudget
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["Scheduler"]

_PREFILLING = RequestState.PREFILLING
_FINISHING = RequestState.FINISHING
_PREEMPTING = RequestState.PREEMPTING
_SWAPPING = (RequestState.SWAPPING_OUT, RequestState.SWAPPING_IN)
# States in which a request with `holds_blocks` becomes HELD when no plan uses its blocks.
_HELD_ON_RELEASE = (RequestState.FINISHED, RequestState.DETACHING)


class Scheduler(SchedulerView):
    """Takes requests and returns plans.

    Args:
        policy: a new policy, used by this scheduler only.
        kv: a new pool of KV blocks.
        limits: the initial limits.
        max_model_tokens: limit of prompt and output tokens together.
        depth: plans that may wait behind the running one, 0 to 2.
        host: a new pool of blocks in host memory; None if host memory is not used.
        preemption: preemption mode of the manifest.
        prefill_budget: limit of the prompt tokens of each step; None if there is none.
        prefill_chunk_tokens: limit of the prompt tokens of a request in a step; None for no limit.
        late_requests: treatment of requests that can no longer meet their targets.
    """

    def __init__(
        self,
        *,
        policy: SchedulingPolicy,
        kv: BlockPool,
        limits: SchedulerLimits,
        max_model_tokens: int,
        depth: int = 0,
        host: HostPool | None = None,
        preemption: Preemption = Preemption.RECOMPUTE,
        prefill_budget: PrefillBudget | None = None,
        prefill_chunk_tokens: int | None = None,
        late_requests: LateRequests = LateRequests.FINISH,
    ) -> None:
        assert 0 <= depth <= 2, depth
        host = HostPool(total_blocks=0, ns_per_block=1) if host is None else host
        table = RequestTable(kv, host, policy.new_queue(), DecodeBatch(kv.block_size))
        super().__init__(
            table,
            limits=limits,
            max_total_tokens=min(max_model_tokens, kv.total_blocks * kv.block_size + 1),
            preemption=preemption,
            late_requests=late_requests,
            max_chunk_tokens=prefill_chunk_tokens,
        )
        policy.attach(self)
        self.policy = policy
        self.depth = depth
        self.prefill_budget = prefill_budget
        self._kv = kv
        self._host = host
        self.next_plan_id = 1
        self.admission = Admission(policy=policy, table=table, view=self)
        self._evictor = Evictor(policy=policy, table=table, view=self, depth=depth)
        self.fast_forward = FastForward(
            scheduler=self, table=table, evictor=self._evictor, depth=depth
        )
        self.transfer = KVTransfer(policy=policy, table=table, admission=self.admission, view=self)
        # An optional hook is called only if the policy overrides it.
        self._rejects_waiting = policy.overrides("waiting_to_reject")
        self._preempts_ahead = policy.overrides("preempt_ahead")
        self._orders_prompts = policy.overrides("prefill_order", "precedes")
        self._limits_admission = policy.overrides("may_admit")
        self._displaces = policy.overrides("displaced_by")
        self._learns = policy.overrides("after_step")
        # (rid of the head of the queue, generation of the pool) when the head last lacked blocks.
        # Its admission is not tried again until one of the two changes.
        self._blocked: tuple[int, int] | None = None
        self._steps = self._step_ns = self._scheduled_tokens = self._output_tokens = 0
        self._prefix_queried_tokens = self._prefix_hit_tokens = 0

    # --- state -------------------------------------------------------------------------------
    @property
    def stats(self) -> EngineStatistics:
        """Counters since the start."""
        evictor = self._evictor
        return EngineStatistics(
            steps=self._steps,
            step_ns=self._step_ns,
            scheduled_tokens=self._scheduled_tokens,
            output_tokens=self._output_tokens,
            preemptions=evictor.preemptions,
            recomputed_tokens=evictor.recomputed_tokens,
            swapped_tokens=evictor.swapped_tokens,
            prefix_queried_tokens=self._prefix_queried_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            shed=self.admission.shed,
        )

    # --- requests and limits -----------------------------------------------------------------
    def add(self, request: ScheduledRequest, now_ns: int) -> Rejection | None:
        """Enqueue a new request; return the rejection if it is rejected instead."""
        assert request.rid not in self._table.requests, request.rid
        self.now_ns = now_ns
        return self.admission.admit(request)

    def cancel(self, rid: int) -> bool:
        """Cancel a request; do nothing for an unknown or finished one.

        Returns:
            True if it is removed now. If it is removed later, its rid is in `StepOutcome.released`.
        """
        request = self._table.requests.get(rid)
        return request is not None and self.admission.cancel(request)

    def withhold(self, rid: int) -> None:
        """Put no further block of a request into the prefix cache: its keys are incomplete."""
        request = self._table.requests.get(rid)
        if request is not None:
            request.block_hashes = ()

    def end_input(self) -> None:
        """Declare that no more requests will arrive, so that incomplete batches start."""
        self.input_open = False
        self._table.settled = False

    def set_limits(self, limits: SchedulerLimits) -> None:
        """Set the limits of the next and later plans."""
        self.limits = limits
        self._table.settled = False

    def set_prefill_budget(self, prefill_budget: PrefillBudget | None) -> None:
        """Set the limit of prompt tokens of the next and later plans; None for no limit."""
        self.prefill_budget = prefill_budget
        self._table.settled = False

    # --- plan --------------------------------------------------------------------------------
    def plan(self, now_ns: int) -> StepPlan | None:
        """Return the next step; None if there is nothing to do or the limit of plans is reached."""
        table, policy = self._table, self.policy
        if len(table.in_flight) > self.depth:
            return None
        self.now_ns = now_ns
        if self.late_requests is LateRequests.DROP:
            self.admission.drop_late()
        if self._rejects_waiting:
            for removal in policy.waiting_to_reject():
                self.admission.remove(removal)
        if self._preempts_ahead:
            for request in policy.preempt_ahead():
                if request.displaceable:
                    self._evictor.evict_ahead(request)
        phase, budget = policy.phase(), self.limits.token_budget
        self._evictor.costs.prompts_alone = phase.prompts_alone
        if phase.token_budget is not None:
            budget = min(budget, phase.token_budget)
        step = StepBuilder(plan_id=self.next_plan_id, left=budget)
        self._fill(step, phase)
        empty = not (step.decodes or step.chunks or step.admitted)
        if empty and phase.only is not None and not table.in_flight:
            # Nothing is runnable. Ignore the filter; otherwise the engine would deadlock.
            self._fill(step, replace(phase, only=None))
            empty = not (step.decodes or step.chunks or step.admitted)
        # A step that only copies is planned only if no step is in flight.
        copies_wait = table.swapping_out or table.swapping_in
        if empty and (table.in_flight or not copies_wait):
            return None
        return self._seal(step)

    def wake_ns(self) -> int | None:
        """Return the time to plan again if nothing happens before; None if there is none."""
        if self._table.in_flight or not len(self.waiting):
            return None
        wake_ns = self.policy.wake_ns()
        return wake_ns if wake_ns is not None and wake_ns > self.now_ns else None

    def _fill(self, step: StepBuilder, phase: Phase) -> None:
        """Schedule the kinds of work that the phase allows."""
        table = self._table
        if phase.decodes and not phase.prompts_alone:
            schedule_decodes(step, table, phase, self._evictor)
        if self.prefill_budget is not None and (table.prefilling or len(table.waiting)):
            decodes = step.decodes
            prompt_tokens = self.prefill_budget.prompt_tokens(
                table, decodes=decodes, max_tokens=step.left + decodes, now_ns=self.now_ns
            )
            step.left = min(step.left, prompt_tokens)
        if step.left > 0:
            self._schedule_prompts(step, phase)
        if phase.decodes and phase.prompts_alone and not step.chunks:
            schedule_decodes(step, table, phase, self._evictor)

    # --- plan: prompts -----------------------------------------------------------------------
    def _schedule_prompts(self, step: StepBuilder, phase: Phase) -> None:
        """Continue started prompts, then admit waiting requests, within the budget."""
        table, policy, waiting = self._table, self.policy, self.waiting
        admits = phase.admissions and not step.starved and len(waiting) > 0
        if admits:
            step.owed = table.blocks_owed
        if phase.prefills and table.prefilling:
            ordered = self._orders_prompts
            prompts = table.prefilling.values()
            for request in list(policy.prefill_order(prompts) if ordered else prompts):
                while ordered and admits and step.left > 0:
                    head = waiting.peek(self.now_ns)
                    if head is None or not policy.precedes(head, request):
                        break
                    admits = self._admit(head, step)
                if step.left <= 0:
                    return
                if request.state is _PREFILLING and (phase.only is None or phase.only(request)):
                    remaining = request.input_tokens + request.base_sampled - request.base_computed
                    tokens = policy.chunk_tokens(request, remaining, step.left)
                    if tokens > 0:
                        self._compute(request, min(tokens, remaining), step)
        while admits and step.left > 0:
            head = waiting.peek(self.now_ns)
            admits = head is not None and self._admit(head, step)

    def _admit(self, request: ScheduledRequest, step: StepBuilder) -> bool:
        """Start the head of the queue; return False to end the admissions of this step."""
        policy, table, kv = self.policy, self._table, self._kv
        blocked = (request.rid, kv.generation)
        if self._blocked == blocked or (self._limits_admission and not policy.may_admit(request)):
            return False
        swapped = bool(request.host_blocks)
        total = request.input_tokens + request.base_sampled
        # The last token of a prompt is always computed, because it gives the next token. The last
        # block of a copy is always copied back, because the end of the copy resumes the request.
        most = len(request.host_blocks) - 1 if swapped else (total - 1) // kv.block_size
        hits = kv.match(request.block_hashes, most)
        cached = request.base_computed if swapped else len(hits) * kv.block_size
        tokens = 0
        if not swapped:
            tokens = policy.chunk_tokens(request, total - cached, step.left)
            if tokens <= 0:
                return False
        reserved = min(policy.reserved_tokens(request), self.max_total_tokens - 1)
        needed = kv.blocks_for(max(total, reserved)) - len(hits)
        headroom = policy.headroom_blocks() if table.num_running else 0
        free_needed = needed + headroom + step.owed
        if not self._make_room(request, hits, free_needed, step):
            if free_needed + kv.idle(hits) > kv.free_blocks and not self._displaces:
                self._blocked = blocked
            return False
        table.dequeue(request)
        request.shared_tokens = (len(hits) - kv.idle(hits)) * kv.block_size
        kv.share(hits)
        request.blocks = hits + kv.allocate(needed)
        request.published_blocks = len(hits)
        request.base_computed = cached
        if not request.admitted_tokens:
            request.first_scheduled_ns = self.now_ns
            request.cached_tokens, request.awaited_tokens = cached, 0
        request.admitted_tokens = total
        request.admitted_ns = self.now_ns
        self.admission.starts_ns.append(self.now_ns)
        step.admitted.append(
            Admitted(rid=request.rid, blocks=tuple(request.blocks), cached_tokens=cached)
        )
        if swapped:
            self._evictor.swap_in(request, found=len(hits))
            return True
        self._prefix_queried_tokens += total
        self._prefix_hit_tokens += cached
        request.state = _PREFILLING
        table.prefilling[request.rid] = request
        self._compute(request, min(tokens, total - cached), step)
        return True

    def _make_room(
        self, request: ScheduledRequest, hits: list[int], blocks: int, step: StepBuilder
    ) -> bool:
        """Evict displaced requests until a place and this many blocks besides the hits are free."""
        running = self._table.num_running + step.ended
        places = self.limits.max_num_seqs - running
        missing = blocks + self._kv.idle(hits) - self._kv.free_blocks
        if self._host.free_blocks < self._host.total_blocks and self._evictor.holds_back(
            request, free_blocks=-missing, running=running
        ):
            return False
        if places > 0 and missing <= 0:
            return True
        return self._displaces and self._evictor.displace(request, hits, blocks, places, step)

    def _compute(self, request: ScheduledRequest, tokens: int, step: StepBuilder) -> None:
        """Add a chunk of a prefilling request to the plan."""
        tokens = min(tokens, step.left, self.max_chunk_tokens)
        start = request.base_computed
        end = start + tokens
        is_last = end == request.input_tokens + request.base_sampled
        step.chunks.append(
            Chunk(
                rid=request.rid,
                start=start,
                num_tokens=tokens,
                samples=is_last,
                output_tokens=request.base_sampled,
            )
        )
        step.requests.append(request)
        step.left -= tokens
        request.base_computed = end
        request.last_plan = step.plan_id
        if not is_last:
            return
        del self._table.prefilling[request.rid]
        request.base_sampled += 1
        if request.base_sampled < request.output_limit:
            self._table.set_ready(request)
        else:
            request.state = _FINISHING
            step.ended += 1
            step.last.append(request)

    # --- plan: result ------------------------------------------------------------------------
    def _seal(self, step: StepBuilder) -> StepPlan:
        """Turn the finished step into a plan, and put it in flight."""
        table, batch, decodes = self._table, self._table.batch, step.decodes
        epoch = decode_context = 0
        if decodes:
            batch.advance(step.plan_id)
            epoch = batch.epoch
            decode_context = batch.total_context
        joined, left = batch.take_changes()
        new_blocks = step.new_blocks
        if step.displaced:  # omit the blocks of requests that have been evicted
            new_blocks = [(rid, block) for rid, block in new_blocks if rid in batch.members]
        shape = StepShape.of(
            decodes=decodes,
            decode_context_tokens=decode_context,
            chunks=[(chunk.start, chunk.num_tokens) for chunk in step.chunks],
        )
        copies: tuple[Copy, ...] = ()
        copied: list[ScheduledRequest] = []
        if table.swapping_out or table.swapping_in:
            copies, copied = self._evictor.take_copies(step.plan_id, shape)
        plan = StepPlan(
            plan_id=step.plan_id,
            at_ns=self.now_ns,
            left=left,
            admitted=tuple(step.admitted),
            copies=copies,
            joined=joined,
            new_blocks=tuple(new_blocks),
            decode_epoch=epoch,
            num_decodes=decodes,
            chunks=tuple(step.chunks),
            shape=shape,
        )
        table.settled = not (
            step.admitted
            or step.starved
            or table.ready
            or table.prefilling
            or table.swapping_out
            or table.swapping_in
        )
        record = InFlight(plan, step.requests, copied)
        table.in_flight.append(record)
        self.next_plan_id += 1
        for request in step.last:
            if request.batch is not None:
                table.leave_batch(request)
                request.state = _FINISHING
            if request.state is _FINISHING:
                record.releases.append(request)
        return plan

    # --- commit ------------------------------------------------------------------------------
    def commit(self, plan: StepPlan, result: StepResult, now_ns: int) -> StepOutcome:
        """Apply the result of the oldest plan in flight.

        Raises:
            InternalError: the plan is not the oldest one in flight.
        """
        table, batch = self._table, self._table.batch
        record = table.in_flight.popleft()
        oldest = record.plan.plan_id
        if record.plan is not plan or result.plan_id != oldest:
            raise InternalError(f"plan {oldest} is the oldest in flight, not {result.plan_id}")
        self.now_ns = now_ns
        epoch, stopped = plan.decode_epoch, result.stopped
        if epoch:
            batch.committed_epoch = epoch
        progress: list[Progress] = []
        released: list[int] = []
        for chunk, request in zip(plan.chunks, record.requests, strict=True):
            table.publish(request, chunk.start + chunk.num_tokens)
            if chunk.samples:
                table.emit(request, stopped.get(chunk.rid), now_ns, progress, released)
        for request in record.leavers:
            table.emit(request, stopped.get(request.rid), now_ns, progress, released)
        for rid, reason in stopped.items():
            member = batch.members.get(rid)
            if member is not None and member.joined_epoch < epoch:
                table.finish(member, released)
                progress.append(Progress(request=member, finish_reason=reason))
        for request in record.releases:
            if request.state is _PREEMPTING:
                self._evictor.vacate(request)
            elif request.holds_blocks and request.state in _HELD_ON_RELEASE:
                request.state = RequestState.HELD
            else:
                table.free(request)
                released.append(request.rid)
        for request in record.copied:
            if request.state in _SWAPPING:
                self._evictor.finish_copy(request)
        outcome = StepOutcome(
            plan=plan,
            result=result,
            advanced=batch.decoded_in(epoch) if epoch else [],
            progress=progress,
            released=released,
        )
        if plan.shape.num_tokens:
            self._observe(outcome)
        return outcome

    def _observe(self, outcome: StepOutcome) -> None:
        """Count a step that computed; evictor, prefill budget and policy learn from it."""
        plan, step_ns = outcome.plan, outcome.result.step_ns
        tokens = plan.shape.num_tokens
        self._steps += 1
        self._step_ns += step_ns
        self._scheduled_tokens += tokens
        self._output_tokens += len(outcome.advanced) + len(outcome.progress)
        if self._host.total_blocks:
            self._evictor.costs.observe(outcome)
        if self.prefill_budget is not None:
            self.prefill_budget.observe(plan, step_ns)
        if self._learns:
            self.policy.after_step(outcome)

    def add_steps(self, *, steps: int, step_ns: int, tokens: int, last_step_ns: int) -> None:
        """Add steps that were committed together, by fast-forward, to the statistics."""
        self._steps += steps
        self._step_ns += step_ns
        self._scheduled_tokens += tokens
        self._output_tokens += tokens
        costs = self._evictor.costs
        costs.decode_step_ns = last_step_ns
        costs.decodes += tokens

"""Deciding one step: what it computes and copies, drafted in one pass and sealed into a plan.

Decodes come first, then the prefills that run, then admissions; the policy's hooks say how much
of each. How each kind is drafted has a module of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from goodput_core.steptime import StepShape
from goodput_engine.scheduler.copies import take_copies
from goodput_engine.scheduler.decoding import Decoding
from goodput_engine.scheduler.draft import Draft, InFlight
from goodput_engine.scheduler.evictor import Evictor
from goodput_engine.scheduler.offloading import Offloading
from goodput_engine.scheduler.plan import StepPlan
from goodput_engine.scheduler.prompts import Prompts
from goodput_engine.scheduler.request import RequestState

if TYPE_CHECKING:
    from goodput_engine.scheduler.door import Door
    from goodput_engine.scheduler.floor import Floor
    from goodput_engine.scheduler.pacing import Pacer
    from goodput_engine.scheduler.plan import Copy
    from goodput_engine.scheduler.policy import Phase, SchedulerView, SchedulingPolicy
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
        depth: plans that may wait uncommitted beside the one that runs.
        pacer: sizes the prompts' share of each step; None: the token budget alone does.

    Attributes:
        offloading: makes room ahead of time.
    """

    __slots__ = (
        "_decoding",
        "_evictor",
        "_floor",
        "_next_plan_id",
        "_policy",
        "_prompts",
        "_stats",
        "_view",
        "offloading",
        "pacer",
    )

    def __init__(
        self,
        *,
        policy: SchedulingPolicy,
        floor: Floor,
        door: Door,
        stats: SchedulerStats,
        view: SchedulerView,
        depth: int,
        pacer: Pacer | None = None,
    ) -> None:
        self.pacer = pacer
        self._policy = policy
        self._floor = floor
        self._stats = stats
        self._view = view
        self._next_plan_id = 1
        self._evictor = Evictor(policy=policy, floor=floor, stats=stats, view=view)
        self.offloading = Offloading(
            policy=policy, floor=floor, evictor=self._evictor, view=view, depth=depth
        )
        self._decoding = Decoding(
            policy=policy,
            floor=floor,
            evictor=self._evictor,
            offloading=self.offloading,
            view=view,
        )
        self._prompts = Prompts(
            policy=policy, floor=floor, evictor=self._evictor, door=door, stats=stats, view=view
        )

    def plan(self) -> StepPlan | None:
        """Decide the next step; None: there is nothing to compute or to copy."""
        policy, floor, view = self._policy, self._floor, self._view
        for request in policy.step_aside(view):
            if request.displaceable:
                self._evictor.evict(request)
        phase = policy.phase(view)
        budget = min(policy.budget(view), view.limits.token_budget)
        draft = Draft(plan_id=self._next_plan_id, left=budget)
        self._draft(draft, phase)
        if draft.empty and phase.only is not None and not floor.in_flight:
            # Whoever it was for cannot get on: nobody sits out for nothing, or time would stop.
            self._draft(draft, replace(phase, only=None))
        # Copies alone make a step only where no other one can take them along.
        if draft.empty and (floor.in_flight or not (floor.leaving or floor.returning)):
            return None
        return self._seal(draft)

    def _draft(self, draft: Draft, phase: Phase) -> None:
        """Fill the plan with the kinds of work that it may hold."""
        floor = self._floor
        if phase.decodes and not phase.prompts_alone:
            self._decoding.draft(draft, phase.only)
        if self.pacer is not None and (floor.prefilling or len(floor.waiting)):
            share = self.pacer.prompt_tokens(
                floor,
                decodes=draft.decodes,
                max_tokens=draft.left + draft.decodes,
                now_ns=self._view.now_ns,
            )
            draft.left = min(draft.left, share)
        if draft.left > 0:
            self._prompts.draft(draft, phase)
        if phase.decodes and phase.prompts_alone and not draft.chunks:
            self._decoding.draft(draft, phase.only)

    def skip(self, plans: int) -> None:
        """So many plans are made elsewhere."""
        self._next_plan_id += plans

    def _seal(self, draft: Draft) -> StepPlan:
        floor, cohort, decodes = self._floor, self._floor.cohort, draft.decodes
        epoch, decode_context, longest = 0, 0, draft.longest
        if decodes:
            cohort.advance(draft.plan_id)
            epoch = cohort.epoch
            decode_context = cohort.total_context
            longest = longest or 1
        joined, left = cohort.take_changes()
        new_blocks = draft.new_blocks
        if draft.displaced:  # who got a block may have been evicted for another one since
            new_blocks = [(rid, block) for rid, block in new_blocks if rid in cohort.members]
        copies: tuple[Copy, ...] = ()
        copied: list[ScheduledRequest] = []
        if floor.leaving or floor.returning:
            copies, copied = take_copies(
                floor, plan_id=draft.plan_id, step_ns=self._stats.last_step_ns
            )
        plan = StepPlan(
            plan_id=draft.plan_id,
            at_ns=self._view.now_ns,
            left=left,
            admitted=tuple(draft.admitted),
            copies=copies,
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
        floor.settled = not (
            draft.admitted
            or draft.starved
            or floor.ready
            or floor.prefilling
            or floor.leaving
            or floor.returning
        )
        record = InFlight(plan, draft.requests)
        record.copied = copied
        floor.in_flight.append(record)
        self._next_plan_id += 1
        for request in draft.last:
            if request.cohort is not None:
                floor.leave_cohort(request)
                request.state = RequestState.FINISHING
            if request.state is RequestState.FINISHING:
                record.releases.append(request)
        return plan

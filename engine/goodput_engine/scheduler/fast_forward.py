"""Fast-forward: many decode-only steps together, without a plan for each of them.

If a plan only decodes one token of every member of the decode batch, so does the next plan, until a
request arrives, ends or is cancelled, a limit changes, a member decodes for the last time, or
blocks run short. Until then a step only changes a few counters and sometimes allocates a block. In
virtual time an executor takes such steps together. Afterwards the state of the scheduler, plans in
flight included, is the same as if each step had been planned and committed.

The policy's hooks are not called for these steps; see `SchedulingPolicy.can_fast_forward`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from goodput_core.spec.choices import LateRequests, Preemption
from goodput_core.steptime import StepShape
from goodput_engine.scheduler.plan import InFlight, StepPlan

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from goodput_engine.scheduler.policy import SchedulingPolicy
    from goodput_engine.scheduler.preemption import Evictor
    from goodput_engine.scheduler.request_table import RequestTable
    from goodput_engine.scheduler.scheduler import Scheduler

__all__ = ["FastForward", "SkippedSteps", "SteadyDecoding"]

_MAX_STEPS: Final = 1024
_STEP_HOOKS: Final = ("preempt_ahead", "phase", "after_step")
_ADMISSION_HOOKS: Final = (
    "new_queue",
    "may_admit",
    "displaced_by",
    "reserved_tokens",
    "headroom_blocks",
    "chunk_tokens",
)


class SkippedSteps(NamedTuple):
    """Steps that were committed together.

    Each step gave every member of the decode batch one token. No request joined, left or ended,
    and no blocks were released.

    Args:
        plans: plans that were in flight before and in which requests joined or left, oldest first.
        first_epoch: epoch of the first step; the following steps have consecutive epochs.
        ends_ns: end times of the steps, in order, at least one; an array of int64.
    """

    plans: Sequence[StepPlan]
    first_epoch: int
    ends_ns: array[int]


class SteadyDecoding:
    """A scheduler that can be fast-forwarded.

    Args:
        scheduler: the scheduler that is fast-forwarded.
        table: requests and memory of the scheduler.
        spare: number of KV blocks that must stay free.

    Attributes:
        num_decodes: number of requests that decode in each step.
        context_tokens: number of their context tokens in the latest plan in flight.
        epoch: epoch of the latest plan in flight.
        plan_id: number of the latest plan in flight.
        most_steps: upper bound of the steps that the blocks allow.
    """

    __slots__ = (
        "_new_blocks",
        "_scheduler",
        "_spare",
        "_table",
        "context_tokens",
        "epoch",
        "most_steps",
        "num_decodes",
        "plan_id",
    )

    def __init__(self, *, scheduler: Scheduler, table: RequestTable, spare: int) -> None:
        batch = table.batch
        self._scheduler = scheduler
        self._table = table
        self._spare = spare
        self._new_blocks: dict[int, list[tuple[int, int]]] = {}
        self.num_decodes = len(batch.members)
        self.context_tokens = batch.total_context
        self.epoch = batch.epoch
        self.plan_id = table.in_flight[-1].plan.plan_id
        # A member needs one block every `block_size` steps.
        rounds = (table.kv.free_blocks - spare) // self.num_decodes + 1
        self.most_steps = min(_MAX_STEPS, rounds * table.kv.block_size)

    def plan(self, steps: int) -> int:
        """Plan up to this many steps: allocate the blocks that the members need in them.

        Returns:
            The number of planned steps. It is smaller than `steps` if, in the step after these, a
            member decodes for the last time or blocks run short.
        """
        batch, kv, events = self._table.batch, self._table.kv, self._table.batch.event_epochs
        for epoch in filter(events.__contains__, range(self.epoch + 1, self.epoch + steps + 1)):
            new_blocks = batch.give_blocks(epoch, kv, self._spare)
            if new_blocks is None:
                return epoch - self.epoch - 1
            self._new_blocks[epoch] = new_blocks
        return steps

    def commit(
        self, *, ends_ns: array[int], planned_ns: Sequence[int], step_ns: int, last_step_ns: int
    ) -> SkippedSteps:
        """Commit steps, and put the same number of new ones in flight.

        Args:
            ends_ns: end times of the committed steps, in order, at least one.
            planned_ns: planning times of the new plans that stay in flight, in order.
            step_ns: total device time of the committed steps.
            last_step_ns: device time of the last committed step.
        """
        batch, in_flight, decodes = self._table.batch, self._table.in_flight, self.num_decodes
        steps, kept = len(ends_ns), len(planned_ns)
        first_epoch = in_flight[0].plan.decode_epoch
        tokens = (steps - kept) * decodes
        changes: list[StepPlan] = []
        for _ in planned_ns:
            plan = in_flight.popleft().plan
            tokens += plan.num_decodes
            if plan.joined or plan.left:
                changes.append(plan)
        self._scheduler.next_plan_id += steps
        batch.advance_by(steps, committed=first_epoch + steps - 1, plan_id=self.plan_id + steps)
        for step, at_ns in enumerate(planned_ns, steps - kept + 1):
            epoch = self.epoch + step
            plan = StepPlan(
                plan_id=self.plan_id + step,
                at_ns=at_ns,
                shape=StepShape.of(
                    decodes=decodes, decode_context_tokens=self.context_tokens + step * decodes
                ),
                new_blocks=tuple(self._new_blocks.get(epoch, ())),
                decode_epoch=epoch,
                num_decodes=decodes,
            )
            in_flight.append(InFlight(plan, []))
        self._scheduler.add_steps(
            steps=steps,
            step_ns=step_ns,
            tokens=tokens,
            last_step_ns=last_step_ns,
        )
        return SkippedSteps(plans=changes, first_epoch=first_epoch, ends_ns=ends_ns)


class FastForward:
    """Decides whether a scheduler can be fast-forwarded.

    Args:
        scheduler: the scheduler; its attribute `policy` must be set.
        table: requests and memory of the scheduler.
        evictor: gives the number of blocks that must stay free.
        depth: plans that may wait behind the running one.
    """

    __slots__ = ("_depth", "_evictor", "_ignores_queue", "_possible", "_scheduler", "_table")

    def __init__(
        self, *, scheduler: Scheduler, table: RequestTable, evictor: Evictor, depth: int
    ) -> None:
        self._scheduler = scheduler
        self._table = table
        self._evictor = evictor
        self._depth = depth
        kind = type(scheduler.policy)
        self._possible = _covers(kind, _STEP_HOOKS)
        self._ignores_queue = _covers(kind, _ADMISSION_HOOKS)

    def steady(self) -> SteadyDecoding | None:
        """Return the scheduler as `SteadyDecoding`; None if the next step must be planned."""
        table, scheduler = self._table, self._scheduler
        if not table.settled or not self._possible:
            return None
        if scheduler.late_requests is LateRequests.DROP:
            return None  # each plan may drop a request
        in_flight = table.in_flight
        if len(in_flight) <= self._depth:
            return None
        for record in in_flight:
            plan = record.plan
            if not plan.decode_epoch or plan.chunks or plan.copies:
                return None
            if record.leavers or record.releases or record.copied:
                return None
        # A waiting request may start as soon as the prefill budget grows. Under `hybrid`, one with
        # a copy may start as soon as steps take longer.
        holds_copies = table.host.free_blocks < table.host.total_blocks
        ignores_queue = (
            self._ignores_queue
            and scheduler.prefill_budget is None
            and not (scheduler.preemption is Preemption.HYBRID and holds_copies)
        )
        if not ignores_queue and len(table.waiting):
            return None
        spare = self._evictor.offload_margin()
        if table.kv.free_blocks < spare or not scheduler.policy.can_fast_forward():
            return None
        return SteadyDecoding(scheduler=scheduler, table=table, spare=spare)


def _covers(kind: type[SchedulingPolicy], hooks: Sequence[str]) -> bool:
    """Return True if `can_fast_forward` of a policy covers these hooks.

    It does not cover hooks that a subclass of its class overrides.
    """

    def defining_class(name: str) -> type:
        return next(base for base in kind.__mro__ if name in vars(base))

    covering = defining_class("can_fast_forward")
    return all(issubclass(covering, defining_class(hook)) for hook in hooks)

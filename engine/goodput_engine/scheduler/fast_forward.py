"""Fast-forward: taking steps that are known before they run, without planning each of them.

After a plan that holds nothing but a token for every member of the decode batch, the next plan
holds the same, until a request arrives, ends or is cancelled, a limit changes, a member decodes
for the last time, or blocks run short. Until then a step changes a few counters and sometimes
gives a member its next block. In virtual time an executor takes such steps at once. The
scheduler, plans in flight included, is left as if each step had been planned and committed.

The policy's hooks are not called for these steps; see `SchedulingPolicy.can_fast_forward`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from goodput_core.steptime import StepShape
from goodput_engine.scheduler.plan import StepPlan
from goodput_engine.scheduler.request_table import InFlight

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from goodput_engine.scheduler.policy import SchedulingPolicy
    from goodput_engine.scheduler.preemption import Evictor
    from goodput_engine.scheduler.request_table import RequestTable
    from goodput_engine.scheduler.scheduler import Scheduler

__all__ = ["FastForward", "SkippedSteps", "SteadyDecoding"]

_MOST_STEPS: Final = 1024
_HOOKS_OF_STEPS: Final = ("preempt_ahead", "phase", "after_step")
_HOOKS_OF_ADMISSION: Final = (
    "new_queue",
    "may_admit",
    "displaced_by",
    "reserved_tokens",
    "headroom_blocks",
    "chunk_tokens",
)


class SkippedSteps(NamedTuple):
    """Steps that were committed at once; each gave every member of the decode batch a token.

    No request joined, left or ended in between, and no blocks were released.

    Args:
        plans: the committed plans that name requests that joined or left, oldest first. They were
            in flight at the start.
        first_epoch: epoch of the first step; the epochs of the others follow.
        ends_ns: end of each step, in order, array of int64, at least one.
    """

    plans: Sequence[StepPlan]
    first_epoch: int
    ends_ns: array[int]


class SteadyDecoding:
    """A point to fast-forward a scheduler from.

    Args:
        scheduler: the scheduler.
        table: its requests.
        spare: KV blocks that must stay free.

    Attributes:
        num_decodes: requests that decode in each step.
        context_tokens: their context in the latest step in flight.
        epoch: epoch of the latest step in flight.
        plan_id: the latest plan in flight.
        most_steps: an upper bound of the steps that the blocks allow.
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
        # Each member needs one block in as many steps as a block has slots.
        rounds = (table.kv.free_blocks - spare) // self.num_decodes + 1
        self.most_steps = min(_MOST_STEPS, rounds * table.kv.block_size)

    def plan(self, steps: int) -> int:
        """Plan steps: give each member the blocks that it needs in them.

        Returns:
            The planned steps: fewer if a member decodes for the last time in the next one, or
            blocks run short in it.
        """
        batch, kv, events = self._table.batch, self._table.kv, self._table.batch.event_epochs
        for epoch in filter(events.__contains__, range(self.epoch + 1, self.epoch + steps + 1)):
            given = batch.give_blocks(epoch, kv, self._spare)
            if given is None:
                return epoch - self.epoch - 1
            self._new_blocks[epoch] = given
        return steps

    def commit(
        self, *, ends_ns: array[int], planned_ns: Sequence[int], step_ns: int, last_step_ns: int
    ) -> SkippedSteps:
        """Commit steps, and put as many new ones in flight.

        Args:
            ends_ns: end of each committed step, in order, at least one.
            planned_ns: planning times of the plans that are in flight now and were not before.
            step_ns: summed device time of the committed steps.
            last_step_ns: device time of the last of them.
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
        self._scheduler.count(
            steps=steps,
            step_ns=step_ns,
            scheduled_tokens=tokens,
            output_tokens=tokens,
            last_step_ns=last_step_ns,
        )
        return SkippedSteps(plans=changes, first_epoch=first_epoch, ends_ns=ends_ns)


class FastForward:
    """Decides when a scheduler can be fast-forwarded.

    Args:
        scheduler: the scheduler; its policy is set.
        table: its requests.
        evictor: knows the blocks to keep free.
        depth: plans that wait beside the one that runs.
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
        self._possible = _promises(kind, _HOOKS_OF_STEPS)
        self._ignores_queue = _promises(kind, _HOOKS_OF_ADMISSION)

    def steady(self) -> SteadyDecoding | None:
        """Return a point to fast-forward from; None if the next step must be planned."""
        table, scheduler = self._table, self._scheduler
        if not table.settled or not self._possible:
            return None
        in_flight = table.in_flight
        if len(in_flight) <= self._depth:
            return None
        for record in in_flight:
            plan = record.plan
            if not plan.decode_epoch or plan.chunks or plan.copies:
                return None
            if record.leavers or record.releases or record.copied:
                return None
        # A waiting request may start as soon as the prefill budget grows.
        heeds_queue = not self._ignores_queue or scheduler.prefill_budget is not None
        if heeds_queue and len(table.waiting):
            return None
        spare = self._evictor.offload_margin()
        if table.kv.free_blocks < spare or not scheduler.policy.can_fast_forward():
            return None
        return SteadyDecoding(scheduler=scheduler, table=table, spare=spare)


def _promises(kind: type[SchedulingPolicy], hooks: Sequence[str]) -> bool:
    """Return True if the class that defines `can_fast_forward` has or inherits these hooks."""
    speaker = _definer(kind, "can_fast_forward")
    return all(issubclass(speaker, _definer(kind, hook)) for hook in hooks)


def _definer(kind: type, name: str) -> type:
    return next(base for base in kind.__mro__ if name in vars(base))

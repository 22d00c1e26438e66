"""Steady decoding: steps that are known before they are taken, so that they need not be planned.

After a plan that held nothing but a token for every member of the cohort, the next plan holds the
same, until something happens: a request comes, ends or is cancelled, a limit changes, a member
decodes for the last time, or blocks run short. Until then a step changes a handful of counters
and, now and then, gives a member its next block. In virtual time an executor takes such steps at
once: a *fold*. It leaves everything as it would be had each step been planned and committed,
the plans that are under way included.

A policy's hooks are not called for the steps in between, so it has a say: see
`SchedulingPolicy.steady`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from goodput_core.steptime import StepShape
from goodput_engine.scheduler.draft import InFlight
from goodput_engine.scheduler.plan import StepPlan

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from goodput_engine.scheduler.floor import Floor
    from goodput_engine.scheduler.planner import Planner
    from goodput_engine.scheduler.policy import SchedulerView, SchedulingPolicy
    from goodput_engine.scheduler.stats import SchedulerStats

__all__ = ["Folded", "Folder", "SteadyDecoding"]

_MOST_STEPS: Final = 1024
_EACH_STEP: Final = ("step_aside", "phase", "budget", "after_step")
_ADMISSIONS: Final = (
    "new_queue",
    "may_admit",
    "displaced_by",
    "reserve_tokens",
    "headroom_blocks",
    "chunk_tokens",
)


class Folded(NamedTuple):
    """Steps that were committed at once: in each of them every member of the cohort got a token.

    Nobody joined, left or ended in between, and nothing was released. Who is a member is told by
    the plans that were committed before, and by `told`.

    Args:
        told: those of the committed plans that say who joined or left, oldest first; they were
            under way when the fold began.
        first_epoch: the cohort's epoch of the first step; those of the others follow.
        ends_ns: when each step was done, in order, array of int64, at least one.
    """

    told: Sequence[StepPlan]
    first_epoch: int
    ends_ns: array[int]


class SteadyDecoding:
    """A scheduler at a point from which it can be folded; good until it is used otherwise.

    Args:
        floor: its requests.
        planner: numbers its plans.
        stats: its counters.
        spare: KV blocks that are to stay free.

    Attributes:
        num_decodes: requests that decode in each step to come.
        context_tokens: their context in the latest step under way.
        epoch: the cohort's epoch of the latest step under way.
        plan_id: of the latest plan under way.
        most_steps: more than this many steps cannot be planned, blocks or no blocks.
    """

    __slots__ = (
        "_floor",
        "_new_blocks",
        "_planner",
        "_spare",
        "_stats",
        "context_tokens",
        "epoch",
        "most_steps",
        "num_decodes",
        "plan_id",
    )

    def __init__(
        self, *, floor: Floor, planner: Planner, stats: SchedulerStats, spare: int
    ) -> None:
        cohort = floor.cohort
        self._floor = floor
        self._planner = planner
        self._stats = stats
        self._spare = spare
        self._new_blocks: dict[int, list[tuple[int, int]]] = {}
        self.num_decodes = len(cohort.members)
        self.context_tokens = cohort.total_context
        self.epoch = cohort.epoch
        self.plan_id = floor.in_flight[-1].plan.plan_id
        # Everybody needs one block in as many steps as a block has slots.
        rounds = (floor.kv.free_blocks - spare) // self.num_decodes + 1
        self.most_steps = min(_MOST_STEPS, rounds * floor.kv.block_size)

    def give_slots(self, steps: int) -> int:
        """Plan so many steps: give each member the blocks that it needs in them.

        Returns:
            How many steps are planned: fewer, if somebody decodes for the last time in the one
            after them, or blocks run short in it.
        """
        cohort, kv, due = self._floor.cohort, self._floor.kv, self._floor.cohort.due_epochs
        for epoch in filter(due.__contains__, range(self.epoch + 1, self.epoch + steps + 1)):
            given = cohort.give_blocks(epoch, kv, self._spare)
            if given is None:
                return epoch - self.epoch - 1
            self._new_blocks[epoch] = given
        return steps

    def done(
        self, *, ends_ns: array[int], planned_ns: Sequence[int], step_ns: int, last_step_ns: int
    ) -> Folded:
        """Take in that steps were done, and as many new ones planned.

        Args:
            ends_ns: when each was done, in order, at least one.
            planned_ns: when the plans that are under way now and were not before were made.
            step_ns: device time of the steps done, summed.
            last_step_ns: of the last of them.
        """
        cohort, in_flight, decodes = self._floor.cohort, self._floor.in_flight, self.num_decodes
        steps, kept = len(ends_ns), len(planned_ns)
        first_epoch = in_flight[0].plan.decode_epoch
        tokens = (steps - kept) * decodes
        told: list[StepPlan] = []
        for _ in planned_ns:
            plan = in_flight.popleft().plan
            tokens += plan.num_decodes
            if plan.joined or plan.left:
                told.append(plan)
        self._planner.skip(steps)
        cohort.advance_by(steps, committed=first_epoch + steps - 1, plan_id=self.plan_id + steps)
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
        self._stats.count_decodes(
            steps=steps, step_ns=step_ns, tokens=tokens, last_step_ns=last_step_ns
        )
        return Folded(told=told, first_epoch=first_epoch, ends_ns=ends_ns)


class Folder:
    """Says when a scheduler can be folded.

    Args:
        policy: its preferences.
        floor: its requests.
        planner: numbers its plans.
        stats: its counters.
        view: what the policy may look at.
        depth: plans that wait beside the one that runs.
    """

    __slots__ = ("_depth", "_floor", "_ignores_queue", "_planner", "_policy", "_stats", "_view")

    def __init__(
        self,
        *,
        policy: SchedulingPolicy,
        floor: Floor,
        planner: Planner,
        stats: SchedulerStats,
        view: SchedulerView,
        depth: int,
    ) -> None:
        self._policy = policy
        self._floor = floor
        self._planner = planner
        self._stats = stats
        self._view = view
        self._depth = depth
        kind = type(policy)
        self._ignores_queue: bool | None = None
        if _speaks_for(kind, _EACH_STEP):
            self._ignores_queue = _speaks_for(kind, _ADMISSIONS)

    def steady(self) -> SteadyDecoding | None:
        """Where to fold from; None: the next step has to be planned."""
        floor = self._floor
        if not floor.settled or self._ignores_queue is None:
            return None
        in_flight = floor.in_flight
        if len(in_flight) <= self._depth:
            return None
        for record in in_flight:
            plan = record.plan
            if not plan.decode_epoch or plan.chunks or plan.copies:
                return None
            if record.leavers or record.releases or record.copied:
                return None
        # With a pacer, who waits may be waiting for a larger share of the next step.
        heeds_queue = not self._ignores_queue or self._planner.pacer is not None
        if heeds_queue and len(floor.waiting):
            return None
        spare = self._planner.offloading.margin()
        if floor.kv.free_blocks < spare or not self._policy.steady(self._view):
            return None
        return SteadyDecoding(floor=floor, planner=self._planner, stats=self._stats, spare=spare)


def _speaks_for(kind: type[SchedulingPolicy], hooks: Sequence[str]) -> bool:
    """Whether the class whose `steady` it is has, or inherits, all these hooks."""
    speaker = _definer(kind, "steady")
    return all(issubclass(speaker, _definer(kind, hook)) for hook in hooks)


def _definer(kind: type, name: str) -> type:
    return next(base for base in kind.__mro__ if name in vars(base))

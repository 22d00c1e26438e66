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

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from goodput_core.steptime import StepShape
from goodput_engine.scheduler.draft import InFlight
from goodput_engine.scheduler.plan import StepPlan

if TYPE_CHECKING:
    from collections.abc import Container

    from goodput_engine.scheduler.floor import Floor
    from goodput_engine.scheduler.planner import Planner
    from goodput_engine.scheduler.policy import SchedulerView, SchedulingPolicy
    from goodput_engine.scheduler.stats import SchedulerStats

__all__ = ["Folded", "Folder", "SteadyDecoding"]

_EACH_STEP: Final = ("step_aside", "phase", "budget", "after_step")
_ADMISSIONS: Final = (
    "new_queue",
    "may_admit",
    "displaced_by",
    "reserve_tokens",
    "headroom_blocks",
    "chunk_tokens",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
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
        due: epochs for which `give_slots` must be called first.
    """

    __slots__ = (
        "_floor",
        "_new_blocks",
        "_planner",
        "_spare",
        "_stats",
        "context_tokens",
        "due",
        "epoch",
        "num_decodes",
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
        self.due: Container[int] = cohort.due_epochs

    def give_slots(self, epoch: int) -> bool:
        """Give those who are due in the next epoch a block each.

        Returns:
            Whether that was all they need. If not, nothing has changed, and this step is one to
            plan: somebody decodes for the last time, or blocks run short.
        """
        given = self._floor.cohort.give_blocks(epoch, self._floor.kv, self._spare)
        if given is None:
            return False
        self._new_blocks[epoch] = given
        return True

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
        floor, cohort, steps = self._floor, self._floor.cohort, len(ends_ns)
        in_flight = floor.in_flight
        first_epoch = in_flight[0].plan.decode_epoch
        tokens = 0
        told: list[StepPlan] = []
        for _ in planned_ns:
            plan = in_flight.popleft().plan
            tokens += plan.num_decodes
            if plan.joined or plan.left:
                told.append(plan)
        tokens += (steps - len(planned_ns)) * self.num_decodes
        cohort.advance_by(steps, committed=first_epoch + steps - 1)
        plan_id = self._planner.skip(steps) - len(planned_ns)
        cohort.last_plan = plan_id + len(planned_ns) - 1
        for at_ns, back in zip(planned_ns, range(len(planned_ns) - 1, -1, -1), strict=True):
            epoch = cohort.epoch - back
            plan = self._plan(plan_id, at_ns, epoch, cohort.total_context - back * self.num_decodes)
            in_flight.append(InFlight(plan, []))
            plan_id += 1
        self._stats.count_decodes(
            steps=steps, step_ns=step_ns, tokens=tokens, last_step_ns=last_step_ns
        )
        return Folded(told=told, first_epoch=first_epoch, ends_ns=ends_ns)

    def _plan(self, plan_id: int, at_ns: int, epoch: int, context: int) -> StepPlan:
        return StepPlan(
            plan_id=plan_id,
            at_ns=at_ns,
            left=(),
            admitted=(),
            joined=(),
            new_blocks=tuple(self._new_blocks.get(epoch, ())),
            decode_epoch=epoch,
            num_decodes=self.num_decodes,
            chunks=(),
            shape=StepShape.of(decodes=self.num_decodes, decode_context_tokens=context),
        )


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

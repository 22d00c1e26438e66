"""FastServe: a skip-join multi-level feedback queue with proactive swapping."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from goodput_core.spec.choices import Policy, Preemption
from goodput_core.steptime import OnlineStepTime, StepShape
from goodput_engine.scheduler.feedback import FeedbackQueue
from goodput_engine.scheduler.policy import Phase, SchedulingPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from goodput_core.steptime import StepTimeForm
    from goodput_engine.scheduler.plan import StepOutcome
    from goodput_engine.scheduler.policy import SchedulerView
    from goodput_engine.scheduler.request import ScheduledRequest

__all__ = ["FastServePolicy"]

_EVERYBODY: Final = Phase()
_SHARE: Final = 10


class FastServePolicy(SchedulingPolicy):
    """Short requests first, without knowing which they are: who has run long yields.

    Levels and how requests move between them: see `feedback`. A waiting request displaces running
    ones of lower levels where it lacks a place or blocks, and is swapped in before lower ones.
    Victims are swapped wherever host memory has room, whatever is cheaper: who comes back after
    each quantum must not be computed anew each time.

    Swapping is proactive: as many blocks as requests may run at once, but at most a tenth of the
    pool, are kept free by swapping out the lowest levels; who was swapped out comes back only
    where they stay free. With less than a tenth of host memory free no new prompt starts, so that
    those in host memory come back first. What differs: the paper keeps preempted requests on the
    device until their blocks are wanted, and fetches the highest levels back before their turn;
    here a request is on the device if it runs, and its copy back begins when it has its place.

    Args:
        model: predicts how long a prompt takes; None: it is learned while serving.

    Source: Wu et al., "Fast Distributed Inference Serving for Large Language Models" (FastServe),
    NSDI 2026, sections 4.1 (skip-join MLFQ) and 4.2 (proactive swapping); parameters as in its
    published code.
    """

    name: ClassVar[Policy] = Policy.FASTSERVE
    paced: ClassVar[bool] = True

    def __init__(self, *, model: StepTimeForm | None = None) -> None:
        self._learned = OnlineStepTime()
        self._model: StepTimeForm = self._learned if model is None else model
        self._queue = FeedbackQueue(
            lambda request: self._model.step_ns(StepShape.of(chunks=[(0, request.input_tokens)]))
        )

    def new_queue(self) -> FeedbackQueue:
        """By level and arrival."""
        return self._queue

    def step_aside(self, view: SchedulerView) -> Iterable[ScheduledRequest]:
        """The lowest levels, where too few blocks are free; the highest that runs stays."""
        host_free, _ = view.host_blocks
        missing = self._reserve(view) - view.free_blocks
        if not host_free or missing <= 0 or view.num_running < 2:
            return
        missing -= view.promised_blocks()
        running = sorted(view.running(), key=lambda r: self.rank(r, view))
        highest = self._queue.level(running[0]) if running else 0
        while missing > 0 and running and self._queue.level(running[-1]) > highest:
            victim = running.pop()
            missing -= len(victim.blocks)
            yield victim

    def phase(self, view: SchedulerView) -> Phase:
        """Everything; new prompts only while there is host memory to preempt into."""
        free, total = view.host_blocks
        self._queue.copies_only = free * _SHARE < total and view.num_running > 0
        return _EVERYBODY

    def may_admit(self, request: ScheduledRequest, view: SchedulerView) -> bool:
        """Who was swapped out does not come back into the blocks that are kept free."""
        if not request.host_blocks or not view.num_running:
            return True
        needed = len(request.host_blocks) + 1
        return view.free_blocks - needed >= self._reserve(view)

    def headroom_blocks(self, view: SchedulerView) -> int:  # noqa: ARG002
        """None: the blocks that are kept free are for those who start."""
        return 0

    def displaced_by(
        self, request: ScheduledRequest, view: SchedulerView
    ) -> Iterable[ScheduledRequest]:
        """Those of lower levels, the lowest and newest first."""
        level = self._queue.level(request)
        lower = [r for r in view.running() if self._queue.level(r) > level]
        return sorted(lower, key=lambda r: self.rank(r, view), reverse=True)

    def prefill_order(
        self,
        prefilling: Iterable[ScheduledRequest],
        view: SchedulerView,
    ) -> Iterable[ScheduledRequest]:
        """The highest level first."""
        return sorted(prefilling, key=lambda r: self.rank(r, view))

    def overtakes(
        self,
        newcomer: ScheduledRequest,
        prefilling: ScheduledRequest,
        view: SchedulerView,  # noqa: ARG002
    ) -> bool:
        """A higher level starts before a lower one goes on."""
        return self._queue.level(newcomer) < self._queue.level(prefilling)

    def rank(self, request: ScheduledRequest, view: SchedulerView) -> tuple[int, ...]:  # noqa: ARG002
        """The lowest level yields first, in it the newest."""
        return (self._queue.level(request), request.arrival_ns, request.rid)

    def evict_mode(self, victim: ScheduledRequest, view: SchedulerView) -> Preemption:  # noqa: ARG002
        """Always to host memory, while it has room."""
        return Preemption.SWAP

    def after_step(self, outcome: StepOutcome, view: SchedulerView) -> None:  # noqa: ARG002
        """Charge those who took part, and learn how long prompts take."""
        self._queue.charge(outcome)
        if outcome.plan.chunks:
            self._learned.observe(outcome.plan.shape, outcome.result.step_ns)

    def _reserve(self, view: SchedulerView) -> int:
        return min(view.limits.max_num_seqs, view.total_blocks // _SHARE)

"""Four levels of urgency with ageing."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final, Self

from goodput_core.spec.choices import Policy
from goodput_core.units import NS_PER_S
from goodput_engine.scheduler.levels import Ageing, AgeingQueue
from goodput_engine.scheduler.pausing import Pausing
from goodput_engine.scheduler.policy import Phase, SchedulingPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from goodput_engine.scheduler.plan import StepOutcome
    from goodput_engine.scheduler.policy import SchedulerView
    from goodput_engine.scheduler.request import ScheduledRequest
    from goodput_engine.scheduler.settings import PolicySettings

__all__ = ["PriorityPolicy"]

_EVERYBODY: Final = Phase()
_AGEING_NS: Final = 30 * NS_PER_S


class PriorityPolicy(SchedulingPolicy):
    """The most urgent first, in all things; steps are as `sarathi`'s.

    Realtime, high, normal, low. Who waits for W moves up one level. A waiting request displaces
    running ones of lower levels, the lowest and newest first, where it lacks a place or blocks;
    of equals nobody displaces anybody. Out of blocks, the lowest and newest yields. Prompts of
    higher levels go on, and start, before those of lower ones.

    While a realtime or high request with a TPOT or TBT target has too little slack, lower levels
    are preempted in place (`pausing`): they keep their blocks and sit out. What an urgent decode
    lacks then is time, not memory. Giving up the blocks would not make a step shorter, and taking
    them up again would cost a copy or a computation for a pause of a few steps; where blocks are
    lacking as well, those who sit out are the first to yield them.

    Args:
        ageing_ns: W; None: half a minute.

    Source: the four levels, and ageing as in multi-level schedulers since Corbató et al., "An
    Experimental Time-Sharing System", AFIPS 1962; displacing for a place as well as for blocks:
    what vLLM issue 40004 asks for.
    """

    name: ClassVar[Policy] = Policy.PRIORITY
    paced: ClassVar[bool] = True

    def __init__(self, *, ageing_ns: int | None = None) -> None:
        self._ageing = Ageing(_AGEING_NS if ageing_ns is None else ageing_ns)
        self._pausing = Pausing(self._ageing.ageing_ns)

    @classmethod
    def configured(cls, settings: PolicySettings) -> Self:
        """With the manifest's W."""
        return cls(ageing_ns=settings.ageing_ns)

    def new_queue(self) -> AgeingQueue:
        """By level and age."""
        return AgeingQueue(self._ageing)

    def phase(self, view: SchedulerView) -> Phase:
        """Everybody, but those who sit out for more urgent ones."""
        if not self._pausing.bar(view.now_ns):
            return _EVERYBODY
        return Phase(only=lambda r: self._pausing.goes_on(self._ageing.running(r), view.now_ns))

    def may_admit(self, request: ScheduledRequest, view: SchedulerView) -> bool:
        """Not while requests of its level sit out."""
        return self._ageing.waiting(request, view.now_ns) >= self._pausing.bar(view.now_ns)

    def displaced_by(
        self, request: ScheduledRequest, view: SchedulerView
    ) -> Iterable[ScheduledRequest]:
        """Those of lower levels, the lowest and newest first."""
        level = self._ageing.waiting(request, view.now_ns)
        lower = [r for r in view.running() if self._ageing.running(r) < level]
        return sorted(lower, key=lambda r: self.rank(r, view), reverse=True)

    def prefill_order(
        self,
        prefilling: Iterable[ScheduledRequest],
        view: SchedulerView,  # noqa: ARG002
    ) -> Iterable[ScheduledRequest]:
        """The highest level first, in it the oldest admission."""
        return sorted(prefilling, key=self._ageing.running, reverse=True)

    def overtakes(
        self, newcomer: ScheduledRequest, prefilling: ScheduledRequest, view: SchedulerView
    ) -> bool:
        """A higher level starts before a lower one goes on."""
        level = self._ageing.waiting(newcomer, view.now_ns)
        return level > self._ageing.running(prefilling)

    def rank(self, request: ScheduledRequest, view: SchedulerView) -> tuple[int, ...]:  # noqa: ARG002
        """The lowest level yields first, in it the newest."""
        return (-self._ageing.running(request), self._ageing.top_ns(request), request.rid)

    def steady(self, view: SchedulerView) -> bool:
        """Not while time may lift somebody who waits, or an urgent answer run late."""
        return not len(view.waiting) and self._pausing.idle

    def after_step(self, outcome: StepOutcome, view: SchedulerView) -> None:
        """See how much slack the urgent ones have."""
        self._pausing.observe(outcome, view.now_ns)

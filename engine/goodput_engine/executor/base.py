"""What the engine core asks of an executor, whatever is behind it.

Several plans may be under way; they run in the order of their submission, and each is submitted
before the results of those ahead of it are known, so an executor feeds a request's sampled token
to its next step by itself. Only executors see `ExecutorInput`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from goodput_engine.messages import Submit
    from goodput_engine.scheduler.fast_forward import SkippedSteps, SteadyDecoding
    from goodput_engine.scheduler.plan import StepPlan, StepResult

__all__ = ["Executor", "RunsAhead"]


class Executor(Protocol):
    """Runs plans in order."""

    @property
    def behind_ns(self) -> int:
        """By how much an emulated device's clock was set back; 0 on a real one."""
        ...

    def add(self, submit: Submit) -> None:
        """A request that plans may name from now on."""
        ...

    def forget(self, rids: Iterable[int]) -> None:
        """No later plan computes these; `left` may still name them."""
        ...

    def submit(self, plan: StepPlan, ready_ns: int) -> None:
        """Run a plan after those already submitted.

        Args:
            plan: it.
            ready_ns: when it could be made: now, or the instant at which the step that opened
                its place was done, where that was noticed late.
        """
        ...

    def next_event_ns(self) -> int | None:
        """When to call `collect` next, or None while nothing is under way."""
        ...

    def collect(self, now_ns: int) -> StepResult | None:
        """The result of the oldest plan under way, if it is done."""
        ...


class RunsAhead(Protocol):
    """An executor that knows in advance how steps will come out: in virtual time."""

    def run_ahead(self, steady: SteadyDecoding, until_ns: int) -> SkippedSteps | None:
        """Take the steps under way, and those that follow, while they only decode.

        Each plan is made at the instant at which the step that opens its place is done.

        Args:
            steady: the scheduler whose plans are under way here.
            until_ns: only steps that are done before this instant are taken.

        Returns:
            What was done; None: nothing.
        """
        ...

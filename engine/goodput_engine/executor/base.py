"""The interface of executors, emulated or real, to the engine core.

Several plans may be in flight; they run in the order of submission. A plan is submitted before the
results of earlier plans are known, so an executor itself feeds the sampled token of a request to
the request's next step. Only executors see `ExecutorInput`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from goodput_engine.executor.roofline import StepRoofline

if TYPE_CHECKING:
    from collections.abc import Iterable

    from goodput_engine.messages import Submit
    from goodput_engine.scheduler.fast_forward import SkippedSteps, SteadyDecoding
    from goodput_engine.scheduler.plan import StepPlan, StepResult

__all__ = ["Executor", "LoadedModel", "RunsAhead"]


class Executor(Protocol):
    """Runs plans in order."""

    @property
    def behind_ns(self) -> int:
        """Total time by which an emulated device's clock was set back; 0 for a real device."""
        ...

    @property
    def computes_in_collect(self) -> bool:
        """True if `collect` returns only when a plan in flight is done.

        The next plan is then made after the messages that arrived meanwhile have been read.
        """
        ...

    @property
    def default_depth(self) -> int:
        """Number of plans that wait behind the running one unless configured, 0 to 2."""
        ...

    def add(self, submit: Submit) -> None:
        """Add a request that later plans may contain."""
        ...

    def forget(self, rids: Iterable[int]) -> None:
        """Remove requests that no later plan computes; `left` of a later plan may contain them."""
        ...

    def submit(self, plan: StepPlan, ready_ns: int) -> None:
        """Run a plan after all plans that were submitted earlier.

        Args:
            plan: the plan.
            ready_ns: earliest time at which the plan could have been made. It is the current time.
                If the end of the step that made room for this plan was noticed late, it is that
                end.
        """
        ...

    def next_event_ns(self) -> int | None:
        """Return the next time to call `collect`; None if no plan is in flight."""
        ...

    def collect(self, now_ns: int) -> StepResult | None:
        """Return the result of the oldest plan in flight; None if the plan is not done."""
        ...


class RunsAhead(Protocol):
    """An executor that knows results in advance, for virtual time."""

    def run_ahead(self, steady: SteadyDecoding, until_ns: int) -> SkippedSteps | None:
        """Take the steps in flight, and the steps that follow as long as these only decode.

        When a step ends, the plan of a further step is made.

        Args:
            steady: the decoding requests of the scheduler whose plans are in flight here.
            until_ns: only steps that end before this time are taken.

        Returns:
            The steps; None if none was taken.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A real model that was loaded and checked, and that has computed a first step.

    Args:
        executor: runs plans on the model.
        name: name of the model.
        vocab_size: size of the vocabulary; token ids are smaller.
        max_model_tokens: limit of prompt and output tokens together.
        block_size: tokens per KV block.
        kv_blocks: number of KV blocks.
        host_blocks: number of host blocks for preempted requests.
        swap_ns_per_block: measured time to copy one block between the two, at least 1.
        longest_step_ns: estimated time of the longest step.
        facts: see `goodput_engine.messages.Ready`.
        measure_roofline: measures the limits of the device, in seconds.
        grammar_problem: see `goodput_engine.messages.Ready`.
    """

    executor: Executor
    name: str
    vocab_size: int
    max_model_tokens: int
    block_size: int
    kv_blocks: int
    host_blocks: int
    swap_ns_per_block: int
    longest_step_ns: int
    facts: Mapping[str, str | int | float]
    measure_roofline: Callable[[], StepRoofline]
    grammar_problem: str = ""

"""The token budget's inner loop in the engine: how many prompt tokens the next step takes along.

The law is core's; here is what it is told of a scheduler, and what it has learnt of the device.
It never looks at decodes one by one: the cohort knows its own tightest promise. Steps that only
decode are neither decided nor learnt from, so they fold.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Final

from goodput_core.control import PrefillObservation, PrefillParams, PrefillState, prefill_law
from goodput_core.steptime import OnlineStepTime, StepShape
from goodput_core.steptime.fitting import StepSample

if TYPE_CHECKING:
    from goodput_core.control import PrefillDecision
    from goodput_core.spec.choices import BudgetLaw
    from goodput_engine.scheduler.floor import Floor
    from goodput_engine.scheduler.plan import StepPlan

__all__ = ["Pacer"]

_FIRST_SAFETY: Final = 90


class Pacer:
    """Sizes the prompts' share of one scheduler's steps.

    Args:
        law: which law decides.
        min_tokens: lower bound of a step's tokens, decodes included.

    Attributes:
        latest: the latest decision; None: none yet.
    """

    __slots__ = ("_measured", "_model", "_params", "_state", "latest")

    def __init__(self, law: BudgetLaw, *, min_tokens: int) -> None:
        self._model = OnlineStepTime()
        self._params = PrefillParams(
            law=law,
            min_tokens=min_tokens,
            max_tokens=min_tokens,
            safety_percent=_FIRST_SAFETY,
            form=self._model,
        )
        self._state = PrefillState()
        self._measured: StepSample | None = None
        self.latest: PrefillDecision | None = None

    @property
    def law(self) -> BudgetLaw:
        """Which law decides."""
        return self._params.law

    @property
    def safety_percent(self) -> int:
        """Share of the tightest time per token that a step is planned to take."""
        return self._params.safety_percent

    @property
    def step_time_error(self) -> float:
        """Recent mean of |measured / predicted − 1| of steps that computed prompts."""
        return self._model.error

    def change(
        self,
        *,
        law: BudgetLaw | None = None,
        safety_percent: int | None = None,
        min_tokens: int | None = None,
    ) -> None:
        """From the next step on; None leaves one as it is."""
        params = self._params
        self._params = replace(
            params,
            law=params.law if law is None else law,
            safety_percent=params.safety_percent if safety_percent is None else safety_percent,
            min_tokens=params.min_tokens if min_tokens is None else min_tokens,
        )

    def prompt_tokens(self, floor: Floor, *, decodes: int, max_tokens: int, now_ns: int) -> int:
        """What a step that decodes so many may compute of prompts.

        Args:
            floor: the scheduler's requests; the cohort's members are those who decode.
            decodes: how many they are.
            max_tokens: upper bound of the step's tokens, decodes included.
            now_ns: when.
        """
        if max_tokens != self._params.max_tokens:
            self._params = replace(self._params, max_tokens=max_tokens)
        cohort, measured = floor.cohort, self._measured
        self._measured = None
        self._state, self.latest = prefill_law(
            self._state,
            PrefillObservation(
                decodes=StepShape.of(
                    decodes=decodes, decode_context_tokens=cohort.total_context + decodes
                ),
                tightest_ns=cohort.tightest_ns,
                begun_tokens=max((r.base_planned for r in floor.prefilling.values()), default=0),
                overdue=self._state.at_limit and _overdue(floor, now_ns),
                measured=measured,
            ),
            self._params,
            now_ns,
        )
        return self.latest.tokens

    def observe(self, plan: StepPlan, step_ns: int) -> None:
        """A step is done."""
        if plan.chunks:
            self._measured = StepSample(plan.shape, step_ns)
            self._model.observe(plan.shape, step_ns)


def _overdue(floor: Floor, now_ns: int) -> bool:
    """Whether a prompt waits past its promise; one without a promise is past it at once."""
    return any(
        now_ns > request.arrival_ns + (request.targets.ttft_ns or 0)
        for request in chain(floor.prefilling.values(), floor.waiting)
    )

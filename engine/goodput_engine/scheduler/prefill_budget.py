"""The prefill budget: the number of prompt tokens that a step may compute beside its decodes.

This is the inner loop of the token-budget control. `goodput_core.control` has the control law. This
module builds the observation for the law from a scheduler, and learns the step-time model. It does
not visit the members of the decode batch, because the batch stores its tightest target. Steps that
only decode need no decision, and the model learns nothing from them, so they can be
fast-forwarded.
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
    from goodput_engine.scheduler.plan import StepPlan
    from goodput_engine.scheduler.request_table import RequestTable

__all__ = ["PrefillBudget"]

_INITIAL_SAFETY: Final = 90


class PrefillBudget:
    """Limits the prompt tokens of one scheduler's steps.

    Args:
        law: control law of the prefill budget.
        min_tokens: lower bound of the token limit of a step, decodes included.

    Attributes:
        latest: latest decision of the law; None before the first one.
    """

    __slots__ = ("_measured", "_model", "_params", "_state", "latest")

    def __init__(self, law: BudgetLaw, *, min_tokens: int) -> None:
        self._model = OnlineStepTime()
        self._params = PrefillParams(
            law=law,
            min_tokens=min_tokens,
            max_tokens=min_tokens,
            safety_percent=_INITIAL_SAFETY,
            form=self._model,
        )
        self._state = PrefillState()
        self._measured: StepSample | None = None
        self.latest: PrefillDecision | None = None

    @property
    def law(self) -> BudgetLaw:
        """The control law in force."""
        return self._params.law

    @property
    def safety_percent(self) -> int:
        """Share of the tightest target time per token that a step is planned to take."""
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
        """Change parameters for the next and later steps; None leaves a parameter unchanged."""
        params = self._params
        self._params = replace(
            params,
            law=params.law if law is None else law,
            safety_percent=params.safety_percent if safety_percent is None else safety_percent,
            min_tokens=params.min_tokens if min_tokens is None else min_tokens,
        )

    def prompt_tokens(
        self, table: RequestTable, *, decodes: int, max_tokens: int, now_ns: int
    ) -> int:
        """Return the number of prompt tokens that the next step may compute.

        Args:
            table: requests and memory of the scheduler.
            decodes: number of decodes in the step; 0 if it holds only prompts.
            max_tokens: upper bound of the step's tokens, decodes included.
            now_ns: the current time.
        """
        if max_tokens != self._params.max_tokens:
            self._params = replace(self._params, max_tokens=max_tokens)
        batch, measured = table.batch, self._measured
        self._measured = None
        self._state, self.latest = prefill_law(
            self._state,
            PrefillObservation(
                decodes=StepShape.of(
                    decodes=decodes, decode_context_tokens=batch.total_context + decodes
                ),
                tightest_ns=batch.tightest_ns,
                begun_tokens=max((r.base_computed for r in table.prefilling.values()), default=0),
                overdue=self._state.at_limit and _overdue(table, now_ns),
                measured=measured,
            ),
            self._params,
            now_ns,
        )
        return self.latest.tokens

    def observe(self, plan: StepPlan, step_ns: int) -> None:
        """Learn from a committed step."""
        if plan.chunks:
            self._measured = StepSample(plan.shape, step_ns)
            self._model.observe(plan.shape, step_ns)


def _overdue(table: RequestTable, now_ns: int) -> bool:
    """Return True if a prompt is past its TTFT target; without a target, this is at arrival."""
    return any(
        now_ns > request.arrival_ns + (request.targets.ttft_ns or 0)
        for request in chain(table.prefilling.values(), table.waiting)
    )

"""One look at everybody before a step: what is due, who has missed, who can still be in time.

A deadline-aware policy takes it once per step and decides by it. It is a pure function of the
scheduler's view, a step-time model and what is expected of answers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from goodput_core.steptime import StepShape, largest_prefill
from goodput_engine.scheduler.due import NEVER_NS, has_missed, next_due_ns
from goodput_engine.scheduler.feasible import Job, most_in_time
from goodput_engine.scheduler.request import ScheduledRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_core.steptime import StepTimeForm
    from goodput_engine.scheduler.policy import SchedulerView

__all__ = ["SAFETY", "TRICKLE_TOKENS", "Outlook", "look"]

TRICKLE_TOKENS: Final = 64
"""Prompt tokens that a step takes along however little time it has, so that prompts get on."""
SAFETY: Final = 0.95
"""Share of the time left that a step is planned to take: predictions err."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What a step is decided by.

    Args:
        begins_ns: when the next step will begin: after those in flight.
        all_decodes, kept_decodes: the decodes of a step with everybody, and of one without those
            who have missed.
        missed: requests, by rid, that have missed a promise or cannot be in time.
        step_within_ns: time until the first token of a running request is due; `NEVER_NS`: none.
        tightest_tpot_ns: the smallest TPOT target of those that run; `NEVER_NS`: none.
        ns_per_prompt_token: at which rate prompts go on beside the decodes when every step takes
            as long as the tightest TPOT allows.
        tokens_in_time: what is left to compute of all prompts that can be in time.
        in_time: waiting requests that can get their first, or next, token in time, all of them
            one after the other, in this order.
        late: the other waiting ones, oldest first.
    """

    begins_ns: int
    all_decodes: StepShape
    kept_decodes: StepShape
    missed: frozenset[int]
    step_within_ns: int
    tightest_tpot_ns: int
    ns_per_prompt_token: float
    tokens_in_time: int
    in_time: tuple[ScheduledRequest, ...]
    late: tuple[ScheduledRequest, ...]

    @property
    def pressed(self) -> bool:
        """Whether a prompt waits, or has started, that can still be in time."""
        return self.tokens_in_time > 0


def look(
    view: SchedulerView,
    model: StepTimeForm,
    tokens_left: Callable[[ScheduledRequest], float],
    *,
    favoured: int | None = None,
    newcomer: ScheduledRequest | None = None,
) -> Outlook:
    """Look at everybody.

    Args:
        view: the scheduler.
        model: predicts steps.
        tokens_left: how many more tokens a request is expected to get.
        favoured: a request that goes on whatever is due; nothing is expected of it.
        newcomer: a request to be counted among the waiting.
    """
    begins_ns = view.now_ns
    for plan in view.plans_in_flight():
        if plan.shape.num_requests:
            begins_ns += model.step_ns(plan.shape)
    running = _Running(view, model, begins_ns, tokens_left, favoured)
    missed = running.missed
    rate = _prompt_rate(view, model, running.kept, running.tightest_ns)
    start_ns = begins_ns
    for request, sampled, left in running.begun:
        # What has begun is not given up for others, but where it cannot be in time even alone.
        work_ns = int(left * rate)
        if begins_ns + work_ns > next_due_ns(request, sampled, begins_ns):
            missed.add(request.rid)
        else:
            start_ns += work_ns
    late: list[ScheduledRequest] = []
    jobs: list[Job[ScheduledRequest]] = []
    for request in view.waiting if newcomer is None else (*view.waiting, newcomer):
        sampled = request.base_sampled
        if request.rid == favoured or has_missed(
            request, sampled, begins_ns, tokens_left=tokens_left, token_ns=running.token_ns
        ):
            late.append(request)
        else:
            work_ns = int((request.input_tokens + sampled - request.base_planned) * rate)
            due_ns = next_due_ns(request, sampled, begins_ns)
            jobs.append(Job(item=request, due_ns=due_ns, work_ns=work_ns))
    chosen, others = most_in_time(jobs, start_ns)
    late += [job.item for job in others]
    late.sort(key=lambda r: (r.arrival_ns, r.rid))
    return Outlook(
        begins_ns=begins_ns,
        all_decodes=running.everybody,
        kept_decodes=running.kept,
        missed=frozenset(missed.union(r.rid for r in late)),
        step_within_ns=running.within_ns,
        tightest_tpot_ns=running.tightest_ns,
        ns_per_prompt_token=rate,
        tokens_in_time=math.ceil((start_ns - begins_ns + sum(j.work_ns for j in chosen)) / rate),
        in_time=tuple(job.item for job in chosen),
        late=tuple(late),
    )


class _Running:
    """Those who run: their decodes, the time they leave, and prompts that have begun."""

    __slots__ = ("begun", "everybody", "kept", "missed", "tightest_ns", "token_ns", "within_ns")

    def __init__(
        self,
        view: SchedulerView,
        model: StepTimeForm,
        begins_ns: int,
        tokens_left: Callable[[ScheduledRequest], float],
        favoured: int | None,
    ) -> None:
        seen: list[tuple[ScheduledRequest, int, int]] = []
        decodes = context = 0
        for request in view.running():
            sampled, computed = request.sampled_tokens, request.computed_tokens
            left = request.input_tokens + sampled - computed
            if left == 1 and sampled:
                decodes += 1
                context += computed + 1
                left = 0
            seen.append((request, sampled, left))
        self.everybody = StepShape.of(decodes=decodes, decode_context_tokens=context)
        self.token_ns = model.step_ns(self.everybody) if decodes else 0
        self.missed: set[int] = set()
        self.begun: list[tuple[ScheduledRequest, int, int]] = []
        self.within_ns = self.tightest_ns = NEVER_NS
        for request, sampled, left in seen:
            if has_missed(
                request, sampled, begins_ns, tokens_left=tokens_left, token_ns=self.token_ns
            ):
                self.missed.add(request.rid)
                if not left:
                    decodes -= 1
                    context -= request.computed_tokens + 1
                continue
            if left and request.rid != favoured:
                self.begun.append((request, sampled, left))
            self._leaves(request, sampled, begins_ns, decodes=not left)
        self.kept = StepShape.of(decodes=decodes, decode_context_tokens=context)

    def _leaves(
        self, request: ScheduledRequest, sampled: int, begins_ns: int, *, decodes: bool
    ) -> None:
        """Count the time that a running request leaves for the next step."""
        targets = request.targets
        tpot_ns, tbt_ns = targets.tpot_ns, targets.tbt_p99_ns
        if tpot_ns is not None:
            self.tightest_ns = min(self.tightest_ns, tpot_ns)
            if decodes:
                # Who is behind catches up in steps half as long as its target, not at once.
                left_ns = next_due_ns(request, sampled, begins_ns) - begins_ns
                self.within_ns = min(self.within_ns, max(left_ns, tpot_ns // 2))
        if tbt_ns is not None and decodes:
            self.within_ns = min(self.within_ns, tbt_ns)


def _prompt_rate(
    view: SchedulerView, model: StepTimeForm, decodes: StepShape, tightest_ns: int
) -> float:
    """Time per prompt token, nanoseconds, in the steps that the running TPOT targets allow."""
    most = max(1, view.limits.token_budget - decodes.num_decodes)
    tokens = most
    if tightest_ns != NEVER_NS:
        target_ns = int(tightest_ns * SAFETY)
        tokens = largest_prefill(model, beside=decodes, target_ns=target_ns, most_tokens=most)
        tokens = max(tokens, TRICKLE_TOKENS)
    return model.step_ns(decodes.with_chunk(0, tokens)) / tokens

"""Slack of all requests before a step: deadlines, missed targets, and feasible prompts.

A deadline-aware policy computes it once per step. It is a pure function of the scheduler's view, a
step-time model and predicted output lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from goodput_core.steptime import StepShape, largest_prefill
from goodput_engine.scheduler.policies.slo.deadline import NEVER_NS, has_missed, next_due_ns
from goodput_engine.scheduler.policies.slo.feasibility import Job, most_in_time
from goodput_engine.scheduler.request_table import ScheduledRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_core.slo.targets import Targets
    from goodput_core.steptime import StepTimeForm
    from goodput_engine.scheduler.policy import SchedulerView

__all__ = [
    "SAFETY",
    "TRICKLE_TOKENS",
    "Prospects",
    "StepSlack",
    "look",
    "next_step_ns",
    "weigh",
]

TRICKLE_TOKENS: Final = 64
"""Prompt tokens that a step computes even without slack, so that prompts progress."""
SAFETY: Final = 0.95
"""Share of the slack that a step is planned to take, because predictions have errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSlack:
    """The state on which the decisions of one step are based.

    Args:
        begins_ns: start of the next step, after those in flight.
        token_ns: time of a step with all decodes and no prompts; 0 if no request decodes.
        all_decodes, kept_decodes: decodes of all running requests, and of those that can still
            meet their targets.
        missed: rids of requests that have missed a target or cannot meet it.
        step_within_ns: time until the earliest deadline of a running request; `NEVER_NS` if no
            running request has a deadline.
        tightest_tpot_ns: smallest TPOT target of the running requests; `NEVER_NS` if none has one.
        ns_per_prompt_token: time per prompt token beside the decodes, if every step takes as long
            as the tightest TPOT target allows.
        tokens_in_time: uncomputed tokens of all prompts that can be on time.
        in_time: waiting requests that can all be on time, one after the other, in this order.
        late: the other waiting requests, oldest first.
    """

    begins_ns: int
    token_ns: int
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
        """True if a started or waiting prompt can still be on time."""
        return self.tokens_in_time > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospects:
    """Requests with prompts to compute, by whether they can be on time.

    Args:
        doomed: rids of started prompts that cannot be on time.
        in_time, late: waiting requests, as in `StepSlack`.
        tokens_in_time: as in `StepSlack`.
    """

    doomed: frozenset[int]
    in_time: tuple[ScheduledRequest, ...]
    late: tuple[ScheduledRequest, ...]
    tokens_in_time: int


def look(
    view: SchedulerView,
    model: StepTimeForm,
    tokens_left: Callable[[ScheduledRequest], float],
    *,
    favoured: int | None = None,
) -> StepSlack:
    """Return the slack of all requests.

    Args:
        view: the scheduler.
        model: predicts step times.
        tokens_left: predicts the remaining output tokens of a request.
        favoured: rid of a request that is scheduled whatever its deadlines; None for none.
    """
    begins_ns = next_step_ns(view, model)
    running = _Running(view, model, begins_ns, tokens_left)
    rate = _prompt_rate(view, model, running.kept, running.tightest_ns)
    prospects = weigh(
        view,
        tokens_left,
        begins_ns=begins_ns,
        ns_per_prompt_token=rate,
        token_ns=running.token_ns,
        favoured=favoured,
    )
    late = (r.rid for r in prospects.late)
    return StepSlack(
        begins_ns=begins_ns,
        token_ns=running.token_ns,
        all_decodes=running.everybody,
        kept_decodes=running.kept,
        missed=frozenset(running.missed.union(prospects.doomed, late)),
        step_within_ns=running.within_ns,
        tightest_tpot_ns=running.tightest_ns,
        ns_per_prompt_token=rate,
        tokens_in_time=prospects.tokens_in_time,
        in_time=prospects.in_time,
        late=prospects.late,
    )


def next_step_ns(view: SchedulerView, model: StepTimeForm) -> int:
    """Return the predicted start of the next step, after those in flight."""
    begins_ns = view.now_ns
    for plan in view.plans_in_flight():
        if plan.shape.num_requests:
            begins_ns += model.step_ns(plan.shape)
    return begins_ns


def weigh(
    view: SchedulerView,
    tokens_left: Callable[[ScheduledRequest], float],
    *,
    begins_ns: int,
    ns_per_prompt_token: float,
    token_ns: int,
    favoured: int | None = None,
    newcomer: ScheduledRequest | None = None,
) -> Prospects:
    """Find the prompts that can be on time at a known rate.

    Args:
        view: the scheduler.
        tokens_left: predicts the remaining output tokens of a request.
        begins_ns: start of the next step.
        ns_per_prompt_token: time per prompt token.
        token_ns: shortest time from one token to the next.
        favoured: rid of a request that counts as late; None for none.
        newcomer: a new request, treated as waiting; None for none.
    """

    def missed(request: ScheduledRequest) -> bool:
        return request.rid == favoured or has_missed(
            request, request.base_sampled, begins_ns, tokens_left=tokens_left, token_ns=token_ns
        )

    def work_ns(request: ScheduledRequest) -> int:
        left = request.input_tokens + request.base_sampled - request.base_computed
        return int(left * ns_per_prompt_token)

    doomed: set[int] = set()
    start_ns = begins_ns
    for request in view.prefilling():
        if missed(request):
            continue
        # A started prompt is late only if it could not be on time even without waiting ones.
        took_ns = work_ns(request)
        if begins_ns + took_ns > next_due_ns(request, request.base_sampled, begins_ns):
            doomed.add(request.rid)
        else:
            start_ns += took_ns
    late: list[ScheduledRequest] = []
    jobs: list[Job[ScheduledRequest]] = []
    for request in view.waiting if newcomer is None else (*view.waiting, newcomer):
        if missed(request):
            late.append(request)
        else:
            due_ns = next_due_ns(request, request.base_sampled, begins_ns)
            jobs.append(Job(item=request, due_ns=due_ns, work_ns=work_ns(request)))
    chosen, others = most_in_time(jobs, start_ns)
    late += [job.item for job in others]
    late.sort(key=lambda r: (r.arrival_ns, r.rid))
    all_ns = start_ns - begins_ns + sum(job.work_ns for job in chosen)
    return Prospects(
        doomed=frozenset(doomed),
        in_time=tuple(job.item for job in chosen),
        late=tuple(late),
        tokens_in_time=math.ceil(all_ns / ns_per_prompt_token),
    )


class _Running:
    """Decodes and slack of the running requests."""

    __slots__ = ("everybody", "kept", "missed", "tightest_ns", "token_ns", "within_ns")

    def __init__(
        self,
        view: SchedulerView,
        model: StepTimeForm,
        begins_ns: int,
        tokens_left: Callable[[ScheduledRequest], float],
    ) -> None:
        # Every step with prompts visits all running requests: few calls, few attributes.
        self.within_ns = self.tightest_ns = NEVER_NS
        self.missed: set[int] = set()
        decodes = context = 0
        doubtful: list[tuple[ScheduledRequest, int, bool]] = []
        for request in view.running():
            sampled, computed = request.base_sampled, request.base_computed
            batch = request.batch
            if batch is not None:
                since = batch.epoch - request.joined_epoch
                sampled += since
                computed += since
            decoding = sampled > 0 and request.input_tokens + sampled - computed == 1
            if decoding:
                decodes += 1
                context += computed + 1
            targets, first_ns = request.targets, request.first_token_ns
            tpot_ns = targets.tpot_ns
            if (
                first_ns
                and tpot_ns is not None
                and targets.e2e_ns is None
                and (targets.ttft_ns is None or first_ns - request.arrival_ns <= targets.ttft_ns)
            ):
                left_ns = first_ns + sampled * tpot_ns - begins_ns
                if left_ns >= 0:
                    self._leave(targets, left_ns, decoding=decoding)
                    continue
            doubtful.append((request, sampled, decoding))
        self.everybody = StepShape.of(decodes=decodes, decode_context_tokens=context)
        self.token_ns = model.step_ns(self.everybody) if decodes else 0
        for request, sampled, decoding in doubtful:
            if has_missed(
                request, sampled, begins_ns, tokens_left=tokens_left, token_ns=self.token_ns
            ):
                self.missed.add(request.rid)
                if decoding:
                    decodes -= 1
                    context -= request.computed_tokens + 1
            else:
                left_ns = next_due_ns(request, sampled, begins_ns) - begins_ns
                self._leave(request.targets, left_ns, decoding=decoding)
        self.kept = StepShape.of(decodes=decodes, decode_context_tokens=context)

    def _leave(self, targets: Targets, left_ns: int, *, decoding: bool) -> None:
        """Lower the bounds of the next step's time to those of a running request."""
        tpot_ns, tbt_ns = targets.tpot_ns, targets.tbt_p99_ns
        if tpot_ns is not None:
            self.tightest_ns = min(self.tightest_ns, tpot_ns)
            if decoding and left_ns < self.within_ns:
                # A request that is behind catches up in steps of half its target, not at once.
                self.within_ns = min(self.within_ns, max(left_ns, tpot_ns // 2))
        if tbt_ns is not None and decoding and tbt_ns < self.within_ns:
            self.within_ns = tbt_ns


def _prompt_rate(
    view: SchedulerView, model: StepTimeForm, decodes: StepShape, tightest_ns: int
) -> float:
    """Return the nanoseconds per prompt token in the steps that running TPOT targets allow."""
    most = max(1, view.limits.token_budget - decodes.num_decodes)
    tokens = most
    if tightest_ns != NEVER_NS:
        target_ns = int(tightest_ns * SAFETY)
        tokens = largest_prefill(model, beside=decodes, target_ns=target_ns, most_tokens=most)
        tokens = max(tokens, TRICKLE_TOKENS)
    return model.step_ns(decodes.with_chunk(0, tokens)) / tokens

"""Deadline-aware scheduling."""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, Final

from goodput_core.spec.choices import Policy, Preemption
from goodput_core.steptime import OnlineStepTime, StepShape, largest_prefill
from goodput_core.units import NS_PER_S
from goodput_engine.scheduler.admission import Rejection, Removal
from goodput_engine.scheduler.policies.slo.admission import Refusal, SLOAdmission
from goodput_engine.scheduler.policies.slo.awaited import AwaitedPrefixes
from goodput_engine.scheduler.policies.slo.evictions import (
    Displacement,
    EvictionOrder,
    free_tokens,
    urgent_ns,
)
from goodput_engine.scheduler.policies.slo.forecast import (
    NEVER_NS,
    SAFETY,
    TRICKLE_TOKENS,
    Forecast,
)
from goodput_engine.scheduler.policies.slo.memory import headroom_blocks
from goodput_engine.scheduler.policies.slo.prompts import PromptTime
from goodput_engine.scheduler.policies.slo.queue import RankedQueue, with_undecided
from goodput_engine.scheduler.policies.slo.retries import RefusedPrompts
from goodput_engine.scheduler.policies.slo.undecided import UndecidedRequests
from goodput_engine.scheduler.policy import Phase, SchedulingPolicy
from goodput_engine.scheduler.prediction import LearnedLengths
from goodput_engine.scheduler.request_table import RequestState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from goodput_engine.scheduler.plan import StepOutcome
    from goodput_engine.scheduler.policies.slo.device import LearningStepTime
    from goodput_engine.scheduler.policy import SchedulerView
    from goodput_engine.scheduler.prediction import LengthPredictor, PredictionError
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["SloPolicy"]

_TURN: Final = 16
"""Late requests decode in every sixteenth step while others can be on time."""
_RATIO_STEP: Final = 0.02
_MAX_RATIO: Final = 4.0
_MAX_RETRY_S: Final = 10
"""Longest stated time until a retry. Under lasting overload, a longer wait does not help."""
_AGEING_NS: Final = 30 * NS_PER_S
"""Time from its arrival after which a late request may be favoured, as under `sjf`."""
_FAVOURED, _IN_TIME, _LATE = range(3)
_ENDED: Final = (RequestState.FINISHED, RequestState.CANCELLED)


class SloPolicy(SchedulingPolicy):
    """Maximises the weighted number of requests that meet their SLO targets.

    A new request is admitted if, by predicted step times and output lengths, it and all admitted
    requests meet their targets (`device`, `memory`), and if none that are worth more per use of the
    device or of KV memory ask for the room (`offers`). More important requests displace waiting
    ones that are less important. If a later decision may differ, the request waits for it until it
    could no longer be in time. Before each step the policy looks at every request (`forecast`):

    - Prompts are computed in the order of their due times, and a step takes as many prompt tokens
      as fit before the earliest due token. TPOT is a mean, so a request that is ahead of its
      schedule leaves time for prompts.
    - While others can be in time, late requests decode in every sixteenth step only and start after
      the others. The oldest of them gets a share of every step, so no request starves.
    - If blocks run out, late requests are evicted first, then those that lose nothing by a long
      pause, then those whose pause is expected to lose the least weight, by the chance that they
      meet their targets before and after it.

    The policy learns step times, output lengths and its own misses while serving.

    Args:
        model: predicts step times; None for one that learns.
        predictor: predicts output lengths; None for one that learns.

    Source: this project; docs/slo-policy.md names the parts that are older.
    """

    name: ClassVar[Policy] = Policy.SLO

    def __init__(
        self,
        *,
        model: LearningStepTime | None = None,
        predictor: LengthPredictor | None = None,
    ) -> None:
        self.model: LearningStepTime = OnlineStepTime() if model is None else model
        self.predictor: LengthPredictor = LearnedLengths() if predictor is None else predictor
        self._queue = RankedQueue()
        self._forecast: Forecast | None = None
        """The state before the next step; None before its first use."""
        self._evictions: EvictionOrder
        self._displacement: Displacement
        self._committed_ns = 0
        self._step_factor = 1.0
        """95 % quantile of measured over predicted step times, at least 1."""
        self._prompt_time = PromptTime()
        self._favoured: ScheduledRequest | None = None
        self._late_turn: ScheduledRequest | None = None
        """The late prompt of this step that has started, if it is the turn of the late requests."""
        self._turn = 0
        self._evicts_for: ScheduledRequest | None = None
        """The waiting request for which evictions make room, though others are due before it."""
        self._admission: SLOAdmission
        self._refused_prompts = RefusedPrompts()
        self._awaited: AwaitedPrefixes
        self._displaced: list[ScheduledRequest] = []
        """Waiting requests that the request admitted last displaces."""
        self._undecided = UndecidedRequests()
        self._is_fresh = False
        """True if the forecast is of the plan that is being made."""

    def attach(self, view: SchedulerView) -> None:
        """Bind the policy to its scheduler."""
        super().attach(view)
        self._admission = SLOAdmission(view, self.model)
        self._awaited = AwaitedPrefixes(view)

    def new_queue(self) -> RankedQueue:
        """Return the queue, which is sorted before every step."""
        return self._queue

    # --- step --------------------------------------------------------------------------------
    def preempt_ahead(self) -> Iterable[ScheduledRequest]:
        """Those that make room for several urgent prompts, if their blocks must be copied."""
        view = self.view
        if view.preemption is Preemption.RECOMPUTE or len(view.waiting) < 2:
            return ()
        if not self._is_fresh:
            self._forecast = None
        self._look()
        found = self._displacement.ahead()
        self._is_fresh = not found
        return found

    def phase(self) -> Phase:
        """Every kind of work, for most steps without the late requests."""
        view = self.view
        if not self._is_fresh:
            self._forecast = None
        self._is_fresh = False
        if not (len(view.waiting) or view.num_prefilling):
            return Phase()
        forecast = self._look()
        self._favour(forecast)
        self._rank_queue(forecast)
        self._turn += 1
        self._late_turn = None
        lost = forecast.lost
        if lost and forecast.prompts and self._turn % _TURN:
            favoured = self._favoured
            budget = self._token_budget(forecast, forecast.kept_decodes)
            return Phase(
                token_budget=budget,
                only=lambda request: request.rid not in lost or request is favoured,
            )
        budget = self._token_budget(forecast, forecast.all_decodes)
        if lost and forecast.prompts:
            started = (r for r in view.prefilling() if r.rid in lost and r is not self._favoured)
            self._late_turn = min(started, key=_by_arrival, default=None)
            if self._late_turn is not None:
                # Else the others would take all of the budget in each turn.
                left = forecast.prompt_tokens(self._late_turn)
                budget += min(left, forecast.favoured_share)
        return Phase(token_budget=budget)

    def _rank_queue(self, forecast: Forecast) -> None:
        """Order the queue: in time, favoured, late; favoured first if it can stay."""
        prompts = with_undecided(
            forecast, self._undecided.by_rid.values(), self.model, self.predictor
        )
        order = self._awaited.to_start(prompts, forecast)
        self._evicts_for = self._displacement.first(order)
        order.sort(key=lambda request: request is not self._evicts_for)
        late = [request for request in forecast.late if request is not self._favoured]
        first = [request for request in forecast.late if request is self._favoured]
        # A request of a higher level that finds no room beside it would evict it again.
        fitting = first + [r for r in order if first and r.priority > first[0].priority]
        size, free = self.view.block_size, free_tokens(self.view)
        fits = sum(-(-r.own_tokens // size) for r in fitting) * size <= free
        self._queue.rank([*first, *order, *late] if fits else [*order, *first, *late])

    def _token_budget(self, forecast: Forecast, beside: StepShape) -> int:
        """Return the decodes and the prompt tokens that fit before the earliest due token."""
        view, begins_ns = self.view, forecast.begins_ns
        limit, free = view.limits.token_budget, free_tokens(view)
        within_ns = forecast.within_ns * SAFETY if forecast.within_ns != NEVER_NS else NEVER_NS
        within_ns = min(within_ns, forecast.longest_ns)
        decodes, favoured_tokens = beside.num_decodes, 0
        if forecast.prompts:
            beside, favoured_tokens = forecast.beside_favoured(beside)
        # A prompt that can end in this step must end in time. One that waits for blocks must become
        # urgent before it is late.
        tokens = 0
        for prompt in forecast.prompts:
            request, left_ns = prompt.request, prompt.due_ns - begins_ns
            if request.state is RequestState.WAITING and request.own_tokens > free:
                soon_ns = forecast.latest_start_ns(prompt) - begins_ns
                soon_ns -= urgent_ns(request, forecast, view, free=free)
                within_ns = min(within_ns, max(soon_ns, forecast.step_ns))
                continue
            if left_ns >= within_ns:
                continue
            tokens += forecast.prompt_tokens(request)
            step_ns = self.model.step_ns(beside.with_chunk(0, tokens))
            if step_ns > left_ns:
                break
            within_ns = max(step_ns, left_ns * SAFETY)
        if within_ns >= NEVER_NS:
            return limit
        requests = [p.request for p in forecast.prompts] or [*view.prefilling()]
        tokens = largest_prefill(
            self.model,
            beside=beside,
            target_ns=int(within_ns),
            most_tokens=max(0, limit - decodes - favoured_tokens),
            start=max((request.base_computed for request in requests), default=0),
        )
        return decodes + favoured_tokens + max(tokens, TRICKLE_TOKENS)

    def _favour(self, forecast: Forecast) -> None:
        """Keep the favoured request until it ends; then favour the oldest late one if overdue."""
        favoured = self._favoured
        if favoured is None or favoured.state in _ENDED:
            overdue_ns = self.view.now_ns - _AGEING_NS
            started = (r for r in self.view.prefilling() if r.rid in forecast.lost)
            late = min(chain(forecast.late, started), key=_by_arrival, default=None)
            # Those without a due time would wait for all others.
            undue = (p.request for p in forecast.prompts if p.due_ns >= NEVER_NS)
            oldest = min(undue, key=_by_arrival, default=None) if late is None else late
            overdue = oldest is not None and oldest.arrival_ns <= overdue_ns
            self._favoured = forecast.favoured = oldest if overdue else None

    # --- order -------------------------------------------------------------------------------
    def precedes(self, waiting: ScheduledRequest, prefilling: ScheduledRequest) -> bool:
        """The more urgent prompt first, and one for which evictions make room."""
        return waiting is self._evicts_for or self._order(waiting) < self._order(prefilling)

    def prefill_order(self, prefilling: Iterable[ScheduledRequest]) -> Iterable[ScheduledRequest]:
        """The most urgent first."""
        return sorted(prefilling, key=self._order)

    def eviction_key(self, request: ScheduledRequest) -> tuple[int, ...]:
        """Late requests first, then in the order of `EvictionOrder`."""
        group, level, due_ns, rid = self._urgency(request)
        if group != _IN_TIME:
            return group, 0, level, 0, due_ns, rid
        return group, *self._evictions.key(request), due_ns, rid

    def _order(self, request: ScheduledRequest) -> tuple[int, int, int, int]:
        """Return a sort key of prompts, lower first; see `PromptOrder`."""
        group, level, due_ns, rid = self._urgency(request)
        if request is self._late_turn:
            return (_FAVOURED, 1, due_ns, rid)
        if group == _IN_TIME:
            level = self._look().order.level(request, due_ns)
        return (group, level, due_ns, rid)

    def _urgency(self, request: ScheduledRequest) -> tuple[int, int, int, int]:
        """Return a sort key, lower first: favoured, in time by priority and due time, late."""
        forecast, rid = self._look(), request.rid
        if request is self._favoured:
            return (_FAVOURED, 0, 0, rid)
        if rid in forecast.lost:
            return (_LATE, 0, request.arrival_ns, rid)
        if request.batch is None and (
            request.base_computed < request.input_tokens + request.base_sampled
        ):
            due_ns = forecast.prompt(request).due_ns
        else:
            due_ns = int(min(NEVER_NS, forecast.begins_ns + forecast.slack_ns(request)))
        return (_IN_TIME, -request.priority, due_ns, rid)

    def displaced_by(self, request: ScheduledRequest) -> Iterable[ScheduledRequest]:
        """Late requests; for an urgent prompt also those that can pause, then lower levels."""
        self._look()
        return self._displacement.victims(request)

    # --- admit to the batch ------------------------------------------------------------------
    def may_admit(self, request: ScheduledRequest) -> bool:
        """True if the TPOT targets of running requests allow it."""
        if not self.view.num_running or request is self._favoured:
            return True
        return not self._look().breaks_pace(request)

    def reserved_tokens(self, request: ScheduledRequest) -> int:
        """The prompt and, after a preemption, the output so far."""
        return request.total_tokens

    def headroom_blocks(self) -> int:
        """A hundredth of all blocks, so that decodes can grow."""
        return headroom_blocks(self.view)

    def chunk_tokens(self, request: ScheduledRequest, remaining: int, budget_left: int) -> int:
        """The rest of the prompt; of the favoured request a share while others can be on time."""
        tokens = min(remaining, budget_left)
        is_favoured = request is self._favoured or request is self._late_turn
        if is_favoured and self._look().prompts:
            tokens = min(tokens, self._look().favoured_share)
        return tokens

    # --- admit to the queue ------------------------------------------------------------------
    def reject(self, request: ScheduledRequest) -> Rejection | None:
        """Reject a request that cannot be in time, or whose room is needed by better ones."""
        self._displaced = []
        targets = request.targets
        self._awaited.expect(request)
        if targets.ttft_ns is None and targets.e2e_ns is None:
            self._awaited.add(request)
            return None
        forecast = self._look()
        tokens = forecast.tokens_in_time(request)
        if tokens is not None and self.model.steps:
            self.predictor.expect(request, tokens)
        forecast.begins_ns = self._next_step_ns()
        retry = self._refused_prompts.accepts_invitation(request)
        decision = self._admission.decide(request, forecast, retry=retry, may_wait=self._may_wait())
        if not isinstance(decision, Refusal):
            self._displaced = decision
            self._awaited.add(request)
        elif decision.final:
            return self._rejection(request, decision)
        else:
            self._undecided.add(request, forecast, retry=retry)
        return None

    def _may_wait(self) -> bool:
        """Return True if one more request may wait for a decision.

        It takes a place of the queue. If the queue is full, it would displace another for it.
        """
        waiting, most = len(self.view.waiting), self.view.limits.max_waiting
        if not self.model.steps:
            return waiting < most
        return self._undecided.has_place(most) and waiting < most

    def waiting_to_reject(self) -> Iterable[Removal]:
        """Decide on requests that wait for it, the most important first."""
        if not self._undecided.by_rid:
            return
        self._forecast = None
        forecast, self._is_fresh = self._look(), True
        self._undecided.changed |= not (self.view.num_running or self.view.num_in_flight)
        for request, retry in self._undecided.decided_again(forecast):
            if request.state is not RequestState.WAITING:
                self._admission.forget_stays()
                continue
            self._awaited.expect(request)
            decision = self._admission.decide(request, forecast, retry=retry, again=True)
            if not isinstance(decision, Refusal):
                self._awaited.add(request)
                self._is_fresh = self._is_fresh and not decision
                yield from self._removals(decision)
            elif decision.final:
                yield Removal(request=request, rejection=self._rejection(request, decision))
            else:
                self._undecided.add(request, forecast, retry=retry)

    def _rejection(self, request: ScheduledRequest, refusal: Refusal) -> Rejection:
        """Return the rejection of a refused request, and remember its prompt."""
        targets = request.targets
        wait_s = min(max(1, math.ceil(refusal.wait_ns / NS_PER_S)), _MAX_RETRY_S)
        self._refused_prompts.add(request, self.view.now_ns + wait_s * NS_PER_S)
        target = "end-to-end time" if targets.ttft_ns is None else "time to first token"
        detail = f"the target for the {target} cannot be met now; try again later"
        if refusal.is_hopeless:
            detail = (
                "this engine cannot meet the latency targets of the request, even without others; "
                "send a shorter prompt, or allow more time"
            )
        return Rejection(
            reason="unattainable",
            detail=detail,
            retry_after_s=wait_s,
        )

    def displaced_waiting(self, request: ScheduledRequest) -> Iterable[Removal]:  # noqa: ARG002
        """Return the requests found by `reject` for the same new request."""
        displaced, self._displaced = self._displaced, []
        return self._removals(displaced)

    def _removals(self, displaced: Iterable[ScheduledRequest]) -> Iterable[Removal]:
        """Return the removals of displaced requests, and remember their prompts."""
        rejection = Rejection(
            reason="displaced",
            detail="a more important request arrived, and the latency targets can no longer be "
            "met; try again later",
            retry_after_s=1,
        )
        retry_ns = self.view.now_ns + rejection.retry_after_s * NS_PER_S
        for waiting in displaced:
            self._refused_prompts.add(waiting, retry_ns)
        return [Removal(request=waiting, rejection=rejection) for waiting in displaced]

    def requests_to_drop(self) -> Iterable[Removal]:
        """Drop every request that cannot meet its targets any more."""
        self._forecast = None
        if not self.view.has_work:
            return ()
        rejection = Rejection(
            reason="late",
            detail="the latency targets can no longer be met; try again later",
            retry_after_s=1,
        )
        return [
            Removal(request=request, rejection=rejection) for request in self._look().lost.values()
        ]

    # --- learn -------------------------------------------------------------------------------
    def after_step(self, outcome: StepOutcome) -> None:
        """Learn step times, output lengths and missed targets."""
        shape, step_ns = outcome.plan.shape, outcome.result.step_ns
        self._committed_ns = outcome.result.at_ns
        if shape.num_requests:
            slower = step_ns > self._step_factor * self.model.step_ns(shape)
            self._step_factor += _RATIO_STEP * (0.95 if slower else -0.05)
            self._step_factor = min(max(1.0, self._step_factor), _MAX_RATIO)
        self._undecided.changed |= not self.model.steps
        self.model.observe(shape, step_ns)
        if outcome.plan.chunks and shape.num_decodes:
            alone = StepShape.of(
                decodes=shape.num_decodes, decode_context_tokens=shape.decode_context_tokens
            )
            longer_ns = max(0, step_ns - self.model.step_ns(alone))
            self._prompt_time.observe(longer_ns, epoch=outcome.plan.decode_epoch)
        for progress in outcome.progress:
            if progress.finish_reason is not None:
                request = progress.request
                self._undecided.changed = True
                self.predictor.learn(request, self.view.running())
                self._admission.calibrate(request, outcome.result.at_ns)

    def before_cancel(self, request: ScheduledRequest) -> None:
        """Learn that the output would have been longer."""
        self._undecided.changed = True
        self.predictor.censor(request)

    @property
    def step_time_error(self) -> float:
        """Error of the step-time model."""
        return self.model.error

    @property
    def prediction_error(self) -> PredictionError:
        """Error of the length predictor."""
        return self.predictor.error

    # --- state before a step -----------------------------------------------------------------
    def _look(self) -> Forecast:
        """Return the state before the next step, made at its first use."""
        if self._forecast is None:
            self._forecast = Forecast(
                self.view,
                model=self.model,
                predictor=self.predictor,
                begins_ns=self._next_step_ns(),
                step_factor=self._step_factor,
                favoured=self._favoured,
                prompts_ns=self._prompt_time.mean_ns(self.view.decode_epoch),
                longest_ns=self._admission.longest_step_ns(self.view.now_ns),
                undecided=self._undecided.by_rid,
            )
            self._evictions = EvictionOrder(self.view, self._forecast)
            self._displacement = Displacement(self.view, self._forecast, self._urgency)
            self._admission.learn_late(self._forecast.lost.values())
        return self._forecast

    def _next_step_ns(self) -> int:
        """Predict the start of the next step, after those in flight."""
        at_ns = self._committed_ns
        for plan in self.view.plans_in_flight():
            at_ns = max(plan.at_ns, at_ns)
            if plan.shape.num_requests:
                at_ns += self.model.step_ns(plan.shape)
        return max(at_ns, self.view.now_ns)


def _by_arrival(request: ScheduledRequest) -> tuple[int, int]:
    return request.arrival_ns, request.rid

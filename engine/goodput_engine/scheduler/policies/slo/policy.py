"""Deadline-aware scheduling."""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, Final, Protocol

from goodput_core.spec.choices import Policy
from goodput_core.steptime import OnlineStepTime, StepShape, StepTimeForm, largest_prefill
from goodput_core.units import NS_PER_S
from goodput_engine.scheduler.admission import Rejection
from goodput_engine.scheduler.policies.slo.deadline import NEVER_NS, next_due_ns
from goodput_engine.scheduler.policies.slo.memory import peak_tokens
from goodput_engine.scheduler.policies.slo.queue import RankedQueue
from goodput_engine.scheduler.policies.slo.slack import (
    SAFETY,
    TRICKLE_TOKENS,
    look,
    next_step_ns,
    weigh,
)
from goodput_engine.scheduler.policy import Phase, SchedulingPolicy
from goodput_engine.scheduler.prediction import LearnedLengths

if TYPE_CHECKING:
    from collections.abc import Iterable

    from goodput_engine.scheduler.plan import StepOutcome
    from goodput_engine.scheduler.policies.slo.slack import StepSlack
    from goodput_engine.scheduler.prediction import LengthPredictor, PredictionError
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["SloPolicy"]

_FAVOUR: Final = 16
"""The favoured request gets a sixteenth of the token budget while others can be on time."""
_TURN: Final = 4
"""Requests past a deadline decode in every fourth step while others can be on time."""
_MAX_RETRY_S: Final = 60
_FAVOURED, _IN_TIME, _LATE = range(3)


class LearningStepTime(StepTimeForm, Protocol):
    """A step-time model that learns from measured steps.

    Args:
        error: recent mean of |measured / predicted − 1|.
    """

    error: float

    def observe(self, shape: StepShape, step_ns: int) -> None:
        """Learn the measured time of a step."""
        ...


class SloPolicy(SchedulingPolicy):
    """Serves requests that can still meet their SLO targets, the most urgent first.

    Before each step the policy examines every request (`slack`):

    - Waiting requests are ordered by deadline. If not all can be on time, the largest possible
      number of them goes first.
    - A step computes as many prompt tokens as fit before the earliest deadline of a running
      request. TPOT is a mean, so a request that is ahead of its schedule leaves time for prompts.
    - While others can be on time, requests past a deadline decode in every fourth step only and
      start after the others. The oldest of them is favoured with a share of every step, so no
      request starves.
    - If blocks run out, requests past a deadline are evicted first, then those with the most
      slack.
    - A request that cannot be on time is rejected at once.

    A request starts only if the tightest running TPOT target still holds with its decodes, and the
    KV pool with its predicted growth. The policy learns step times and output lengths while
    serving, and reports the error of both.

    Args:
        model: predicts step times; None for one that learns.
        predictor: predicts output lengths; None for one that learns.

    Source: this project. Earliest deadline and least slack: Liu and Layland, JACM 1973; the most
    jobs on time: Moore, Management Science 1968; predicted growth of running requests: Gong et
    al., "Past-Future Scheduler", ASPLOS 2025.
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
        self._outlook: StepSlack | None = None
        """The state of this step; None before its first use."""
        self._prompts = False
        """True if a prompt may be computed in this step."""
        self._favoured: int | None = None
        self._turn = 0

    def new_queue(self) -> RankedQueue:
        """Return the queue, which is sorted before every step."""
        return self._queue

    def phase(self) -> Phase:
        """Every kind of work, for some steps without the requests past a deadline."""
        view = self.view
        self._outlook = None
        self._prompts = bool(len(view.waiting) or view.num_prefilling)
        if not self._prompts:
            return Phase()
        outlook = self._see()
        self._favour(outlook)
        late = [r for r in outlook.late if r.rid != self._favoured]
        first = [r for r in outlook.late if r.rid == self._favoured]
        self._queue.rank([*first, *outlook.in_time, *late])
        self._turn += 1
        budget = self._token_budget(outlook)
        if not self._stands_back(outlook):
            return Phase(token_budget=budget)
        back = outlook.missed - {self._favoured}
        return Phase(token_budget=budget, only=lambda request: request.rid not in back)

    def _token_budget(self, outlook: StepSlack) -> int:
        """Return the decodes and the prompt tokens that fit before the earliest deadline."""
        limit = self.view.limits.token_budget
        if outlook.step_within_ns == NEVER_NS:
            return limit
        decodes = outlook.kept_decodes if self._stands_back(outlook) else outlook.all_decodes
        tokens = largest_prefill(
            self.model,
            beside=decodes,
            target_ns=int(outlook.step_within_ns * SAFETY),
            most_tokens=max(0, limit - decodes.num_decodes),
        )
        return decodes.num_decodes + max(tokens, TRICKLE_TOKENS)

    def may_admit(self, request: ScheduledRequest) -> bool:
        """True if the TPOT targets and the KV memory of running requests allow it."""
        view = self.view
        if not view.num_running or request.rid == self._favoured:
            return True
        outlook = self._see()
        tpot_ns = request.targets.tpot_ns
        tightest_ns = min(outlook.tightest_tpot_ns, NEVER_NS if tpot_ns is None else tpot_ns)
        if tightest_ns != NEVER_NS:
            # All running requests will decode, except those past a deadline.
            others = view.num_running - outlook.all_decodes.num_decodes
            decodes = outlook.kept_decodes.num_decodes + others
            context = outlook.kept_decodes.decode_context_tokens
            now, then = (
                self.model.step_ns(StepShape.of(decodes=n, decode_context_tokens=c))
                for n, c in ((decodes, context), (decodes + 1, context + request.total_tokens))
            )
            # A target that is missed without this request as well is no reason to delay it.
            if now <= tightest_ns * SAFETY < then:
                return False
        return self._bears_growth(request)

    def precedes(self, waiting: ScheduledRequest, prefilling: ScheduledRequest) -> bool:
        """The more urgent prompt first."""
        return self._urgency(waiting) < self._urgency(prefilling)

    def prefill_order(self, prefilling: Iterable[ScheduledRequest]) -> Iterable[ScheduledRequest]:
        """The most urgent first."""
        return sorted(prefilling, key=self._urgency)

    def reserved_tokens(self, request: ScheduledRequest) -> int:
        """The prompt and, after a preemption, the output so far."""
        return request.total_tokens

    def headroom_blocks(self) -> int:
        """A hundredth of all blocks, so that decodes can grow."""
        return self.view.total_blocks // 100

    def chunk_tokens(self, request: ScheduledRequest, remaining: int, budget_left: int) -> int:
        """The rest of the prompt; of the favoured request a share while others can be on time."""
        tokens = min(remaining, budget_left)
        if request.rid == self._favoured and self._see().pressed:
            tokens = min(tokens, max(TRICKLE_TOKENS, self.view.limits.token_budget // _FAVOUR))
        return tokens

    def eviction_key(self, request: ScheduledRequest) -> tuple[int, ...]:
        """Requests past a deadline first, then those with the most slack."""
        return self._urgency(request)

    def displaced_by(self, request: ScheduledRequest) -> Iterable[ScheduledRequest]:
        """For a request that can be on time: late requests, then those with slack to resume."""
        view, outlook = self.view, self._see()
        if self._urgency(request)[0] == _LATE:
            return ()
        rate, begins_ns = outlook.ns_per_prompt_token, outlook.begins_ns
        cost_ns = request.total_tokens * rate
        left_ns = next_due_ns(request, request.sampled_tokens, begins_ns) - begins_ns - cost_ns
        pinch = not outlook.late and left_ns < (request.targets.ttft_ns or 0) // 4
        going = [
            r
            for r in view.running()
            if r.rid != self._favoured
            and (
                r.rid in outlook.missed
                or (
                    pinch
                    and not r.preemptions
                    and r.sampled_tokens
                    and next_due_ns(r, r.sampled_tokens, begins_ns) - begins_ns
                    > 2 * (cost_ns + r.total_tokens * rate)
                )
            )
        ]
        return sorted(going, key=self._urgency, reverse=True)

    def reject(self, request: ScheduledRequest) -> Rejection | None:
        """Reject a request whose TTFT target would be missed behind the more urgent prompts."""
        view = self.view
        if request.targets.ttft_ns is None or not (len(view.waiting) or view.num_prefilling):
            return None
        # The state of the last step still holds for running requests; only the prompts change.
        outlook = self._see()
        prospects = weigh(
            view,
            self._tokens_left,
            begins_ns=next_step_ns(view, self.model),
            ns_per_prompt_token=outlook.ns_per_prompt_token,
            token_ns=outlook.token_ns,
            favoured=self._favoured,
            newcomer=request,
        )
        if request in prospects.in_time:
            return None
        wait_s = math.ceil(prospects.tokens_in_time * outlook.ns_per_prompt_token / NS_PER_S)
        return Rejection(
            reason="unattainable",
            detail="the target for the time to first token cannot be met now; try again later",
            retry_after_s=min(max(1, wait_s), _MAX_RETRY_S),
        )

    def after_step(self, outcome: StepOutcome) -> None:
        """Learn step times and output lengths."""
        self.model.observe(outcome.plan.shape, outcome.result.step_ns)
        for progress in outcome.progress:
            if progress.finish_reason is not None:
                self.predictor.learn(progress.request)

    @property
    def step_time_error(self) -> float:
        """Error of the step-time model."""
        return self.model.error

    @property
    def prediction_error(self) -> PredictionError:
        """Error of the length predictor."""
        return self.predictor.error

    # --- state of a step ---------------------------------------------------------------------
    def _see(self) -> StepSlack:
        """Return the state of this step, computed at its first use."""
        if self._outlook is None:
            self._outlook = look(self.view, self.model, self._tokens_left, favoured=self._favoured)
        return self._outlook

    def _tokens_left(self, request: ScheduledRequest) -> int:
        """Return the predicted remaining output tokens."""
        return self.predictor.output_tokens(request) - request.sampled_tokens

    def _favour(self, outlook: StepSlack) -> None:
        """Keep the favoured request until it ends; then favour the oldest late one."""
        view, rid = self.view, self._favoured
        if rid is None or not any(r.rid == rid for r in chain(view.running(), view.waiting)):
            self._favoured = outlook.late[0].rid if outlook.late else None

    def _stands_back(self, outlook: StepSlack) -> bool:
        """True if requests past a deadline are not scheduled in this step."""
        return bool(outlook.missed) and outlook.pressed and self._turn % _TURN != 0

    def _urgency(self, request: ScheduledRequest) -> tuple[int, int, int]:
        """Return a sort key, lower first: favoured, on time by deadline, late."""
        outlook, rid = self._see(), request.rid
        if rid == self._favoured:
            return (_FAVOURED, 0, rid)
        if rid in outlook.missed:
            return (_LATE, request.arrival_ns, rid)
        return (_IN_TIME, next_due_ns(request, request.sampled_tokens, outlook.begins_ns), rid)

    def _bears_growth(self, request: ScheduledRequest) -> bool:
        """True if the KV pool can hold this and all running requests until their predicted ends."""
        view = self.view
        if 2 * view.free_blocks > view.total_blocks:
            return True
        left, missed = self._tokens_left, self._see().missed
        # Requests past a deadline would be evicted.
        held = [(r.computed_tokens, left(r)) for r in view.running() if r.rid not in missed]
        held.append((request.total_tokens, left(request)))
        return peak_tokens(held) <= view.total_blocks * view.block_size

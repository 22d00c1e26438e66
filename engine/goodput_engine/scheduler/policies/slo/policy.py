"""Deadline-aware scheduling: ours."""

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
    from goodput_engine.scheduler.policies.slo.slack import Outlook
    from goodput_engine.scheduler.prediction import LengthPredictor, PredictionError
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["SloPolicy"]

_FAVOUR: Final = 16
"""The favoured late request gets a sixteenth of the token budget while others can be in time."""
_TURN: Final = 4
"""Who has missed decodes in every fourth step while others can be in time."""
_MAX_RETRY_S: Final = 60
_FAVOURED, _IN_TIME, _LATE = range(3)


class LearningStepTime(StepTimeForm, Protocol):
    """A law of step time that learns.

    Args:
        error: recent mean of |measured / predicted − 1|.
    """

    error: float

    def observe(self, shape: StepShape, step_ns: int) -> None:
        """A step of this shape took so long."""
        ...


class SloPolicy(SchedulingPolicy):
    """Spends the device on requests that can still keep their promises, the most urgent first.

    Before each step it examines every request (`slack`):

    - who waits is ordered by due time; where not all can be in time, as many as possible are;
    - a step takes as many prompt tokens as fit before the first token of a running request is
      due: TPOT is a mean, so who ran ahead leaves time for prompts;
    - who has missed a promise stands back while others can be in time: it decodes in every fourth
      step, and starts after them, but for the oldest, which is always favoured with a share of
      each step. So nobody starves;
    - for want of blocks, who has missed yields first, then who has the most time left;
    - a request that cannot be in time is refused at the door, at once.

    What it knows of the device and of answers it learns while serving: `model` how long steps
    take, `predictor` how long answers of a class are. Both tell their own error.

    Nobody starts whose decodes the tightest running TPOT, or whose expected growth the KV pool,
    could not bear.

    Args:
        model: of step times; None: one that learns.
        predictor: of the answers' lengths; None: one that learns.

    Source: ours. Earliest due date and least slack: Liu and Layland, JACM 1973; the most jobs in
    time: Moore, Management Science 1968; expected growth of running requests: Gong et al.,
    "Past-Future Scheduler", ASPLOS 2025.
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
        self._outlook: Outlook | None = None
        """Of this step; None: not looked yet."""
        self._prompts = False
        """Whether a prompt may be computed in this step."""
        self._favoured: int | None = None
        self._turn = 0

    def new_queue(self) -> RankedQueue:
        """Ranked anew before every step."""
        return self._queue

    def phase(self) -> Phase:
        """Look at everybody, if a prompt is to be computed; who has missed may have to wait."""
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

    def _token_budget(self, outlook: Outlook) -> int:
        """As many prompt tokens as fit before a running request's next token is due."""
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
        """Not where its decodes, or its growth, would take from those that run."""
        view = self.view
        if not view.num_running or request.rid == self._favoured:
            return True
        outlook = self._see()
        tpot_ns = request.targets.tpot_ns
        tightest_ns = min(outlook.tightest_tpot_ns, NEVER_NS if tpot_ns is None else tpot_ns)
        if tightest_ns != NEVER_NS:
            # All who run will decode; those who have missed can be held back.
            others = view.num_running - outlook.all_decodes.num_decodes
            decodes = outlook.kept_decodes.num_decodes + others
            context = outlook.kept_decodes.decode_context_tokens
            now, then = (
                self.model.step_ns(StepShape.of(decodes=n, decode_context_tokens=c))
                for n, c in ((decodes, context), (decodes + 1, context + request.total_tokens))
            )
            # A promise that is out of reach without this request is no reason to keep it out.
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
        """The whole prompt, and after a preemption the answer so far."""
        return request.total_tokens

    def headroom_blocks(self) -> int:
        """One block in a hundred, so that decodes can grow."""
        return self.view.total_blocks // 100

    def chunk_tokens(self, request: ScheduledRequest, remaining: int, budget_left: int) -> int:
        """As much as there is; a share for the favoured one while others can be in time."""
        tokens = min(remaining, budget_left)
        if request.rid == self._favoured and self._see().pressed:
            tokens = min(tokens, max(TRICKLE_TOKENS, self.view.limits.token_budget // _FAVOUR))
        return tokens

    def eviction_key(self, request: ScheduledRequest) -> tuple[int, ...]:
        """Who has missed yields first, then who has the most time left."""
        return self._urgency(request)

    def displaced_by(self, request: ScheduledRequest) -> Iterable[ScheduledRequest]:
        """For one who can be in time: who has missed, then who has time to come back."""
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
        """Turn away who could not get its first token in time, all who are more urgent counted."""
        view = self.view
        if request.targets.ttft_ns is None or not (len(view.waiting) or view.num_prefilling):
            return None
        # Who runs is as the last step found it; who comes changes the prompts alone.
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
            detail="the promised time to the first token cannot be kept now; try again later",
            retry_after_s=min(max(1, wait_s), _MAX_RETRY_S),
        )

    def after_step(self, outcome: StepOutcome) -> None:
        """Learn how long steps take, and how long answers are."""
        self.model.observe(outcome.plan.shape, outcome.result.step_ns)
        for progress in outcome.progress:
            if progress.finish_reason is not None:
                self.predictor.learn(progress.request)

    @property
    def step_time_error(self) -> float:
        """How wrong its model of step times is."""
        return self.model.error

    @property
    def prediction_error(self) -> PredictionError:
        """How wrong its predictor of lengths was."""
        return self.predictor.error

    # --- its own -----------------------------------------------------------------------------
    def _see(self) -> Outlook:
        """The look of this step; taken when it is first asked for."""
        if self._outlook is None:
            self._outlook = look(self.view, self.model, self._tokens_left, favoured=self._favoured)
        return self._outlook

    def _tokens_left(self, request: ScheduledRequest) -> int:
        """How many more tokens it is expected to get."""
        return self.predictor.output_tokens(request) - request.sampled_tokens

    def _favour(self, outlook: Outlook) -> None:
        """Keep the favoured request while it is there; else favour who has been late longest."""
        view, rid = self.view, self._favoured
        if rid is None or not any(r.rid == rid for r in chain(view.running(), view.waiting)):
            self._favoured = outlook.late[0].rid if outlook.late else None

    def _stands_back(self, outlook: Outlook) -> bool:
        """Whether those who have missed sit this step out."""
        return bool(outlook.missed) and outlook.pressed and self._turn % _TURN != 0

    def _urgency(self, request: ScheduledRequest) -> tuple[int, int, int]:
        """Smaller is more urgent: the favoured one, who can be in time by due time, the others."""
        outlook, rid = self._see(), request.rid
        if rid == self._favoured:
            return (_FAVOURED, 0, rid)
        if rid in outlook.missed:
            return (_LATE, request.arrival_ns, rid)
        return (_IN_TIME, next_due_ns(request, request.sampled_tokens, outlook.begins_ns), rid)

    def _bears_growth(self, request: ScheduledRequest) -> bool:
        """Whether the KV pool holds all who run, and this one, until they are expected to end."""
        view = self.view
        if 2 * view.free_blocks > view.total_blocks:
            return True
        left, missed = self._tokens_left, self._see().missed
        # Who has missed would yield.
        held = [(r.computed_tokens, left(r)) for r in view.running() if r.rid not in missed]
        held.append((request.total_tokens, left(request)))
        return peak_tokens(held) <= view.total_blocks * view.block_size

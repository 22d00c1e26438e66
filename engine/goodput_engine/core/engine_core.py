"""Scheduler and executor, stepped together: the same object in a process and in virtual time.

Everything is synchronous and every time is given: the core's process waits for the clock between
two calls, a simulation jumps. It knows nothing of sockets, HTTP or text.
"""

from __future__ import annotations

from collections import deque
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Final

from goodput_core.engine_state import EngineState, EngineStatistics
from goodput_core.slo.targets import Targets
from goodput_core.spec.choices import BudgetLaw
from goodput_engine.messages import Rejected, RequestOutput, StepOutputs
from goodput_engine.scheduler.pacing import Pacer
from goodput_engine.scheduler.policy import SchedulerLimits
from goodput_engine.scheduler.prediction import PredictionError
from goodput_engine.scheduler.request import ScheduledRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_engine.executor.base import Executor, RunsAhead
    from goodput_engine.messages import FollowManifest, SetLimits, Submit
    from goodput_engine.scheduler.fold import Folded
    from goodput_engine.scheduler.plan import StepOutcome, StepPlan
    from goodput_engine.scheduler.scheduler import Scheduler

__all__ = ["EngineCore"]

_NO_PREDICTIONS: Final = PredictionError()
_COUNTERS: Final = tuple(f.name for f in fields(EngineStatistics) if f.name != "shed")


class EngineCore:
    """One replica's core.

    Args:
        scheduler: decides the steps.
        executor: runs them.
        min_token_budget, max_token_budget: a budget set later is kept within these.
        on_step: told of every step when it is done.
        ahead: the executor again, where it can run ahead in virtual time.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        min_token_budget: int = 1,
        max_token_budget: int | None = None,
        on_step: Callable[[StepOutcome], None] | None = None,
        ahead: RunsAhead | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._min_token_budget = min_token_budget
        self._max_token_budget = max_token_budget
        self._on_step = on_step
        self._ahead = ahead if on_step is None else None
        self._plans: deque[StepPlan] = deque()
        # In steady decoding a request is told the same thing in every step.
        self._one_more: dict[int, RequestOutput] = {}
        self._limits_revision = 0
        self._draining = False
        self._refused_draining = 0
        self._changed = False

    def submit(self, submit: Submit, now_ns: int, *, keeps_blocks: bool = False) -> Rejected | None:
        """A new request; `step` afterwards, or nothing happens while the device is idle.

        Args:
            submit: it.
            now_ns: the time.
            keeps_blocks: when it is over, its blocks are kept until `let_go`.
        """
        if self._draining:
            self._refused_draining += 1
            return Rejected(
                rid=submit.rid,
                reason="draining",
                detail="this replica is shutting down; send the request elsewhere",
                retry_after_s=1,
            )
        refusal = self.scheduler.add(_scheduled(submit, keeps_blocks=keeps_blocks), now_ns)
        if refusal is not None:
            return Rejected(
                rid=submit.rid,
                reason=refusal.reason,
                detail=refusal.detail,
                retry_after_s=refusal.retry_after_s,
            )
        self._executor.add(submit)
        return None

    def take_over(self, submit: Submit, now_ns: int, *, emitted: int, first_token_ns: int) -> bool:
        """Reserve room for a request that got its first tokens elsewhere; see `HandOver`.

        Until `arrived` its blocks are being filled, and it computes nothing.
        """
        if self._draining:
            return False
        self.scheduler.now_ns = now_ns
        taken = self.scheduler.handover.take_over(
            _scheduled(submit), emitted=emitted, first_token_ns=first_token_ns
        )
        if taken:
            self._executor.add(submit)
        return taken

    def grow(self, rid: int, *, emitted: int) -> bool:
        """More of a request that was taken over is to come; whether there is room for it."""
        return self.scheduler.handover.grow(rid, emitted=emitted)

    def depart(self, rid: int) -> None:
        """A request that decodes here goes on elsewhere, and is kept until `let_go`."""
        self.scheduler.handover.depart(rid)

    def arrived(self, rid: int) -> None:
        """A request that was taken over is here; `step` afterwards."""
        self.scheduler.handover.arrived(rid)
        self._one_more[rid] = RequestOutput(rid=rid, new_tokens=1)

    def let_go(self, rid: int) -> None:
        """The blocks of a request that is over and kept them are free; `step` afterwards."""
        self.scheduler.handover.let_go(rid)
        self._forget([rid])

    def cancel(self, rid: int) -> None:
        """Nobody waits for this request any more; an unknown one is no error."""
        if self.scheduler.cancel(rid):
            self._forget([rid])
        self._changed = True

    def set_limits(self, message: SetLimits) -> None:
        """New bounds, in force from the next plan on; a revision older than the last is ignored."""
        if message.revision < self._limits_revision:
            return
        self._limits_revision = message.revision
        old, new = self.scheduler.limits, message.limits
        seqs = old.max_num_seqs if new.max_num_seqs is None else new.max_num_seqs
        waiting = old.max_waiting if new.max_waiting is None else new.max_waiting
        self.scheduler.set_limits(
            SchedulerLimits(
                token_budget=self._within_bounds(
                    old.token_budget if new.token_budget is None else new.token_budget
                ),
                max_num_seqs=max(1, seqs),
                max_waiting=max(0, waiting),
            )
        )
        pacer = self.scheduler.pacer
        if pacer is not None:
            law = None if new.budget_law is None else BudgetLaw(new.budget_law)
            pacer.change(law=law, safety_percent=new.safety_percent)
        self._changed = True

    def follow_manifest(self, message: FollowManifest) -> None:
        """The manifest's bounds and law have changed; in force from the next plan on."""
        scheduler, low = self.scheduler, message.min_token_budget
        self._min_token_budget = low
        self._max_token_budget = message.max_token_budget
        limits = scheduler.limits
        scheduler.set_limits(replace(limits, token_budget=self._within_bounds(limits.token_budget)))
        pacer = None
        if message.budget_law is not None and scheduler.policy.paced:
            law, pacer = BudgetLaw(message.budget_law), scheduler.pacer
            if pacer is None:
                pacer = Pacer(law, min_tokens=low)
            else:
                pacer.change(law=law, min_tokens=low)
        scheduler.pace(pacer)
        self._changed = True

    def drain(self) -> None:
        """Refuse what is new and finish what was accepted."""
        self._draining = True
        self.scheduler.end_input()
        self._changed = True

    def next_event_ns(self) -> int | None:
        """When `step` has something to do, unless a message comes before; None: only then."""
        event_ns = self._executor.next_event_ns()
        return self.scheduler.wake_ns() if event_ns is None else event_ns

    def advance(self, now_ns: int) -> StepOutcome | None:
        """Commit the oldest step if it is done, and plan as far ahead as the depth allows.

        One step at a time: while `next_event_ns` has passed, call again.
        """
        outcome, ready_ns = None, now_ns
        result = self._executor.collect(now_ns)
        if result is not None:
            ready_ns = result.at_ns
            outcome = self.scheduler.commit(self._plans.popleft(), result, ready_ns)
        while (plan := self.scheduler.plan(ready_ns)) is not None:
            self._plans.append(plan)
            self._executor.submit(plan, ready_ns)
        if outcome is not None:
            if outcome.released:
                self._forget(outcome.released)
            if self._on_step is not None:
                self._on_step(outcome)
        return outcome

    def fold(self, until_ns: int) -> Folded | None:
        """Take, at once, the steps from now on in which everybody just decodes.

        In virtual time alone, in place of `advance` at each `next_event_ns`:

            while (due_ns := core.next_event_ns()) is not None and due_ns < until_ns:
                folded = core.fold(until_ns)
                if folded is None:
                    outcome = core.advance(due_ns)

        It leaves the core as `advance` would have, so it may be tried at any time. Every member
        of the cohort got a token in each of these steps, and nothing else happened.

        Args:
            until_ns: only steps that are done before this instant are taken: the next one at
                which something comes from outside.

        Returns:
            What was done; None: the next step is one for `advance`.
        """
        if self._ahead is None:
            return None
        steady = self.scheduler.steady()
        folded = None if steady is None else self._ahead.run_ahead(steady, until_ns)
        if folded is not None:
            self.scheduler.now_ns = folded.ends_ns[-1]
            self._plans = deque(self.scheduler.plans_in_flight())
        return folded

    def step(self, now_ns: int) -> StepOutputs | None:
        """`advance`, and what the front is to be told of it, if anything."""
        outcome = self.advance(now_ns)
        if outcome is None:
            if not self._changed or self._plans:
                return None  # the next step's outputs will tell
            return self.no_step(now_ns)
        self._changed = False
        result = outcome.result
        return StepOutputs(
            at_ns=result.at_ns,
            step_ns=result.step_ns,
            outputs=self._outputs(outcome),
            state=self.state(result.at_ns),
        )

    def no_step(self, now_ns: int) -> StepOutputs:
        """What the front is told where no step has ended."""
        self._changed = False
        return StepOutputs(at_ns=now_ns, step_ns=0, outputs=[], state=self.state(now_ns))

    def state(self, now_ns: int) -> EngineState:
        """A snapshot."""
        scheduler, stats = self.scheduler, self.scheduler.stats
        waiting, limits = len(scheduler.waiting), scheduler.limits
        host_free, host_total = scheduler.host_blocks
        predicted = scheduler.prediction_error or _NO_PREDICTIONS
        pacer = scheduler.pacer
        latest = None if pacer is None else pacer.latest
        return EngineState(
            **{name: getattr(stats, name) for name in _COUNTERS},
            shed=stats.shed + self._refused_draining,
            at_ns=now_ns,
            running=scheduler.num_requests - waiting,
            waiting=waiting,
            kv_total_blocks=scheduler.total_blocks,
            kv_free_blocks=scheduler.free_blocks,
            kv_cached_blocks=scheduler.cached_blocks,
            block_size=scheduler.block_size,
            host_total_blocks=host_total,
            host_free_blocks=host_free,
            limits_revision=self._limits_revision,
            token_budget=limits.token_budget,
            max_num_seqs=limits.max_num_seqs,
            max_waiting=limits.max_waiting,
            draining=self._draining,
            behind_ns=self._executor.behind_ns,
            predicted_lengths=predicted.judged,
            length_error=predicted.mean_abs_log_ratio,
            step_time_error=(scheduler.policy if pacer is None else pacer).step_time_error,
            budget_law="" if pacer is None else pacer.law,
            safety_percent=0 if pacer is None else pacer.safety_percent,
            prompt_tokens=0 if latest is None else latest.tokens,
            prompt_reason="" if latest is None else latest.reason,
        )

    def _within_bounds(self, token_budget: int) -> int:
        if self._max_token_budget is not None:
            token_budget = min(token_budget, self._max_token_budget)
        return max(token_budget, self._min_token_budget)

    def _outputs(self, outcome: StepOutcome) -> list[RequestOutput]:
        one_more = self._one_more
        outputs = list(map(one_more.__getitem__, outcome.advanced))
        for progress in outcome.progress:
            request, reason = progress.request, progress.finish_reason
            first = request.output_tokens == 1
            outputs.append(
                RequestOutput(
                    rid=request.rid,
                    new_tokens=1,
                    finish_reason=reason,
                    cached_tokens=request.cached_tokens if first else 0,
                    first_scheduled_ns=request.first_scheduled_ns if first else 0,
                )
            )
            if reason is None:
                one_more[request.rid] = RequestOutput(rid=request.rid, new_tokens=1)
            else:
                one_more.pop(request.rid, None)
        return outputs

    def _forget(self, rids: list[int]) -> None:
        self._executor.forget(rids)
        for rid in rids:
            self._one_more.pop(rid, None)


def _scheduled(submit: Submit, *, keeps_blocks: bool = False) -> ScheduledRequest:
    """What the scheduler may know of a request."""
    return ScheduledRequest(
        rid=submit.rid,
        arrival_ns=submit.arrival_ns,
        input_tokens=submit.input_tokens,
        max_output_tokens=submit.max_output_tokens,
        block_hashes=submit.block_hashes,
        slo_class=submit.slo_class,
        targets=Targets(
            ttft_ns=submit.ttft_ns,
            tpot_ns=submit.tpot_ns,
            tbt_p99_ns=submit.tbt_p99_ns,
            e2e_ns=submit.e2e_ns,
        ),
        priority=submit.priority,
        keeps_blocks=keeps_blocks,
    )

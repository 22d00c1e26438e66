"""The engine core: scheduler and executor, stepped together in a process or in virtual time.

The code is synchronous, and every time is an argument. In real time, the core's process waits
between two calls until the next event is due. In virtual time, the caller jumps to the next event.
This module does not handle sockets, HTTP or text.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from goodput_core.engine_state import EngineState
from goodput_core.spec.choices import BudgetLaw
from goodput_engine.messages import Rejected, RequestOutput, StepOutputs
from goodput_engine.scheduler.policy import SchedulerLimits
from goodput_engine.scheduler.prefill_budget import PrefillBudget
from goodput_engine.scheduler.request_table import ScheduledRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_engine.executor.base import Executor, RunsAhead
    from goodput_engine.messages import FollowManifest, SetLimits, Submit
    from goodput_engine.scheduler.admission import Rejection
    from goodput_engine.scheduler.fast_forward import SkippedSteps
    from goodput_engine.scheduler.plan import StepOutcome, StepPlan
    from goodput_engine.scheduler.scheduler import Scheduler

__all__ = ["EngineCore"]


class EngineCore:
    """The core of one replica.

    Args:
        scheduler: plans the steps.
        executor: runs the steps.
        min_token_budget, max_token_budget: bounds to which later token budgets are clamped; None
            as the maximum for no upper bound.
        on_step: called with the outcome of every step.
        ahead: the executor again if it can run ahead in virtual time; else None.
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
        # Steps that are skipped have no outcomes for `on_step`.
        self._ahead = ahead if on_step is None else None
        self._plans: deque[StepPlan] = deque()
        # True after a step of an executor that computes in `collect`, until the next plan.
        self._plan_is_due = False
        # The message that reports one more token of a request, by rid; equal for every such step,
        # so it is built once per request.
        self._one_token_outputs: dict[int, RequestOutput] = {}
        self._limits_revision = 0
        self._draining = False
        self._rejected_draining = 0
        self._failed: list[Rejected] = []
        self._changed = False

    # --- requests ----------------------------------------------------------------------------
    def submit(self, submit: Submit, now_ns: int, *, holds_blocks: bool = False) -> Rejected | None:
        """Enqueue a new request; call `step` afterwards, even if no event is due.

        Args:
            submit: the request.
            now_ns: the current time.
            holds_blocks: True to hold the request's blocks after its end, until `release_held`.

        Returns:
            The rejection; None if the request was enqueued.
        """
        if self._draining:
            self._rejected_draining += 1
            return Rejected(
                rid=submit.rid,
                reason="draining",
                detail="this replica is shutting down; send the request elsewhere",
                retry_after_s=1,
            )
        rejection = self.scheduler.add(_scheduled(submit, holds_blocks=holds_blocks), now_ns)
        if rejection is not None:
            return _rejected(submit.rid, rejection)
        self._executor.add(submit)
        return None

    def take_rejected(self) -> list[Rejected]:
        """Return the rejections of requests that were removed after their admission.

        Call it after `submit` and after each step: a new request can displace a waiting one, a plan
        can drop late ones, and a step can fail to compute one.
        """
        rejected, self._failed = self._failed, []
        for removal in self.scheduler.admission.take_removed():
            request = removal.request
            rejected.append(_rejected(request.rid, removal.rejection))
            if not request.blocks:  # otherwise a later outcome releases it
                self._forget([request.rid])
        return rejected

    def cancel(self, rid: int) -> None:
        """Cancel a request; do nothing if it is unknown."""
        if self.scheduler.cancel(rid):
            self._forget([rid])
        self._changed = True

    def cancel_all(self, belongs: Callable[[int], bool]) -> None:
        """Cancel the requests whose rid belongs to an HTTP process that has ended."""
        for rid in filter(belongs, self.scheduler.rids):
            self.cancel(rid)

    # --- KV transfer, in virtual time --------------------------------------------------------
    def reserve_transfer(
        self, submit: Submit, now_ns: int, *, emitted: int, first_token_ns: int
    ) -> bool:
        """Reserve blocks for a request that has already emitted tokens on another replica.

        The request is not scheduled until `finish_transfer`. See `KVTransfer.reserve` for the
        arguments and the result.
        """
        if self._draining:
            return False
        self.scheduler.now_ns = now_ns
        reserved = self.scheduler.transfer.reserve(
            _scheduled(submit), emitted=emitted, first_token_ns=first_token_ns
        )
        if reserved:
            self._executor.add(submit)
        return reserved

    def grow_transfer(self, rid: int, *, emitted: int) -> bool:
        """Extend a reservation to `emitted` output tokens.

        Returns:
            False if too few blocks are free.
        """
        return self.scheduler.transfer.grow(rid, emitted=emitted)

    def finish_transfer(self, rid: int) -> None:
        """Start decoding a transferred request; call `step` afterwards."""
        self.scheduler.transfer.finish(rid)
        self._one_token_outputs[rid] = RequestOutput(rid=rid, new_tokens=1)

    def detach(self, rid: int) -> None:
        """Stop scheduling a request that continues elsewhere, but hold its blocks."""
        self.scheduler.transfer.detach(rid)

    def release_held(self, rid: int) -> None:
        """Free the blocks of a held request; call `step` afterwards."""
        self.scheduler.transfer.release(rid)
        self._forget([rid])

    # --- limits ------------------------------------------------------------------------------
    def set_limits(self, message: SetLimits) -> None:
        """Set the limits from the next plan on; ignore a revision older than the last one."""
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
        prefill_budget = self.scheduler.prefill_budget
        if prefill_budget is not None:
            law = None if new.budget_law is None else BudgetLaw(new.budget_law)
            prefill_budget.change(law=law, safety_percent=new.safety_percent)
        self._changed = True

    def follow_manifest(self, message: FollowManifest) -> None:
        """Apply the bounds and the law of a changed manifest from the next plan on."""
        scheduler, low = self.scheduler, message.min_token_budget
        self._min_token_budget = low
        self._max_token_budget = message.max_token_budget
        limits = scheduler.limits
        scheduler.set_limits(replace(limits, token_budget=self._within_bounds(limits.token_budget)))
        prefill_budget = None
        if message.budget_law is not None and scheduler.policy.uses_prefill_budget:
            law, prefill_budget = BudgetLaw(message.budget_law), scheduler.prefill_budget
            if prefill_budget is None:
                prefill_budget = PrefillBudget(law, min_tokens=low)
            else:
                prefill_budget.change(law=law, min_tokens=low)
        scheduler.set_prefill_budget(prefill_budget)
        self._changed = True

    def drain(self) -> None:
        """Reject new requests and finish the accepted ones."""
        self._draining = True
        self.scheduler.end_input()
        self._changed = True

    # --- steps -------------------------------------------------------------------------------
    def next_event_ns(self) -> int | None:
        """Return the time of the next call of `step`.

        Returns:
            None if no call is due before the next message.
        """
        if self._plan_is_due:
            return self.scheduler.now_ns
        event_ns = self._executor.next_event_ns()
        return self.scheduler.wake_ns() if event_ns is None else event_ns

    @property
    def computes_in_collect(self) -> bool:
        """True if a step is computed within a call of `step`."""
        return self._executor.computes_in_collect

    def advance(self, now_ns: int) -> StepOutcome | None:
        """Commit the oldest step if it is done, and plan as far ahead as the depth allows.

        A call commits at most one step. Call again while `next_event_ns` is not after the current
        time. If the executor computes in `collect`, the plans after a step are made in the next
        call, so that they contain the requests that arrived during the step.
        """
        if self._plan_is_due:
            self._plan_is_due = False
            self._plan(now_ns)
        outcome, ready_ns = None, now_ns
        result = self._executor.collect(now_ns)
        if result is not None:
            ready_ns = result.at_ns
            for rid, failure in result.failed.items():
                self._fail(Rejected(rid=rid, **failure._asdict()))
            outcome = self.scheduler.commit(self._plans.popleft(), result, ready_ns)
        if outcome is not None and self._executor.computes_in_collect:
            self._plan_is_due = True
        else:
            self._plan(ready_ns)
        if outcome is not None:
            if outcome.released:
                self._forget(outcome.released)
            if self._on_step is not None:
                self._on_step(outcome)
        return outcome

    def _plan(self, ready_ns: int) -> None:
        while (plan := self.scheduler.plan(ready_ns)) is not None:
            self._plans.append(plan)
            self._executor.submit(plan, ready_ns)

    def _fail(self, rejected: Rejected) -> None:
        """End a request whose token is missing in the result of a step."""
        self._failed.append(rejected)
        self.scheduler.withhold(rejected.rid)
        self.cancel(rejected.rid)

    def fast_forward(self, until_ns: int) -> SkippedSteps | None:
        """Take the following decode-only steps at once, in virtual time.

        It replaces `advance` at each `next_event_ns`:

            while (due_ns := core.next_event_ns()) is not None and due_ns < until_ns:
                skipped = core.fast_forward(until_ns)
                if not skipped:
                    outcome = core.advance(due_ns)

        The resulting state is the same as after `advance`, so a call is safe at any time. In each
        of these steps every member of the decode batch gained one token, and nothing else changed.

        Args:
            until_ns: only steps that end before this time are taken. It must not be after the
                next external event, such as an arrival.

        Returns:
            The steps; None if the next step needs `advance`.
        """
        if self._ahead is None:
            return None
        steady = self.scheduler.fast_forward.steady()
        skipped = None if steady is None else self._ahead.run_ahead(steady, until_ns)
        if skipped is not None:
            self.scheduler.now_ns = skipped.ends_ns[-1]
            self._plans = deque(self.scheduler.plans_in_flight())
        return skipped

    def step(self, now_ns: int) -> StepOutputs | None:
        """Call `advance` and return the message for the server; None if nothing changed."""
        outcome = self.advance(now_ns)
        if outcome is None:
            if not self._changed or self._plans:
                return None  # the outputs of the next step will carry the change
            return self.idle_outputs(now_ns)
        self._changed = False
        result = outcome.result
        return StepOutputs(
            at_ns=result.at_ns,
            step_ns=result.step_ns,
            outputs=self._outputs(outcome),
            state=self.state(result.at_ns),
        )

    def idle_outputs(self, now_ns: int) -> StepOutputs:
        """Return a message for the server that has the state but no step."""
        self._changed = False
        return StepOutputs(at_ns=now_ns, step_ns=0, outputs=[], state=self.state(now_ns))

    def state(self, now_ns: int) -> EngineState:
        """Return a snapshot of the core's state."""
        scheduler, budget = self.scheduler, self.scheduler.prefill_budget
        waiting, limits = len(scheduler.waiting), scheduler.limits
        host_free, host_total = scheduler.host_blocks
        lengths = scheduler.policy.prediction_error
        decision = None if budget is None else budget.latest
        counters = scheduler.stats.counters()
        counters["shed"] += self._rejected_draining
        return EngineState(
            **counters,
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
            predicted_lengths=lengths.judged,
            length_error=lengths.mean_abs_log_ratio,
            step_time_error=(scheduler.policy if budget is None else budget).step_time_error,
            budget_law="" if budget is None else budget.law,
            safety_percent=0 if budget is None else budget.safety_percent,
            prompt_tokens=0 if decision is None else decision.tokens,
            prompt_reason="" if decision is None else decision.reason,
            displaceable=scheduler.admission.displaceable(),
        )

    def _within_bounds(self, token_budget: int) -> int:
        if self._max_token_budget is not None:
            token_budget = min(token_budget, self._max_token_budget)
        return max(token_budget, self._min_token_budget)

    def _outputs(self, outcome: StepOutcome) -> list[RequestOutput]:
        one_token_outputs, token_ids = self._one_token_outputs, outcome.result.token_ids
        logprobs = outcome.result.logprobs
        if token_ids:
            outputs = [
                RequestOutput(
                    rid=rid,
                    new_tokens=1,
                    token_ids=[token_ids[rid]],
                    logprobs=[logprobs[rid]] if rid in logprobs else [],
                )
                for rid in outcome.advanced
            ]
        else:
            outputs = list(map(one_token_outputs.__getitem__, outcome.advanced))
        for progress in outcome.progress:
            request, reason = progress.request, progress.finish_reason
            first = request.output_tokens == 1
            outputs.append(
                RequestOutput(
                    rid=request.rid,
                    new_tokens=1,
                    token_ids=[token_ids[request.rid]] if token_ids else [],
                    logprobs=[logprobs[request.rid]] if request.rid in logprobs else [],
                    finish_reason=reason,
                    cached_tokens=request.cached_tokens if first else 0,
                    first_scheduled_ns=request.first_scheduled_ns if first else 0,
                )
            )
            if reason is None:
                one_token_outputs[request.rid] = RequestOutput(rid=request.rid, new_tokens=1)
            else:
                one_token_outputs.pop(request.rid, None)
        return outputs

    def _forget(self, rids: list[int]) -> None:
        self._executor.forget(rids)
        for rid in rids:
            self._one_token_outputs.pop(rid, None)


def _rejected(rid: int, rejection: Rejection) -> Rejected:
    return Rejected(
        rid=rid,
        reason=rejection.reason,
        detail=rejection.detail,
        retry_after_s=rejection.retry_after_s,
    )


def _scheduled(submit: Submit, *, holds_blocks: bool = False) -> ScheduledRequest:
    """Return the part of a request that the scheduler is allowed to see."""
    return ScheduledRequest(
        rid=submit.rid,
        arrival_ns=submit.arrival_ns,
        input_tokens=submit.input_tokens,
        max_output_tokens=submit.max_output_tokens,
        block_hashes=submit.block_hashes,
        slo_class=submit.slo_class,
        targets=submit.targets,
        priority=submit.priority,
        weight=submit.weight,
        holds_blocks=holds_blocks,
    )

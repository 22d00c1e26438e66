"""Schedulers, requests and steps for tests: small defaults, every part can be chosen.

`SteppedScheduler` and `SteppedCore` also keep the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from goodput_core.slo.targets import Targets
from goodput_core.spec.choices import LateRequests, Preemption
from goodput_engine.core.engine_core import EngineCore
from goodput_engine.kv.blocks import BlockPool, HostPool
from goodput_engine.messages import Configure
from goodput_engine.scheduler.plan import StepOutcome, StepPlan, StepResult
from goodput_engine.scheduler.policies.registry import build_policy
from goodput_engine.scheduler.policy import SchedulerLimits
from goodput_engine.scheduler.request_table import ScheduledRequest
from goodput_engine.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_engine.messages import Submit
    from goodput_engine.scheduler.admission import Rejection
    from goodput_engine.scheduler.policy import SchedulingPolicy

__all__ = [
    "NO_TARGETS",
    "SteppedCore",
    "SteppedScheduler",
    "add_request",
    "commit_plan",
    "make_configure",
    "make_scheduler",
    "plan_chunks",
    "take_step",
]


NO_TARGETS = Targets()


def make_scheduler(
    policy: SchedulingPolicy | str = "sarathi",
    *,
    blocks: int = 100,
    block_size: int = 16,
    budget: int = 100,
    seqs: int = 8,
    waiting: int = 100,
    model: int = 1000,
    depth: int = 0,
    host: int = 0,
    ns_per_block: int = 1,
    preemption: Preemption | None = None,
    prefill_chunk: int | None = None,
    late_requests: LateRequests = LateRequests.FINISH,
) -> Scheduler:
    """Build a scheduler; with host blocks it swaps unless another preemption is given."""
    if preemption is None:
        preemption = Preemption.SWAP if host else Preemption.RECOMPUTE
    return Scheduler(
        policy=build_policy(policy) if isinstance(policy, str) else policy,
        kv=BlockPool(total_blocks=blocks, block_size=block_size),
        limits=SchedulerLimits(token_budget=budget, max_num_seqs=seqs, max_waiting=waiting),
        max_model_tokens=model,
        depth=depth,
        host=HostPool(total_blocks=host, ns_per_block=ns_per_block),
        preemption=preemption,
        prefill_chunk_tokens=prefill_chunk,
        late_requests=late_requests,
    )


def make_configure(**changes: Any) -> Configure:
    """Return the configuration of a core; the token budget is its upper bound unless given."""
    values: dict[str, Any] = {
        "device": "unit",
        "policy": "sarathi",
        "preemption": "recompute",
        "token_budget": 100,
        "min_token_budget": 1,
        "max_num_seqs": 8,
        "max_waiting": 100,
        **changes,
    }
    return Configure(**{"max_token_budget": values["token_budget"], **values})


def add_request(
    scheduler: Scheduler,
    rid: int,
    tokens: int,
    max_output: int | None,
    *,
    at_ns: int = 0,
    arrival_ns: int | None = None,
    priority: int = 0,
    hashes: Sequence[int] = (),
    targets: Targets = NO_TARGETS,
) -> ScheduledRequest:
    """Add an accepted request; it arrives at its rid, in nanoseconds, unless given."""
    request = ScheduledRequest(
        rid=rid,
        arrival_ns=rid if arrival_ns is None else arrival_ns,
        input_tokens=tokens,
        max_output_tokens=max_output,
        priority=priority,
        block_hashes=hashes,
        targets=targets,
    )
    assert scheduler.add(request, at_ns) is None
    return request


def commit_plan(
    scheduler: Scheduler,
    plan: StepPlan,
    *,
    at_ns: int = 0,
    step_ns: int = 1,
    stopped: Sequence[int] = (),
) -> StepOutcome:
    """Commit a plan in which these requests stopped, and check every invariant."""
    result = StepResult(
        plan_id=plan.plan_id,
        at_ns=at_ns,
        step_ns=step_ns,
        stopped=dict.fromkeys(stopped, "stop"),
    )
    outcome = scheduler.commit(plan, result, at_ns)
    scheduler.check_integrity()
    return outcome


def take_step(
    scheduler: Scheduler, *, at_ns: int = 0, step_ns: int = 1, stopped: Sequence[int] = ()
) -> StepPlan:
    """Plan and commit one step, and return its plan."""
    plan = scheduler.plan(at_ns)
    assert plan is not None
    commit_plan(scheduler, plan, at_ns=at_ns, step_ns=step_ns, stopped=stopped)
    return plan


def plan_chunks(plan: StepPlan) -> list[tuple[int, int]]:
    """Return (request, tokens) of the chunks of a plan."""
    return [(chunk.rid, chunk.num_tokens) for chunk in plan.chunks]


@dataclass(kw_only=True)
class SteppedScheduler:
    """A scheduler and a clock that each step moves forward.

    Args:
        scheduler: a scheduler without requests.
        step_ns: length of a step, unless `step` gets another.

    Attributes:
        now_ns: time of the latest commit.
        token_times_ns: times of the tokens of each request.
        in_flight: plans that are not committed yet, the oldest first.
    """

    scheduler: Scheduler
    step_ns: int = 1
    now_ns: int = 0
    token_times_ns: dict[int, list[int]] = field(default_factory=dict)
    in_flight: list[StepPlan] = field(default_factory=list)

    def offer(
        self,
        rid: int,
        tokens: int,
        max_output: int,
        *,
        priority: int = 0,
        targets: Targets = NO_TARGETS,
    ) -> ScheduledRequest | Rejection:
        """Submit a request that arrives now."""
        request = ScheduledRequest(
            rid=rid,
            arrival_ns=self.now_ns,
            input_tokens=tokens,
            max_output_tokens=max_output,
            priority=priority,
            targets=targets,
        )
        return self.scheduler.add(request, self.now_ns) or request

    def add(
        self,
        rid: int,
        tokens: int,
        max_output: int,
        *,
        priority: int = 0,
        targets: Targets = NO_TARGETS,
    ) -> ScheduledRequest:
        """Submit a request that arrives now and is accepted."""
        request = self.offer(rid, tokens, max_output, priority=priority, targets=targets)
        assert isinstance(request, ScheduledRequest)
        return request

    def step(self, step_ns: int | None = None) -> StepPlan:
        """Plan as far ahead as the depth allows, commit the oldest plan, and return it."""
        while (plan := self.scheduler.plan(self.now_ns)) is not None:
            self.in_flight.append(plan)
        assert self.in_flight, "no request can run"
        plan = self.in_flight.pop(0)
        length_ns = self.step_ns if step_ns is None else step_ns
        self.now_ns += length_ns
        outcome = commit_plan(self.scheduler, plan, at_ns=self.now_ns, step_ns=length_ns)
        for rid in [*outcome.advanced, *(p.request.rid for p in outcome.progress)]:
            self.token_times_ns.setdefault(rid, []).append(self.now_ns)
        return plan

    def start(self, step_ns: int | None = None) -> list[int]:
        """Take a step, and return the requests that it admitted."""
        return [admitted.rid for admitted in self.step(step_ns).admitted]

    def run(self) -> None:
        """Take steps until all requests have finished."""
        while self.scheduler.has_work:
            self.step()

    def gaps_ns(self, rid: int) -> list[int]:
        """Return the times between the tokens of a request."""
        return [later - earlier for earlier, later in pairwise(self.token_times_ns[rid])]


@dataclass(kw_only=True)
class SteppedCore:
    """A core in virtual time, which moves from event to event.

    Args:
        core: a core without requests.

    Attributes:
        now_ns: time of the latest event.
        outcomes: outcomes of the committed steps.
    """

    core: EngineCore
    now_ns: int = 0
    outcomes: list[StepOutcome] = field(default_factory=list)

    def submit(self, submit: Submit) -> None:
        """Submit a request that is accepted."""
        assert self.core.submit(submit, self.now_ns) is None

    def wake(self) -> None:
        """Commit the step that is done by now, and plan the next ones."""
        outcome = self.core.advance(self.now_ns)
        if outcome is not None:
            self.outcomes.append(outcome)

    def advance(self, before_ns: int | None = None) -> bool:
        """Move to the next event; return False if there is none, or none before that time."""
        event_ns = self.core.next_event_ns()
        if event_ns is None or (before_ns is not None and event_ns >= before_ns):
            return False
        self.now_ns = event_ns
        self.wake()
        return True

    def move_to(self, at_ns: int) -> None:
        """Take all events before a time, and move to it."""
        while self.advance(at_ns):
            pass
        self.now_ns = at_ns

    def run(self) -> None:
        """Take all events."""
        self.wake()
        while self.advance():
            pass

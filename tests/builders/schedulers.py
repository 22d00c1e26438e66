"""Schedulers, requests and steps for tests: small defaults, every part can be chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from goodput_core.slo.targets import Targets
from goodput_core.spec.choices import LateRequests, Preemption
from goodput_engine.kv.blocks import BlockPool, HostPool
from goodput_engine.messages import Configure
from goodput_engine.scheduler.plan import StepResult
from goodput_engine.scheduler.policies.registry import build_policy
from goodput_engine.scheduler.policy import SchedulerLimits
from goodput_engine.scheduler.request_table import ScheduledRequest
from goodput_engine.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_engine.scheduler.plan import StepOutcome, StepPlan
    from goodput_engine.scheduler.policy import SchedulingPolicy

__all__ = [
    "NO_TARGETS",
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

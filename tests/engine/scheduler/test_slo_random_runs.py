"""Random runs of `slo`: no requests, memory, device or cancellations break the scheduler."""

from __future__ import annotations

import random

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples

from goodput_core.slo.targets import Targets
from goodput_core.spec.choices import LateRequests, Preemption
from goodput_engine.kv.blocks import BlockPool, HostPool
from goodput_engine.scheduler.plan import StepPlan, StepResult
from goodput_engine.scheduler.policies.slo.policy import SloPolicy
from goodput_engine.scheduler.policy import SchedulerLimits
from goodput_engine.scheduler.request_table import ScheduledRequest
from goodput_engine.scheduler.scheduler import Scheduler


def _scheduler(draw: random.Random) -> Scheduler:
    return Scheduler(
        policy=SloPolicy(),
        kv=BlockPool(total_blocks=draw.choice([3, 8, 30, 200]), block_size=draw.choice([1, 4, 16])),
        limits=SchedulerLimits(
            token_budget=draw.choice([1, 16, 64, 512]),
            max_num_seqs=draw.choice([1, 3, 16]),
            max_waiting=draw.choice([0, 2, 50]),
        ),
        max_model_tokens=draw.choice([50, 2000]),
        depth=draw.randint(0, 2),
        host=HostPool(
            total_blocks=draw.choice([0, 5, 100]), ns_per_block=draw.choice([1, 100_000])
        ),
        preemption=draw.choice(list(Preemption)),
        late_requests=draw.choice(list(LateRequests)),
    )


def _request(draw: random.Random, rid: int, now_ns: int, unit_ns: int) -> ScheduledRequest:
    def target(share: float) -> int | None:
        return draw.choice([1, 5, 50, 1000]) * unit_ns if draw.random() < share else None

    return ScheduledRequest(
        rid=rid,
        arrival_ns=now_ns,
        input_tokens=draw.choice([1, 5, 40, 300]),
        max_output_tokens=draw.choice([None, 1, 2, 30, 500]),
        slo_class=draw.choice(["chat", "batch"]),
        targets=Targets(
            ttft_ns=target(0.6), tpot_ns=target(0.5), tbt_p99_ns=target(0.2), e2e_ns=target(0.4)
        ),
        priority=draw.choice([0, 0, 0, 1, -5, 99]),
        weight=draw.choice([1, 1, 5, 1000]),
    )


def _run(draw: random.Random) -> None:
    scheduler = _scheduler(draw)
    # A unit of a nanosecond makes steps and copies as short as they can be.
    unit_ns, noise = draw.choice([1, 1000, 1_000_000]), draw.choice([0, 0.5, 3])
    now_ns = rid = 0
    in_flight: list[StepPlan] = []
    for _ in range(draw.randint(5, 200)):
        for _ in range(draw.choice([0, 0, 1, 1, 3, 20])):
            rid += 1
            scheduler.add(_request(draw, rid, now_ns, unit_ns), now_ns)
        if rid and draw.random() < 0.1:
            scheduler.cancel(draw.randint(1, rid))
        while (plan := scheduler.plan(now_ns)) is not None:
            in_flight.append(plan)
        scheduler.admission.take_removed()
        if not in_flight:
            now_ns += draw.choice([1, unit_ns, 50 * unit_ns])
            continue
        plan = in_flight.pop(0)
        work_ns = unit_ns + plan.shape.num_tokens * unit_ns // 20
        step_ns = max(1, round(work_ns * (1 + noise * draw.random())))
        now_ns += step_ns
        result = StepResult(plan_id=plan.plan_id, at_ns=now_ns, step_ns=step_ns, stopped={})
        scheduler.commit(plan, result, now_ns)
        scheduler.check_integrity()


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 1_000_000))
@example(seed=25279)  # a request that finds no host memory after the policy has admitted it
def test_no_random_run_breaks_the_scheduler(seed: int) -> None:
    _run(random.Random(seed))

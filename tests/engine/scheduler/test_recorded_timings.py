"""Decisions depend on what comes back from a device, not on what kind of device it is."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples

from goodput_core.slo.targets import Targets
from goodput_core.spec.choices import Preemption
from goodput_core.steptime import RooflineForm
from goodput_engine.core.engine_core import EngineCore
from goodput_engine.device.load import load_profile
from goodput_engine.executor.emulated import EmulatedExecutor
from goodput_engine.kv.blocks import BlockPool, HostPool
from goodput_engine.messages import ExecutorInput, Submit
from goodput_engine.scheduler.plan import StepPlan, StepResult
from goodput_engine.scheduler.policies.registry import POLICIES, build_policy
from goodput_engine.scheduler.policy import SchedulerLimits
from goodput_engine.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from goodput_engine.executor.base import Executor

_DEVICE = replace(
    load_profile("unit"),
    form=RooflineForm(
        c0_ns=5e6, c1_ns_per_token=70e3, c2_ns_per_context_token=900, c4_ns_per_request=11e3
    ),
    host_ns_per_step=400_000,
    block_size=4,
    max_model_tokens=1000,
)


@dataclass
class Recording:
    """An executor that runs plans elsewhere and notes what came back."""

    device: EmulatedExecutor
    plans: list[StepPlan] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)
    behind_ns: int = 0
    computes_in_collect: bool = False
    default_depth: int = 0

    def add(self, submit: Submit) -> None:
        self.device.add(submit)

    def forget(self, rids: Iterable[int]) -> None:
        self.device.forget(rids)

    def submit(self, plan: StepPlan, ready_ns: int) -> None:
        self.plans.append(plan)
        self.device.submit(plan, ready_ns)

    def next_event_ns(self) -> int | None:
        return self.device.next_event_ns()

    def collect(self, now_ns: int) -> StepResult | None:
        result = self.device.collect(now_ns)
        if result is not None:
            self.results.append(result)
        return result


@dataclass
class RecordedTimes:
    """An executor that knows nothing of devices and gives back what was noted."""

    results: deque[StepResult]
    plans: list[StepPlan] = field(default_factory=list)
    under_way: int = 0
    behind_ns: int = 0
    computes_in_collect: bool = False
    default_depth: int = 0

    def add(self, submit: Submit) -> None:
        """It needs no lengths: where answers end was noted."""

    def forget(self, rids: Iterable[int]) -> None:
        """Likewise."""

    def submit(self, plan: StepPlan, ready_ns: int) -> None:
        self.plans.append(plan)
        self.under_way += 1

    def next_event_ns(self) -> int | None:
        return self.results[0].at_ns if self.under_way else None

    def collect(self, now_ns: int) -> StepResult | None:
        if not self.under_way or self.results[0].at_ns > now_ns:
            return None
        self.under_way -= 1
        return self.results.popleft()


def _serve(
    executor: Executor, submits: Sequence[Submit], policy: str, preemption: Preemption, depth: int
) -> None:
    scheduler = Scheduler(
        policy=build_policy(policy),
        kv=BlockPool(total_blocks=24, block_size=4),
        limits=SchedulerLimits(token_budget=24, max_num_seqs=5, max_waiting=1000),
        max_model_tokens=1000,
        depth=depth,
        host=HostPool(
            total_blocks=0 if preemption is Preemption.RECOMPUTE else 30, ns_per_block=700_000
        ),
        preemption=preemption,
    )
    core = EngineCore(scheduler=scheduler, executor=executor)
    coming = deque(submits)
    now_ns = 0
    while coming or scheduler.has_work:
        event_ns = core.next_event_ns()
        if coming and (event_ns is None or coming[0].arrival_ns <= event_ns):
            now_ns = coming[0].arrival_ns
            core.submit(coming.popleft(), now_ns)
            if not coming:
                scheduler.end_input()
        else:
            assert event_ns is not None, "work is left, but nothing will happen"
            now_ns = event_ns
        core.advance(now_ns)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("preemption", list(Preemption))
@pytest.mark.parametrize("depth", [0, 1, 2])
@settings(max_examples=examples(10), deadline=None)
@given(
    workload=st.lists(
        st.tuples(
            st.integers(0, 30_000_000),
            st.integers(1, 40),
            st.integers(1, 40),
            st.integers(-1, 2),
            st.sampled_from([None, 8_000_000, 400_000_000]),
        ),
        min_size=1,
        max_size=15,
    )
)
def test_an_emulated_device_and_its_recording_get_equal_decisions(
    policy: str,
    preemption: Preemption,
    depth: int,
    workload: list[tuple[int, int, int, int, int | None]],
) -> None:
    submits: list[Submit] = []
    arrival_ns = 0
    for rid, (gap_ns, tokens, length, priority, target_ns) in enumerate(workload):
        arrival_ns += gap_ns
        submits.append(
            Submit(
                rid=rid,
                arrival_ns=arrival_ns,
                input_tokens=tokens,
                max_output_tokens=45,
                targets=Targets(ttft_ns=target_ns, tpot_ns=target_ns),
                priority=priority,
                executor=ExecutorInput(output_tokens=length),
            )
        )
    emulated = Recording(EmulatedExecutor(_DEVICE))
    _serve(emulated, submits, policy, preemption, depth)
    recorded = RecordedTimes(deque(emulated.results))
    _serve(recorded, submits, policy, preemption, depth)
    assert recorded.plans == emulated.plans
    assert not recorded.results

"""Folded steps leave everything as if each had been planned and committed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.builders.schedulers import make_configure

from goodput_core.slo.targets import Targets
from goodput_core.spec.choices import Preemption
from goodput_core.steptime import RooflineForm
from goodput_engine.core.build import build_core
from goodput_engine.core.engine_core import EngineCore
from goodput_engine.device.load import load_profile
from goodput_engine.device.profile import Overlap
from goodput_engine.executor.emulated import EmulatedExecutor
from goodput_engine.kv.blocks import BlockPool
from goodput_engine.messages import (
    Cancel,
    Configure,
    Drain,
    ExecutorInput,
    Limits,
    SetLimits,
    Submit,
)
from goodput_engine.scheduler.plan import StepPlan
from goodput_engine.scheduler.policies.orca import OrcaPolicy
from goodput_engine.scheduler.policies.registry import POLICIES
from goodput_engine.scheduler.policies.sarathi import SarathiPolicy
from goodput_engine.scheduler.policy import SchedulerLimits
from goodput_engine.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from goodput_engine.device.profile import DeviceProfile
    from goodput_engine.scheduler.plan import StepOutcome
    from goodput_engine.scheduler.policy import SchedulingPolicy
    from goodput_engine.scheduler.request_table import ScheduledRequest

_BLOCK = 4
_FAR = 1 << 60
_DEVICE = replace(
    load_profile("unit"),
    overlap=Overlap.MAX,
    form=RooflineForm(
        c0_ns=1000.3, c1_ns_per_token=77.7, c2_ns_per_context_token=3.1, c4_ns_per_request=11.9
    ),
    host_ns_per_request=7,
    block_size=_BLOCK,
    kv_bytes_per_token=1,
    swap_bytes_per_s=20_000_000,
    max_model_tokens=1000,
    handover_ns_per_token=7.3,
)
_STAGES = replace(_DEVICE, pipeline_parallel=3)


def _configure(policy: str, depth: int, preemption: Preemption, **changes: Any) -> Configure:
    values: dict[str, Any] = {
        "policy": policy,
        "preemption": preemption,
        "token_budget": 16,
        "max_token_budget": 64,
        "max_num_seqs": 6,
        "max_waiting": 1000,
        "depth": depth,
        "swap_space_bytes": 20 * _BLOCK,
    }
    return make_configure(**(values | changes))


@dataclass
class ObservedCore:
    """A core in virtual time, and everything that can be observed of it."""

    core: EngineCore
    skips: bool
    plans: dict[int, StepPlan] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: list[tuple[int, int, str]] = field(default_factory=list)
    steps_skipped: int = 0
    turns: int = 0

    def run(self, until_ns: int) -> None:
        """Every step that is done before an instant."""
        core = self.core
        while (due_ns := core.next_event_ns()) is not None and due_ns < until_ns:
            self.turns += 1
            assert self.turns < 10_000, "a cycle without progress"
            if self.skips:
                batch = core.scheduler._table.batch
                skipped = core.fast_forward(until_ns)
                if skipped is not None:
                    for epoch, at_ns in enumerate(skipped.ends_ns, skipped.first_epoch):
                        for rid in batch.decoded_in(epoch):
                            self.tokens.setdefault(rid, []).append(at_ns)
                    self.steps_skipped += len(skipped.ends_ns)
                    continue
            self._take(core.advance(due_ns))

    def act(self, message: object, now_ns: int) -> None:
        """Something comes from outside, after the steps that are done at that instant."""
        core = self.core
        self.run(now_ns + 1)
        match message:
            case Submit():
                core.submit(message, now_ns)
            case Cancel(rid=rid):
                core.cancel(rid)
            case SetLimits():
                core.set_limits(message)
            case Drain():
                core.drain()
        self._take(core.advance(now_ns))
        self.run(now_ns + 1)

    def seen(self) -> tuple[object, ...]:
        """All of its state but the requests that are gone."""
        core, executor = self.core, self.core._executor
        scheduler = core.scheduler
        table = scheduler._table
        kv, batch = scheduler._kv, table.batch
        return (
            core.state(0),
            scheduler.stats,
            scheduler.now_ns,
            [
                (r.plan, *([one.rid for one in many] for many in (r.leavers, r.releases, r.copied)))
                for r in table.in_flight
            ],
            list(core._plans),
            {
                rid: (r.state, r.blocks, r.host_blocks, r.computed_tokens, r.output_tokens)
                for rid, r in table.requests.items()
            },
            [r.rid for r in scheduler.waiting],
            list(batch.members),
            (batch.epoch, batch.committed_epoch, batch.last_plan, batch.total_context),
            {epoch: [r.rid for r in due] for epoch, due in batch._events.items()},
            (kv._blank, list(kv._cached), kv._hashes, kv.generation),
            [
                (step.plan_id, step.deadline_ns, step.step_ns, step.stopped)
                for step in executor._running  # type: ignore[attr-defined]
            ],
            executor._ends,  # type: ignore[attr-defined]
            executor._host_free_ns,  # type: ignore[attr-defined]
            executor._pipeline._free_ns,  # type: ignore[attr-defined]
        )

    def _take(self, outcome: StepOutcome | None) -> None:
        if outcome is None:
            return
        at_ns = outcome.result.at_ns
        self.plans[outcome.plan.plan_id] = outcome.plan
        for rid in (*outcome.advanced, *(p.request.rid for p in outcome.progress)):
            self.tokens.setdefault(rid, []).append(at_ns)
        for progress in outcome.progress:
            if progress.finish_reason is not None:
                self.ends.append((progress.request.rid, at_ns, progress.finish_reason))


def _agree(skipped: ObservedCore, stepped: ObservedCore) -> None:
    one, two = skipped.seen(), stepped.seen()
    for a, b in zip(one, two, strict=True):
        assert repr(a) == repr(b)
    assert skipped.tokens == stepped.tokens
    assert skipped.ends == stepped.ends
    assert skipped.plans.items() <= stepped.plans.items()
    skipped.core.scheduler.check_integrity()


_GAPS = st.one_of(st.integers(0, 3_000), st.integers(0, 200_000))
_SUBMITS = st.tuples(
    st.just("submit"),
    _GAPS,
    st.integers(1, 40),
    st.one_of(st.none(), st.integers(1, 60)),
    st.integers(1, 90),
    st.integers(0, 2),
    st.integers(0, 3),
)
_ACTIONS = st.lists(
    st.one_of(
        _SUBMITS,
        _SUBMITS,
        _SUBMITS,
        st.tuples(st.just("cancel"), _GAPS, st.integers(1, 15)),
        st.tuples(st.just("limits"), _GAPS, st.integers(1, 40), st.integers(1, 8)),
    ),
    max_size=25,
)


def _message(action: tuple[Any, ...], number: int, now_ns: int) -> object:
    match action:
        case ("submit", _, tokens, max_output, length, family, priority):
            hashes = [family * 1000 + i for i in range(tokens // _BLOCK)] if family else []
            return Submit(
                rid=number,
                arrival_ns=now_ns,
                input_tokens=tokens,
                max_output_tokens=max_output,
                block_hashes=hashes,
                slo_class=("batch", "interactive")[priority % 2],
                targets=Targets(ttft_ns=40_000 * (1 + priority), tpot_ns=2_000 * (1 + priority)),
                priority=priority,
                executor=ExecutorInput(output_tokens=length),
            )
        case ("cancel", _, rid):
            return Cancel(rid=rid)
        case ("limits", _, budget, seqs):
            limits = Limits(token_budget=budget, max_num_seqs=seqs)
            return SetLimits(revision=number, limits=limits)
    raise AssertionError(action)


def _live(
    configure: Configure, device: DeviceProfile, actions: list[Any]
) -> tuple[ObservedCore, ObservedCore]:
    """Two equal cores through the same days, one folding; compared at every turn."""
    folding, stepping = (
        ObservedCore(core=build_core(configure, device), skips=skips) for skips in (True, False)
    )
    now_ns = 0
    for number, action in enumerate(actions, 1):
        now_ns += action[1]
        for observed in (folding, stepping):
            observed.run(now_ns)
        _agree(folding, stepping)
        for observed in (folding, stepping):
            observed.act(_message(action, number, now_ns), now_ns)
        _agree(folding, stepping)
    for observed in (folding, stepping):
        observed.act(Drain(), now_ns)
        observed.run(_FAR)
    _agree(folding, stepping)
    assert not stepping.core.scheduler.has_work
    assert not stepping.steps_skipped
    return folding, stepping


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("preemption", list(Preemption))
@pytest.mark.parametrize("depth", [0, 1, 2])
@settings(max_examples=examples(40), deadline=None)
@given(
    actions=_ACTIONS,
    blocks=st.integers(10, 80),
    host_ns=st.sampled_from([0, 401, 1_500, 9_000]),
    stages=st.integers(1, 3),
)
def test_skipped_and_unskipped_runs_agree_byte_for_byte(
    policy: str,
    depth: int,
    preemption: Preemption,
    actions: list[Any],
    blocks: int,
    host_ns: int,
    stages: int,
) -> None:
    device = replace(_DEVICE, kv_blocks=blocks, host_ns_per_step=host_ns, pipeline_parallel=stages)
    _live(_configure(policy, depth, preemption), device, actions)


_STEADY = [("submit", 10, 9, None, 300, 0, 0), ("submit", 10, 9, None, 200, 0, 0)]


@pytest.mark.parametrize(
    "policy", ["orca", "request", "sarathi", "sjf", "splitfuse", "static", "vllm"]
)
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("device", [_DEVICE, _STAGES], ids=["one stage", "three stages"])
def test_steady_decoding_is_skipped(policy: str, depth: int, device: DeviceProfile) -> None:
    device = replace(device, kv_blocks=500)
    folding, stepping = _live(_configure(policy, depth, Preemption.RECOMPUTE), device, _STEADY)
    steps = stepping.core.scheduler.stats.steps
    assert folding.steps_skipped > 0.9 * steps


@pytest.mark.parametrize("policy", ["orca", "request", "sarathi", "sjf", "splitfuse", "vllm"])
def test_those_who_wait_behind_a_full_batch_do_not_keep_it_from_being_skipped(policy: str) -> None:
    configure = _configure(policy, 0, Preemption.RECOMPUTE, max_num_seqs=2)
    device = replace(_DEVICE, kv_blocks=1500)
    waits = [("submit", 10, 9, None, 50, 0, 0)] * 3
    folding, stepping = _live(configure, device, _STEADY + waits)
    assert folding.steps_skipped > 0.8 * stepping.core.scheduler.stats.steps


@pytest.mark.parametrize(
    ("places", "third_tokens", "change", "rid"),
    [
        pytest.param(2, 9, ("limits", 200_000, 16, 3), 3, id="a-place-more"),
        pytest.param(3, 700, ("cancel", 200_000, 3), 4, id="the-first-in-the-queue-goes"),
    ],
)
def test_a_waiting_request_starts_when_a_message_allows_it(
    places: int, third_tokens: int, change: tuple[Any, ...], rid: int
) -> None:
    configure = _configure("sarathi", 0, Preemption.RECOMPUTE, max_num_seqs=places)
    waits = [("submit", 10, third_tokens, None, 5, 0, 0), ("submit", 10, 9, None, 5, 0, 0)]
    folding, _ = _live(configure, replace(_DEVICE, kv_blocks=200), [*_STEADY, *waits, change])
    assert 200_000 < folding.tokens[rid][0] < 250_000


class Learning(SarathiPolicy):
    """Looks at every step."""

    def __init__(self) -> None:
        self.steps = 0

    def after_step(self, outcome: StepOutcome) -> None:
        self.steps += 1


class LearningTogether(OrcaPolicy):
    """Looks at every step, though what it inherits from speaks for itself."""

    def after_step(self, outcome: StepOutcome) -> None:
        pass


class Limited(SarathiPolicy):
    """Limits admissions."""

    def may_admit(self, request: ScheduledRequest) -> bool:
        return self.view.num_running < 2


class LimitedByCount(Limited):
    """The same, and says that time does not matter."""

    def can_fast_forward(self) -> bool:
        return True


class Unsteady(SarathiPolicy):
    """Never allows fast-forward."""

    def can_fast_forward(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("policy", "alone", "waited_for"),
    [
        (Learning, False, False),
        (LearningTogether, False, False),
        (Limited, True, False),
        (LimitedByCount, True, True),
        (Unsteady, False, False),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_policy_that_may_decide_otherwise_in_each_step_is_never_skipped(
    policy: type[SchedulingPolicy], alone: bool, waited_for: bool
) -> None:
    scheduler = Scheduler(
        policy=policy(),
        kv=BlockPool(total_blocks=500, block_size=_BLOCK),
        limits=SchedulerLimits(token_budget=16, max_num_seqs=8, max_waiting=100),
        max_model_tokens=1000,
    )
    executor = EmulatedExecutor(_DEVICE)
    core = EngineCore(scheduler=scheduler, executor=executor, ahead=executor)
    _come(core, 1)
    assert _folds(core) is alone
    for rid in (2, 3):
        _come(core, rid)
    assert _folds(core) is waited_for


def _come(core: EngineCore, rid: int) -> None:
    core.submit(Submit(rid=rid, arrival_ns=0, input_tokens=9), 0)
    for _ in range(3):
        core.advance(core.next_event_ns() or 0)


def _folds(core: EngineCore) -> bool:
    due_ns = core.next_event_ns()
    assert due_ns is not None
    return core.fast_forward(due_ns + 1) is not None


def test_a_core_whose_steps_are_logged_is_never_skipped() -> None:
    logged: list[StepOutcome] = []
    configure = _configure("sarathi", 0, Preemption.RECOMPUTE)
    core = build_core(configure, replace(_DEVICE, kv_blocks=500), on_step=logged.append)
    _come(core, 1)
    assert not _folds(core)
    assert logged

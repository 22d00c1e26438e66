"""Invariants of every workload, at every depth, while budgets change and clients leave."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.builders.scheduler_bench import TARGETS, SchedulerBench

from goodput_core.slo.targets import Targets
from goodput_core.spec.choices import Preemption
from goodput_engine.scheduler.policies.registry import POLICIES
from goodput_engine.scheduler.policy import SchedulerLimits
from goodput_engine.scheduler.request_table import RequestState

_SUBMIT = st.tuples(
    st.just("submit"),
    st.integers(1, 40),
    st.one_of(st.none(), st.integers(1, 30)),
    st.integers(1, 40),
    st.integers(0, 2),
    st.sampled_from(TARGETS),
)
_ACTIONS = st.lists(
    st.one_of(
        _SUBMIT,
        st.tuples(st.just("plan")),
        st.tuples(st.just("plan")),
        st.tuples(st.just("commit")),
        st.tuples(st.just("commit")),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("limits"), st.integers(1, 40), st.integers(1, 10)),
    ),
    max_size=60,
)


def _run(bench: SchedulerBench, actions: list[tuple[object, ...]], stretch: int = 0) -> None:
    for action in actions:
        match action:
            case (
                "submit",
                int(tokens),
                max_output,
                int(length),
                int(family),
                Targets() as targets,
            ):
                assert max_output is None or isinstance(max_output, int)
                bench.submit(tokens, max_output, length + stretch, family, targets)
            case ("plan",):
                bench.plan()
            case ("commit",):
                bench.commit()
            case ("cancel", int(rid)):
                bench.cancel(rid)
            case ("limits", int(budget), int(seqs)):
                bench.scheduler.set_limits(
                    SchedulerLimits(token_budget=budget, max_num_seqs=seqs, max_waiting=1000)
                )
        bench.check()


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("preemption", list(Preemption))
@pytest.mark.parametrize("depth", [0, 1, 2])
@settings(max_examples=examples(50), deadline=None)
@given(actions=_ACTIONS, total_blocks=st.integers(4, 40))
def test_every_request_gets_its_tokens_and_every_block_comes_back(
    policy: str,
    depth: int,
    preemption: Preemption,
    actions: list[tuple[object, ...]],
    total_blocks: int,
) -> None:
    bench = SchedulerBench(
        policy=policy, depth=depth, total_blocks=total_blocks, preemption=preemption
    )
    _run(bench, actions)
    bench.run_dry()
    for rid, request in bench.requests.items():
        if rid not in bench.rejected | bench.cancelled:
            length = bench.executor.lengths[rid]
            assert bench.gained[rid] == min(length, request.output_limit)
            assert bench.finished[rid] == ("stop" if length <= request.output_limit else "length")


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("preemption", list(Preemption))
@pytest.mark.parametrize("depth", [0, 1, 2])
@settings(max_examples=examples(25), deadline=None)
@given(actions=_ACTIONS, total_blocks=st.integers(4, 40), stretch=st.integers(1, 5))
def test_decisions_are_equal_until_the_first_visible_difference_in_hidden_lengths(
    policy: str,
    depth: int,
    preemption: Preemption,
    actions: list[tuple[object, ...]],
    total_blocks: int,
    stretch: int,
) -> None:
    benchs = [
        SchedulerBench(policy=policy, depth=depth, total_blocks=total_blocks, preemption=preemption)
        for _ in range(2)
    ]
    for bench, extra in zip(benchs, (0, stretch), strict=True):
        _run(bench, [a for a in actions if a[0] != "cancel"], extra)
        bench.run_dry()
    one, two = benchs
    pairs = zip(one.results, two.results, strict=False)
    seen = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if seen is None:
        assert one.decisions == two.decisions
        return
    last = one.decisions.index(next(p for p in one.decisions if p.plan_id == seen + 1))
    assert one.decisions[: last + 1] == two.decisions[: last + 1]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("preemption", list(Preemption))
@pytest.mark.parametrize("depth", [0, 1, 2])
@settings(max_examples=examples(30), deadline=None)
@given(actions=_ACTIONS, total_blocks=st.integers(4, 40), victim=st.integers(0, 10))
def test_cancelling_in_any_state_frees_everything_within_depth_plus_one_commits(
    policy: str,
    depth: int,
    preemption: Preemption,
    actions: list[tuple[object, ...]],
    total_blocks: int,
    victim: int,
) -> None:
    bench = SchedulerBench(
        policy=policy, depth=depth, total_blocks=total_blocks, preemption=preemption
    )
    _run(bench, actions)
    bench.cancel(victim)
    if victim not in bench.cancelled:
        return
    request = bench.requests[victim]
    assert request.state in {RequestState.CANCELLED, RequestState.WAITING}
    for _ in range(depth + 1):
        while bench.plan():
            pass
        bench.commit()
    assert not request.blocks
    assert not request.host_blocks
    assert victim not in bench.scheduler._table.requests


def test_the_mirror_rejects_a_plan_that_exceeds_the_budget() -> None:
    bench = SchedulerBench(policy="sarathi", depth=0, total_blocks=40)
    bench.submit(30, 4, 4, 0)
    plan = bench.scheduler.plan(1)
    assert plan is not None
    with pytest.raises(AssertionError):
        bench.executor.submit(plan, budget=15)

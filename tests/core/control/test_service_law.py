"""Properties of both laws together, over any sequence of observations."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.builders.manifests import manifest

from goodput_core.control import (
    ClassWindow,
    DeviceCapacity,
    ReplicaPhase,
    ReplicaWindow,
    ServiceObservation,
    ServiceParams,
    ServiceState,
    Signal,
    TargetCounts,
    Traffic,
    service_law,
)
from goodput_core.histogram import LengthMix
from goodput_core.slo.targets import SLOClass
from goodput_core.spec.choices import ControlMode
from goodput_core.spec.llmservice import LLMService
from goodput_core.steptime import RooflineForm
from goodput_core.units import NS_PER_MS, NS_PER_S

S = NS_PER_S
DEVICE = DeviceCapacity(
    form=RooflineForm(
        c0_ns=20 * NS_PER_MS,
        c1_ns_per_token=100_000,
        c2_ns_per_context_token=10,
        c4_ns_per_request=10_000,
    ),
    kv_tokens=100_000,
)
MANIFEST = manifest("controlled")


def test_the_parameters_come_from_the_manifest() -> None:
    params = ServiceParams.of(LLMService.from_dict(MANIFEST).spec)
    assert params == ServiceParams(
        mode=ControlMode.AUTO,
        classes=(SLOClass(name="chat", ttft_ms=500, tpot_ms=40, objective=Fraction(99, 100)),),
        min_replicas=2,
        max_replicas=5,
        min_tokens=128,
        max_tokens=1024,
        initial_tokens=512,
        max_num_seqs=32,
        stabilization_ns=60 * S,
    )


_COUNTS = st.integers(0, 60).flatmap(
    lambda judged: st.builds(
        lambda missed, close: TargetCounts(
            judged=judged, missed=missed, close=min(close, judged - missed)
        ),
        st.integers(0, judged),
        st.integers(0, judged),
    )
)
_REPLICA = st.builds(
    ReplicaWindow,
    name=st.just("chat"),
    phase=st.sampled_from(ReplicaPhase),
    signal=st.sampled_from(Signal),
    running=st.integers(0, 64),
    waiting=st.integers(0, 64),
    kv_used_blocks=st.integers(0, 100),
    kv_total_blocks=st.just(100),
    preemptions=st.integers(0, 3),
    settled=st.booleans(),
)
_OBSERVATION = st.builds(
    ServiceObservation,
    interval_ns=st.integers(1, 3600).map(lambda s: s * S),
    traffic=st.builds(
        Traffic,
        signal=st.sampled_from([Signal.FRESH, Signal.FRESH, Signal.MISSING, Signal.FAILED]),
        arrivals=st.integers(0, 5000),
        in_flight=st.integers(0, 100),
        finished=st.lists(
            st.tuples(st.integers(1, 9000), st.just(0), st.integers(1, 900)), max_size=4
        ).map(LengthMix.of_requests),
    ),
    classes=st.lists(
        st.builds(ClassWindow, name=st.just("chat"), ttft=_COUNTS, tpot=_COUNTS), max_size=1
    ).map(tuple),
    replicas=st.lists(_REPLICA, max_size=8).map(tuple),
    desired_replicas=st.integers(0, 12),
    startups_ns=st.lists(st.integers(0, 4000).map(lambda s: s * S), max_size=3).map(tuple),
    device=st.sampled_from([None, DEVICE]),
)


@given(
    observations=st.lists(_OBSERVATION, min_size=1, max_size=12),
    replicas=st.tuples(st.integers(0, 10), st.integers(1, 10)).map(
        lambda ends: (min(ends), max(ends))
    ),
    mode=st.sampled_from(ControlMode),
)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_decisions_stay_within_the_manifest(
    observations: list[ServiceObservation], replicas: tuple[int, int], mode: ControlMode
) -> None:
    least, most = replicas
    params = replace(
        ServiceParams.of(LLMService.from_dict(MANIFEST).spec),
        mode=mode,
        min_replicas=least,
        max_replicas=most,
    )
    state, now_ns = ServiceState(), 0
    for observation in observations:
        now_ns += observation.interval_ns
        before = state
        state, decision = service_law(state, observation, params, now_ns)
        assert service_law(before, observation, params, now_ns) == (state, decision)
        assert least <= decision.apply_replicas <= most
        bounds = decision.apply_bounds
        assert params.min_tokens == bounds.min_tokens <= bounds.max_tokens <= params.max_tokens
        assert 1 <= bounds.max_num_seqs <= params.max_num_seqs
        assert 50 <= bounds.safety_percent < 100
        if decision.replicas is not None and least <= observation.desired_replicas <= most:
            current = observation.desired_replicas
            assert decision.replicas.replicas - current <= max(4, current)


@given(
    observations=st.lists(_OBSERVATION, min_size=1, max_size=6),
    factor=st.integers(2, 5),
    current=st.integers(2, 5),
)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_more_demand_never_gives_fewer_replicas(
    observations: list[ServiceObservation], factor: int, current: int
) -> None:
    params = ServiceParams.of(LLMService.from_dict(MANIFEST).spec)

    def wanted(factor: int) -> int:
        state, now_ns = ServiceState(), 0
        for observation in observations:
            now_ns += observation.interval_ns
            traffic = observation.traffic
            more = replace(traffic, arrivals=traffic.arrivals * factor)
            seen = replace(
                observation, traffic=more, classes=(), desired_replicas=current, device=DEVICE
            )
            state, decision = service_law(state, seen, params, now_ns)
        assert decision.replicas is not None
        return decision.replicas.replicas

    assert wanted(factor) >= wanted(1)


def test_the_budget_is_raised_before_replicas_are_added() -> None:
    params = ServiceParams.of(LLMService.from_dict(MANIFEST).spec)
    late = ClassWindow(
        name="chat", ttft=TargetCounts(judged=50, missed=25), tpot=TargetCounts(judged=50)
    )
    ready = ReplicaWindow(
        name="chat", phase=ReplicaPhase.READY, signal=Signal.FRESH, running=5, waiting=5
    )
    observation = ServiceObservation(
        interval_ns=10 * S,
        traffic=Traffic(signal=Signal.FRESH, arrivals=20, in_flight=20),
        classes=(late,),
        replicas=(ready, replace(ready, name="chat-1")),
        desired_replicas=2,
    )
    state, seen = ServiceState(), []
    for i in range(100):
        state, decision = service_law(state, observation, params, (i + 1) * 10 * S)
        assert decision.bounds is not None
        seen.append((decision.apply_bounds.max_tokens, decision.apply_replicas))
        if decision.apply_replicas > 2:
            break
    budgets = [tokens for tokens, _ in seen]
    assert budgets == sorted(budgets)
    assert seen[-1] == (1024, 3), "only at the largest budget"


@pytest.mark.parametrize("mode", [ControlMode.RECOMMEND, ControlMode.MANUAL])
def test_modes_that_apply_nothing_use_the_replicas_of_the_manifest(mode: ControlMode) -> None:
    params = replace(ServiceParams.of(LLMService.from_dict(MANIFEST).spec), mode=mode, replicas=4)
    observation = ServiceObservation(
        interval_ns=10 * S, traffic=Traffic(signal=Signal.FRESH), desired_replicas=4
    )
    _, decision = service_law(ServiceState(), observation, params, 10 * S)
    assert decision.apply_replicas == 4
    assert (decision.replicas is None) == (mode is ControlMode.MANUAL)

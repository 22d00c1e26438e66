"""The fleet and a separately stepped engine core emit the same tokens at the same times."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.builders.fleets import make_fleet, plan, run_fleet

from goodput_core.slo.record import Outcome
from goodput_core.spec.choices import Preemption, RouterPolicy
from goodput_core.units import NS_PER_MS, NS_PER_US
from goodput_engine.core.build import build_core
from goodput_engine.messages import ExecutorInput, Submit
from goodput_engine.scheduler.policies.registry import POLICIES
from goodput_replay.emulation.requests import block_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_replay.emulation.settings import FleetSettings
    from goodput_replay.plan import PlannedRequest


# Other policies, and little free memory, leave few steps that can be computed at once.
FAST_FORWARDED = {"sarathi", "vllm"}


@dataclass(slots=True, kw_only=True)
class ObservedOutput:
    """Output of one request, as a client of the core sees it."""

    times: list[int] = field(default_factory=list)
    reason: str | None = None
    cached_tokens: int = 0
    cancelled: bool = False
    rejected: bool = False


def step_by_hand(
    requests: Sequence[PlannedRequest], fleet: FleetSettings
) -> dict[str, ObservedOutput]:
    """Send all messages to one core and take every step, as the core's process does."""
    core = build_core(fleet.configure, fleet.profile)
    results = {request.request_id: ObservedOutput() for request in requests}
    classes = fleet.slo.by_name()
    arrivals = list(enumerate(requests))
    cancellations = sorted(
        (r.scheduled_ns + r.cancel_after_ns, rid)
        for rid, r in arrivals
        if r.cancel_after_ns is not None
    )

    def step(now_ns: int) -> None:
        while True:
            outputs = core.step(now_ns)
            for output in outputs.outputs if outputs is not None else ():
                result = results[requests[output.rid].request_id]
                result.times += [outputs.at_ns] * output.new_tokens if outputs else []
                result.reason = output.finish_reason
                result.cached_tokens += output.cached_tokens
            for rejected in core.take_rejected():
                results[requests[rejected.rid].request_id].rejected = True
            event_ns = core.next_event_ns()
            if event_ns is None or event_ns > now_ns:
                return

    while arrivals or cancellations or core.next_event_ns() is not None:
        due = [core.next_event_ns()]
        due += [arrivals[0][1].scheduled_ns] if arrivals else []
        due += [cancellations[0][0]] if cancellations else []
        now_ns = min(at_ns for at_ns in due if at_ns is not None)
        while arrivals and arrivals[0][1].scheduled_ns == now_ns:
            rid, request = arrivals.pop(0)
            rejected = core.submit(
                Submit(
                    rid=rid,
                    arrival_ns=now_ns,
                    input_tokens=request.prompt.input_tokens,
                    block_hashes=block_keys(request.prompt, fleet.profile.block_size),
                    slo_class=request.slo_class,
                    targets=classes[request.slo_class].targets,
                    executor=ExecutorInput(output_tokens=request.output_tokens),
                ),
                now_ns,
            )
            results[request.request_id].rejected = rejected is not None
            if not arrivals:
                core.scheduler.end_input()
        step(now_ns)
        while cancellations and cancellations[0][0] == now_ns:
            _, rid = cancellations.pop(0)
            result = results[requests[rid].request_id]
            if result.reason is None and not result.rejected:
                core.cancel(rid)
                result.cancelled = True
        step(now_ns)
    return results


# Longer than any request takes, so that both runs end with any scheduler.
_TIMEOUT_MS = 1_000
REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 30),  # milliseconds since the previous arrival
        st.integers(1, 90),  # prompt
        st.integers(1, 40),  # output
        st.just(_TIMEOUT_MS) | st.integers(0, 60),  # cancelled after
        st.integers(0, 2),  # shared prefix; 0 for none
    ),
    min_size=1,
    max_size=14,
)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(
    rows=REQUESTS,
    depth=st.integers(0, 2),
    blocks=st.integers(10, 30),
    width=st.integers(1, 8),
    preemption=st.sampled_from(Preemption),
)
@example(
    # With `fastserve`, the first request starts at 0 ns and starts again with a cached prefix.
    rows=[(0, 16, 12, 1000, 0), (0, 1, 1, 1000, 0)],
    depth=0,
    blocks=10,
    width=1,
    preemption=Preemption.RECOMPUTE,
)
@settings(max_examples=examples(25), deadline=None)
def test_token_times_are_those_of_the_core(
    *,
    policy: str,
    rows: list[tuple[int, int, int, int, int]],
    depth: int,
    blocks: int,
    width: int,
    preemption: Preemption,
) -> None:
    requests, at_ms = [], 0
    for number, (wait_ms, prompt, output, cancel_ms, family) in enumerate(rows):
        at_ms += wait_ms
        hashes = [family * 100 + i for i in range(-(-prompt // 16))] if family else []
        requests.append(
            plan(f"r{number}", at_ms, prompt, output, cancel_ms=cancel_ms, hashes=hashes)
        )
    settings_ = make_fleet(
        policy=policy,
        preemption=preemption,
        swap_space_bytes=8 * 16 * 131_072,
        depth=depth,
        max_num_seqs=width,
        token_budget=64,
        max_waiting=10**6,
        # At least 130 tokens, so that the longest request fits.
        profile={"kv_blocks": blocks, "host_ns_per_step": 70_001},
    )
    run = run_fleet(requests, settings_)
    results = step_by_hand(requests, settings_)
    assert len(run.records) == len(requests)
    for request in requests:
        record, result = run[request.request_id], results[request.request_id]
        expected = Outcome.CANCELLED if result.cancelled else Outcome.OK
        expected = Outcome.SHED if result.rejected else expected
        assert record.outcome is expected
        assert record.output_tokens == len(result.times)
        if not result.times:
            assert record.first_token_ns is None
            continue
        assert (record.first_token_ns, record.last_token_ns) == (
            result.times[0],
            result.times[-1],
        )
        gaps = [
            (after - before) // NS_PER_US
            for before, after in zip(result.times, result.times[1:], strict=False)
        ]
        assert list(record.gaps_us) == gaps
        if expected is Outcome.OK:
            assert record.end_ns == result.times[-1]
            assert record.cached_tokens == result.cached_tokens


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_fast_forward_does_not_change_a_run(
    policy: str,
) -> None:
    draw = random.Random(7)
    at_ms, requests = 0.0, []
    for number in range(150):
        at_ms += draw.expovariate(1 / 40)
        cancel_ms = draw.uniform(0, 2_000) if draw.random() < 0.1 else None
        prompt, output = draw.randint(1, 1_500), draw.randint(1, 150)
        requests.append(plan(f"r{number}", at_ms, prompt, output, cancel_ms=cancel_ms))
    settings: dict[str, Any] = {
        "policy": policy,
        "replicas": 2,
        "placement": RouterPolicy.LEAST_LOADED,
        "device": "llama-3-8b-h100",
        "max_num_seqs": 12,
        "preemption": "hybrid",
        "swap_space_bytes": 1 << 30,
        "profile": {"kv_blocks": 400},
    }
    fast, slow = (
        run_fleet(requests, make_fleet(fast_forward=fast_forward, **settings))
        for fast_forward in (True, False)
    )
    assert fast.records == slow.records
    assert replace(fast.outcome, events=0) == replace(slow.outcome, events=0)
    if policy in FAST_FORWARDED:
        assert fast.outcome.events < 0.7 * slow.outcome.events


def test_token_times_of_a_long_run_are_correct_after_trimming() -> None:
    long = [plan(f"long{i}", i * 4_000, 8, 9_000) for i in range(5)]
    short = [plan(f"short{i}", i * 500 + 0.25, 8, 20) for i in range(50)]
    run = run_fleet(sorted([*long, *short], key=lambda r: r.scheduled_ns), make_fleet())
    for request in long:
        record = run[request.request_id]
        assert record.first_token_ns == request.scheduled_ns + NS_PER_MS
        assert record.last_token_ns == request.scheduled_ns + 9_000 * NS_PER_MS
        assert set(record.gaps_us) == {1_000}

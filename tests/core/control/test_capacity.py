"""Predicted capacity of one replica for a mix of lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples

from goodput_core.control import DeviceCapacity
from goodput_core.control.capacity import replica_capacity
from goodput_core.histogram import LengthBin, LengthMix
from goodput_core.steptime import RooflineForm
from goodput_core.units import NS_PER_MS

MS = NS_PER_MS
FORM = RooflineForm(
    c0_ns=10 * MS, c1_ns_per_token=100_000, c2_ns_per_context_token=0, c4_ns_per_request=0
)
DEVICE = DeviceCapacity(form=FORM, kv_tokens=1_000_000)


def test_decodes_alone_use_the_largest_batch_that_meets_the_target() -> None:
    mix = LengthMix.of_requests([(0, 0, 100)])
    one = replica_capacity(DEVICE, mix, tpot_ns=20 * MS, max_num_seqs=1000, max_tokens=8192)
    assert one is not None
    # 200 requests decode in 20 ms: each costs 100 steps of 20 ms, shared by 200.
    assert one.batch == 200
    assert one.device_s == pytest.approx(0.010)


def test_prompts_alone_cost_the_time_of_their_tokens() -> None:
    mix = LengthMix.of_requests([(4000, 0, 1)])
    one = replica_capacity(DEVICE, mix, tpot_ns=20 * MS, max_num_seqs=1000, max_tokens=8192)
    assert one is not None
    assert one.batch == 0
    assert one.device_s == pytest.approx(0.4, rel=0.02)


def test_cached_prompt_tokens_are_not_computed() -> None:
    def device_s(cached: int) -> float:
        mix = LengthMix.of_requests([(4000, cached, 1)])
        one = replica_capacity(DEVICE, mix, tpot_ns=20 * MS, max_num_seqs=1000, max_tokens=8192)
        assert one is not None
        return one.device_s

    assert device_s(3000) == pytest.approx(device_s(0) / 4, rel=0.05)


@pytest.mark.parametrize(
    ("device", "width"),
    [(DEVICE, 20), (replace(DEVICE, kv_tokens=1120), 1000)],
    ids=["batch width", "KV memory"],
)
def test_batch_width_and_kv_memory_bound_the_batch(device: DeviceCapacity, width: int) -> None:
    mix = LengthMix.of_requests([(0, 0, 100)])
    one = replica_capacity(device, mix, tpot_ns=20 * MS, max_num_seqs=width, max_tokens=8192)
    assert one is not None
    assert one.batch == 20
    assert one.device_s == pytest.approx(0.050), "a step of 10 ms is shared by 20 only"


@pytest.mark.parametrize(
    ("max_tokens", "device_s"),
    [(100, 0.050), (220, 0.062)],
    ids=["chunks of 80 beside the decodes", "one chunk of 200"],
)
def test_a_prompt_is_computed_in_chunks_as_large_as_possible(
    max_tokens: int, device_s: float
) -> None:
    # Twenty requests share each step, so each request costs five steps and 200 prompt tokens. A
    # step of up to 100 tokens takes 10 ms. One of 220 takes 22 ms, and the other four 10 ms each.
    mix = LengthMix.of_requests([(200, 0, 100)])
    one = replica_capacity(DEVICE, mix, tpot_ns=40 * MS, max_num_seqs=20, max_tokens=max_tokens)
    assert one is not None
    assert one.batch == 20
    assert one.device_s == pytest.approx(device_s)


def test_the_tightest_tpot_bounds_the_chunks() -> None:
    mix = LengthMix.of_requests([(200, 0, 100)])
    one = replica_capacity(DEVICE, mix, tpot_ns=10 * MS, max_num_seqs=20, max_tokens=220)
    assert one is not None
    assert one.device_s == pytest.approx(0.050), "80 tokens fit into 10 ms beside 20 decodes"


def test_the_token_budget_bounds_the_batch_if_prompts_exceed_it() -> None:
    mix = LengthMix.of_requests([(400, 0, 100)])
    one = replica_capacity(DEVICE, mix, tpot_ns=40 * MS, max_num_seqs=20, max_tokens=60)
    assert one is not None
    assert one.batch == 12, "12 decodes come with 48 prompt tokens a step; 13 exceed the budget"


def test_host_time_reduces_the_batch() -> None:
    mix = LengthMix.of_requests([(0, 0, 100)])
    busy = replace(DEVICE, host_ns_per_step=10 * MS)
    one = replica_capacity(busy, mix, tpot_ns=20 * MS, max_num_seqs=1000, max_tokens=8192)
    assert one is not None
    assert one.device_s == pytest.approx(0.020), "half of the device time, half of the batch"


def test_a_tpot_that_a_single_request_misses_is_infeasible() -> None:
    mix = LengthMix.of_requests([(10, 0, 100)])
    one = replica_capacity(DEVICE, mix, tpot_ns=9 * MS, max_num_seqs=50, max_tokens=8192)
    assert one is not None
    assert not one.feasible
    assert one.device_s > 0


def test_an_empty_mix_has_no_capacity() -> None:
    assert (
        replica_capacity(DEVICE, LengthMix(), tpot_ns=MS, max_num_seqs=1, max_tokens=8192) is None
    )


def test_uneven_requests_have_a_larger_spread() -> None:
    even = replica_capacity(
        DEVICE,
        LengthMix.of_requests([(100, 0, 50)] * 10),
        tpot_ns=50 * MS,
        max_num_seqs=64,
        max_tokens=8192,
    )
    uneven = replica_capacity(
        DEVICE,
        LengthMix.of_requests([(10, 0, 5)] * 9 + [(900, 0, 450)]),
        tpot_ns=50 * MS,
        max_num_seqs=64,
        max_tokens=8192,
    )
    assert even is not None
    assert uneven is not None
    assert even.spread == 1.0
    assert uneven.spread > 5


_LENGTHS = st.tuples(st.integers(1, 20_000), st.integers(1, 2000))


@given(
    lengths=st.lists(_LENGTHS, min_size=1, max_size=4),
    tpot_ms=st.integers(11, 400),
    width=st.integers(1, 512),
)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_wider_batch_and_shorter_requests_never_cost_more(
    lengths: list[tuple[int, int]], tpot_ms: int, width: int
) -> None:
    def device_s(width: int, shorter: int = 1) -> float:
        mix = LengthMix.of_requests([(max(1, p // shorter), 0, o) for p, o in lengths])
        one = replica_capacity(
            DEVICE, mix, tpot_ns=tpot_ms * MS, max_num_seqs=width, max_tokens=8192
        )
        assert one is not None
        assert one.spread >= 1
        return one.device_s

    # Tokens and requests are rounded to integers.
    here = device_s(width) * 1.1 + 1e-4
    assert device_s(2 * width) <= here
    assert device_s(width, shorter=2) <= here


@given(
    st.lists(st.tuples(st.integers(0, 9999), st.integers(0, 99), st.integers(0, 999)), max_size=20)
)
@settings(deadline=None)
def test_mixes_add_up_in_any_order(requests: list[tuple[int, int, int]]) -> None:
    whole = LengthMix.of_requests(requests)
    half = len(requests) // 2
    parts = LengthMix.of_requests(requests[half:]) + LengthMix.of_requests(requests[:half])
    assert whole.requests == parts.requests == len(requests)
    assert sum(b.input_tokens for b in parts.bins) == sum(r[0] for r in requests)
    assert sum(b.output_tokens for b in parts.bins) == sum(r[2] for r in requests)
    assert len({b.key for b in parts.bins}) == len(parts.bins) <= 15 * 11
    one = LengthBin(requests=1, input_tokens=5, cached_tokens=0, output_tokens=5)
    two = LengthBin(requests=2, input_tokens=10, cached_tokens=0, output_tokens=10)
    assert LengthMix.of([one, one]).bins == (two,)

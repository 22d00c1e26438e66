"""A textbook's arithmetic of KV memory, reproduced by the pool, plans and copies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from goodput_core.steptime import StepShape
from goodput_engine.device.load import load_profile
from goodput_engine.executor.emulated import EmulatedExecutor
from goodput_engine.kv.blocks import BlockPool
from goodput_engine.scheduler.plan import Copy, StepPlan
from goodput_engine.scheduler.policies.registry import build_policy
from goodput_engine.scheduler.policy import SchedulerLimits
from goodput_engine.scheduler.request_table import ScheduledRequest
from goodput_engine.scheduler.scheduler import Scheduler

_PROFILE = load_profile("llama-3-70b-4xh100")
_KIB, _GIB = 2**10, 2**30


def _prompts_in_one_step(prompts: list[int]) -> tuple[Scheduler, StepPlan]:
    """Prompts that start together, whole, on a device of 1,000 blocks of 16."""
    scheduler = Scheduler(
        policy=build_policy("sarathi"),
        kv=BlockPool(total_blocks=1000, block_size=16),
        limits=SchedulerLimits(token_budget=4096, max_num_seqs=8, max_waiting=8),
        max_model_tokens=8192,
        depth=0,
    )
    for rid, tokens in enumerate(prompts, 1):
        request = ScheduledRequest(
            rid=rid, arrival_ns=0, input_tokens=tokens, max_output_tokens=1, block_hashes=()
        )
        assert scheduler.add(request, 0) is None
    plan = scheduler.plan(0)
    assert plan is not None
    return scheduler, plan


def test_a_prompt_of_4096_on_a_70b_model_is_swapped_out_in_25_ms() -> None:
    profile = replace(_PROFILE, swap_bytes_per_s=50 * _GIB)
    assert profile.kv_bytes_per_token == 320 * _KIB
    scheduler, plan = _prompts_in_one_step([4096])
    blocks = plan.admitted[0].blocks
    assert len(blocks) * profile.block_size * profile.kv_bytes_per_token == 1.25 * _GIB
    executor = EmulatedExecutor(profile)
    copy = Copy(rid=1, to_host=True, device_blocks=blocks, host_blocks=tuple(range(len(blocks))))
    executor.submit(
        plan._replace(admitted=(), chunks=(), copies=(copy,), shape=StepShape.of()), ready_ns=0
    )
    done_ns = executor.next_event_ns()
    assert done_ns is not None
    assert done_ns - profile.host_ns(0) == pytest.approx(25.0e6, rel=1e-5)
    assert scheduler.block_size == profile.block_size


def test_four_lengths_in_blocks_of_16_waste_a_sixth_of_192_slots() -> None:
    lengths = [17, 31, 48, 65]
    scheduler, plan = _prompts_in_one_step(lengths)
    assert [len(admitted.blocks) for admitted in plan.admitted] == [2, 2, 3, 5]
    slots = (scheduler.total_blocks - scheduler.free_blocks) * scheduler.block_size
    wasted = slots - plan.shape.context_tokens
    assert (slots, wasted) == (192, 31)
    assert round(100 * wasted / slots, 1) == 16.1


def test_a_ragged_step_computes_2432_tokens_where_a_padded_one_computes_8192() -> None:
    _, plan = _prompts_in_one_step([2048, 128, 128, 128])
    assert plan.shape.num_tokens == 2432
    assert plan.shape.num_requests * plan.shape.max_chunk_tokens == 8192

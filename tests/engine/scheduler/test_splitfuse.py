"""`splitfuse`: what sets it apart from `sarathi` is that its steps are of an even size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.builders.schedulers import add_request, commit_plan, make_scheduler

from goodput_core.steptime import RooflineForm

if TYPE_CHECKING:
    from goodput_engine.scheduler.scheduler import Scheduler

BUDGET = 512
# Up to 200 tokens the weights bound a step, beyond them arithmetic does.
DEVICE = RooflineForm(
    c0_ns=6_000_000, c1_ns_per_token=30_000, c2_ns_per_context_token=0, c4_ns_per_request=0
)


def _scheduler(policy: str, *, seqs: int = 64) -> Scheduler:
    return make_scheduler(
        policy, blocks=10_000, budget=BUDGET, seqs=seqs, waiting=1000, model=100_000
    )


def _add(scheduler: Scheduler, rid: int, tokens: int, max_output: int = 100) -> None:
    add_request(scheduler, rid, tokens, max_output)


def _step(scheduler: Scheduler) -> tuple[int, list[int], int]:
    """Tokens of the next step, of whose prompts, and the time it takes."""
    plan = scheduler.plan(0)
    assert plan is not None
    step_ns = DEVICE.step_ns(plan.shape)
    commit_plan(scheduler, plan, step_ns=step_ns)
    return plan.shape.num_tokens, [chunk.rid for chunk in plan.chunks], step_ns


def _decoding(policy: str, requests: int) -> Scheduler:
    """A scheduler with this many requests that do nothing but decode."""
    scheduler = _scheduler(policy)
    for rid in range(requests):
        _add(scheduler, rid, 1)
    _step(scheduler)
    return scheduler


@pytest.mark.parametrize(
    ("policy", "sizes"),
    [
        pytest.param("splitfuse", [412, 412, 412, 412], id="splitfuse, even"),
        pytest.param("sarathi", [512, 512, 512, 114], id="sarathi, full and a rest"),
    ],
)
def test_prompts_are_split_and_fused_to_one_size_of_step(policy: str, sizes: list[int]) -> None:
    scheduler = _decoding(policy, 8)
    _add(scheduler, 100, 1300)
    _add(scheduler, 101, 40)
    _add(scheduler, 102, 276)
    steps = [_step(scheduler) for _ in range(4)]
    assert [tokens for tokens, *_ in steps] == sizes
    assert steps[3][1][-1] == 102
    assert not _step(scheduler)[1], "as many steps with prompts for both"


def test_even_a_short_prompt_is_split_to_fill_a_step() -> None:
    scheduler = _scheduler("splitfuse")
    for rid in range(6):
        _add(scheduler, rid, 100, max_output=1)
    assert _step(scheduler)[:2] == (300, [0, 1, 2])
    scheduler = _scheduler("splitfuse")
    for rid in range(7):
        _add(scheduler, rid, 100, max_output=1)
    assert _step(scheduler)[:2] == (350, [0, 1, 2, 3])
    assert _step(scheduler)[:2] == (350, [3, 4, 5, 6])


def test_with_much_to_do_every_step_takes_the_whole_budget() -> None:
    scheduler = _scheduler("splitfuse")
    _add(scheduler, 1, 100_000 - 200)
    assert [_step(scheduler)[0] for _ in range(50)] == [BUDGET] * 50
    scheduler = _scheduler("splitfuse", seqs=100)
    for rid in range(100):
        _add(scheduler, rid, 50, max_output=1)
    assert _step(scheduler)[0] == BUDGET, "the tokens of a long queue are not counted"


def test_prompts_that_find_no_place_do_not_count() -> None:
    scheduler = _scheduler("splitfuse", seqs=1)
    _add(scheduler, 1, 600, max_output=1)
    _add(scheduler, 2, 600, max_output=1)
    assert [_step(scheduler)[:2] for _ in range(2)] == [(300, [1]), (300, [1])]


def _prompt_beside_decodes(policy: str) -> tuple[int, int]:
    """A prompt a little above the budget: the time until its first token, the longest step."""
    scheduler = _decoding(policy, 8)
    _add(scheduler, 100, 520)
    took: list[int] = []
    while scheduler.prefilling() or not took:
        took.append(_step(scheduler)[2])
    return sum(took), max(took)


def test_it_helps_where_full_steps_leave_a_small_rest() -> None:
    even_ns, even_longest_ns = _prompt_beside_decodes("splitfuse")
    full_ns, full_longest_ns = _prompt_beside_decodes("sarathi")
    assert even_ns < full_ns, "the rest costs a whole reading of the weights"
    assert even_longest_ns < 0.6 * full_longest_ns, "the pause between two tokens of the others"


def _short_before_long(policy: str) -> int:
    """The time until the first token of a prompt that would fit into a full step."""
    scheduler = _scheduler(policy)
    _add(scheduler, 1, 500)
    _add(scheduler, 2, 300)
    time_ns = 0
    while True:
        _, rids, step_ns = _step(scheduler)
        time_ns += step_ns
        if 2 in rids or 1 not in rids:
            return time_ns


def test_it_hurts_a_prompt_that_would_have_fitted_into_one_full_step() -> None:
    assert _short_before_long("splitfuse") > 1.4 * _short_before_long("sarathi")

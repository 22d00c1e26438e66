"""The trade-off of chunk sizes: the published orders, on a roofline, through the engine core.

Published for a 70B model (P99 TBT 420, 85, 65, 55 ms and 2800, 2650, 2550, 2400 tokens/s for
whole prompts and chunks of 512, 256, 128; a knee of throughput near a budget of 2048): the orders
must come out, not the numbers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
from tests.builders.schedulers import make_configure

from goodput_core.quantiles import P99, quantile
from goodput_core.steptime import RooflineForm
from goodput_core.units import NS_PER_S
from goodput_engine.core.build import build_core
from goodput_engine.device.load import load_profile
from goodput_engine.messages import ExecutorInput, Submit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_engine.device.profile import DeviceProfile

LONG = 4000
WIDTH = 256
H100 = load_profile("llama-3-8b-h100")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The result of a load that is present from the start."""

    p99_tbt_ns: int
    p99_ttft_ns: int
    tokens_per_s: float


def _mixed(seed: int) -> Iterator[tuple[int, int]]:
    """Prompts and answers: one prompt in ten is long."""
    draw = random.Random(seed)
    for _ in range(800):
        long = draw.random() < 0.1
        yield LONG if long else draw.randint(50, 150), draw.randint(50, 150)


def _prompts(seed: int) -> Iterator[tuple[int, int]]:
    """Nearly all work is in the prompts."""
    draw = random.Random(seed)
    for _ in range(200):
        yield draw.choice((500, 2000)), 8


def _run(
    profile: DeviceProfile, load: Iterator[tuple[int, int]], *, budget: int, width: int
) -> LoadResult:
    """`sarathi`, with the host's time before each step, on a load that is there from the start."""
    core = build_core(
        make_configure(
            device=profile.name,
            token_budget=budget,
            max_num_seqs=width,
            max_waiting=10_000,
            depth=0,
        ),
        profile,
    )
    tokens = 0
    for rid, (prompt, answer) in enumerate(load):
        tokens += answer
        submit = Submit(
            rid=rid,
            arrival_ns=0,
            input_tokens=prompt,
            max_output_tokens=answer,
            executor=ExecutorInput(ignore_eos=True),
        )
        assert core.submit(submit, 0) is None
    core.advance(0)
    latest: dict[int, int] = {}
    first: list[int] = []
    gaps: list[int] = []
    now_ns = 0
    while (event_ns := core.next_event_ns()) is not None:
        now_ns = event_ns
        outcome = core.advance(now_ns)
        assert outcome is not None
        for rid in [*outcome.advanced, *(p.request.rid for p in outcome.progress)]:
            before_ns = latest.get(rid)
            if before_ns is None:
                first.append(now_ns)
            else:
                gaps.append(now_ns - before_ns)
            latest[rid] = now_ns
    assert len(first) + len(gaps) == tokens
    return LoadResult(
        p99_tbt_ns=quantile(gaps, P99),
        p99_ttft_ns=quantile(first, P99),
        tokens_per_s=tokens * NS_PER_S / now_ns,
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_smaller_chunks_trade_time_to_first_token_and_some_throughput_for_even_tokens(
    seed: int,
) -> None:
    whole, *chunked = (
        _run(H100, _mixed(seed), budget=WIDTH + chunk, width=WIDTH)
        for chunk in (LONG, 512, 256, 128)
    )
    larger = [whole, *chunked[:-1]]
    for one, smaller in zip(larger, chunked, strict=True):
        assert smaller.p99_tbt_ns < one.p99_tbt_ns
        assert smaller.p99_ttft_ns > one.p99_ttft_ns
        assert smaller.tokens_per_s < one.tokens_per_s
    assert chunked[0].p99_tbt_ns < 0.25 * whole.p99_tbt_ns, "the stall is what is gained"
    assert chunked[-1].tokens_per_s > 0.9 * whole.tokens_per_s, "slightly"


@pytest.mark.parametrize(
    ("bend", "flat_from"), [pytest.param(203, 256, id="H100"), pytest.param(2048, 2048, id="2048")]
)
def test_throughput_rises_with_the_budget_up_to_where_the_roofline_bends(
    bend: int, flat_from: int
) -> None:
    form = H100.form
    assert isinstance(form, RooflineForm)
    bent = replace(form, c0_ns=form.c1_ns_per_token * bend)
    budgets = [128, 256, 512, 1024, 2048, 4096]
    rates = [
        _run(replace(H100, form=bent), _prompts(3), budget=budget, width=64).tokens_per_s
        for budget in budgets
    ]
    for at, budget in enumerate(budgets[1:], start=1):
        gain = rates[at] / rates[at - 1]
        if budget <= flat_from:
            assert gain > 1.4, f"{budget} is below the bend or the first above it"
        else:
            assert 0.99 < gain < 1.05, f"{budget} is beyond the bend"

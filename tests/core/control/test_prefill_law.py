"""The prefill law, rule by rule as docs/control.md lists them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from goodput_core.control import (
    PrefillDecision,
    PrefillObservation,
    PrefillParams,
    PrefillReason,
    PrefillState,
    prefill_law,
)
from goodput_core.spec.choices import BudgetLaw
from goodput_core.steptime import OnlineStepTime, RooflineForm, StepShape
from goodput_core.steptime.fitting import StepSample
from goodput_core.units import NS_PER_MS

MS = NS_PER_MS
# 10 ms to read the weights, 200 tokens' worth; 50 µs a token beyond.
FORM = RooflineForm(
    c0_ns=10 * MS, c1_ns_per_token=50_000, c2_ns_per_context_token=10, c4_ns_per_request=5_000
)
PARAMS = PrefillParams(
    law=BudgetLaw.MODEL, min_tokens=1, max_tokens=4096, safety_percent=90, form=FORM
)
DECODES = StepShape.of(decodes=32, decode_context_tokens=32_000)


def _decide(
    params: PrefillParams = PARAMS,
    state: PrefillState | None = None,
    *,
    decodes: StepShape = DECODES,
    tightest_ms: int | None = 50,
    overdue: bool = False,
    measured: StepSample | None = None,
) -> tuple[PrefillState, PrefillDecision]:
    seen = PrefillObservation(
        decodes=decodes,
        tightest_ns=None if tightest_ms is None else tightest_ms * MS,
        overdue=overdue,
        measured=measured,
    )
    return prefill_law(PrefillState() if state is None else state, seen, params, 0)


def test_the_budget_is_the_largest_that_meets_the_tightest_tpot() -> None:
    _, decision = _decide()
    assert decision.reason is PrefillReason.KEEPS_TPOT
    step_ns = FORM.step_ns(DECODES.with_chunk(0, decision.tokens))
    assert step_ns <= 45 * MS < FORM.step_ns(DECODES.with_chunk(0, decision.tokens + 64))


def test_a_tighter_target_or_a_smaller_safety_factor_lowers_the_budget() -> None:
    shares = [_decide(tightest_ms=t)[1].tokens for t in (20, 30, 50, 80)]
    assert shares == sorted(set(shares))
    careful = [_decide(replace(PARAMS, safety_percent=s))[1].tokens for s in (60, 75, 95)]
    assert careful == sorted(set(careful))


@pytest.mark.parametrize("law", [BudgetLaw.EMA, BudgetLaw.MODEL])
def test_a_device_thirty_percent_slower_is_followed_within_twenty_steps(law: BudgetLaw) -> None:
    rng = random.Random(7)
    form = OnlineStepTime()
    params = replace(PARAMS, law=law, form=form, safety_percent=95)
    state, sample, slowness = PrefillState(), None, 1.0
    took: list[int] = []
    for step in range(2000):
        if step == 1900:
            slowness = 1.3
        decodes = StepShape.of(decodes=24 + rng.randrange(17), decode_context_tokens=32_000)
        state, decision = _decide(params, state, decodes=decodes, measured=sample)
        shape = decodes.with_chunk(0, max(1, decision.tokens))
        step_ns = round(FORM.step_ns(shape) * slowness)
        took.append(step_ns)
        sample = StepSample(shape, step_ns)
        form.observe(shape, step_ns)
    settled = took[1000:1900]
    assert sum(settled) / len(settled) == pytest.approx(47.5 * MS, rel=0.06)
    assert took[1900] > 55 * MS, "the change is not predicted"
    assert max(took[1920:1940]) <= 50 * MS, "the target is met again"
    assert sum(took[1960:]) / 40 == pytest.approx(47.5 * MS, rel=0.08), (
        "and the budget is not lower than needed"
    )


def test_a_chunk_of_a_long_prompt_is_smaller() -> None:
    _, fresh = _decide()
    seen = replace(fresh.observation, begun_tokens=500_000)
    _, late = prefill_law(PrefillState(), seen, PARAMS, 0)
    assert FORM.step_ns(DECODES.with_chunk(500_000, late.tokens)) <= 45 * MS
    assert late.tokens < fresh.tokens


def test_the_budget_falls_at_once_and_rises_slowly() -> None:
    state, high = _decide(tightest_ms=80)
    state, low = _decide(state=state, tightest_ms=20)
    assert low.tokens == _decide(tightest_ms=20)[1].tokens, "in one step"
    shares: list[int] = []
    while not shares or shares[-1] < high.tokens:
        state, decision = _decide(state=state, tightest_ms=80)
        shares.append(decision.tokens)
    assert len(shares) > 10
    steps = [b - a for a, b in zip([low.tokens, *shares], shares, strict=False)]
    assert all(0 < s <= max(64, a // 8) for s, a in zip(steps, [low.tokens, *shares], strict=False))


@given(
    law=st.sampled_from(BudgetLaw),
    decodes=st.integers(0, 300),
    tightest_ms=st.none() | st.integers(1, 500),
    bounds=st.tuples(st.integers(1, 3000), st.integers(1, 3000)).map(sorted),
    safety=st.integers(50, 100),
    average=st.floats(0, 1e6),
    last=st.none() | st.integers(0, 4096),
    skipped=st.integers(0, 20),
    overdue=st.booleans(),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_budgets_stay_within_bounds_and_are_multiples_of_64(
    law: BudgetLaw,
    decodes: int,
    tightest_ms: int | None,
    bounds: list[int],
    safety: int,
    average: float,
    last: int | None,
    skipped: int,
    overdue: bool,
) -> None:
    low, high = bounds
    params = replace(
        PARAMS, law=law, min_tokens=low, max_tokens=high, safety_percent=safety, form=FORM
    )
    state = PrefillState(ns_per_token=average, share=last, skipped=skipped)
    shape = StepShape.of(decodes=decodes, decode_context_tokens=decodes * 500)
    _, decision = _decide(params, state, decodes=shape, tightest_ms=tightest_ms, overdue=overdue)
    room = max(0, high - decodes)
    assert 0 <= decision.tokens <= room
    if decision.reason is not PrefillReason.SKIPPED:
        assert decision.tokens + decodes >= min(low, high) or room < 64
        assert decision.tokens % 64 == 0 or decision.tokens == room
    if decodes and room >= 64 and decision.reason is not PrefillReason.SKIPPED:
        assert decision.tokens >= 64


@pytest.mark.parametrize("law", BudgetLaw)
def test_prefill_is_skipped_if_fewer_than_64_tokens_are_left(law: BudgetLaw) -> None:
    params = replace(PARAMS, law=law, max_tokens=95)
    state, decision = _decide(params)
    assert (decision.tokens, decision.reason) == (0, PrefillReason.SKIPPED)
    assert state.skipped == 1
    _, room = _decide(replace(params, max_tokens=96))
    assert room.tokens == 64


def test_prefill_is_skipped_if_the_target_leaves_no_time_for_64_tokens() -> None:
    _, decision = _decide(tightest_ms=11)
    assert (decision.tokens, decision.reason) == (0, PrefillReason.SKIPPED)


def test_min_tokens_lets_prefills_progress() -> None:
    _, decision = _decide(replace(PARAMS, min_tokens=256), tightest_ms=11)
    assert (decision.tokens, decision.reason) == (256, PrefillReason.FLOOR), "224 in whole 64s"


def test_overdue_prompts_do_not_starve() -> None:
    state = PrefillState()
    shares: list[int] = []
    for _ in range(27):
        state, decision = _decide(state=state, tightest_ms=11, overdue=True)
        shares.append(decision.tokens)
    assert shares == [*[0] * 8, 64] * 3
    assert decision.reason is PrefillReason.OVERDUE
    patient = PrefillState(skipped=100)
    assert _decide(state=patient, tightest_ms=11)[1].reason is PrefillReason.SKIPPED


def test_an_overdue_prompt_stays_within_the_upper_bound() -> None:
    late = PrefillState(skipped=8)
    params = replace(PARAMS, max_tokens=40)
    assert _decide(params, late, overdue=True)[1].tokens == 8
    full = replace(PARAMS, max_tokens=32)
    assert _decide(full, late, overdue=True)[1].reason is PrefillReason.SKIPPED


def test_without_decodes_or_targets_all_tokens_are_available() -> None:
    alone = StepShape.of()
    small = replace(PARAMS, max_tokens=40)
    assert _decide(small, decodes=alone)[1].tokens == 40
    _, decision = _decide(tightest_ms=None)
    assert (decision.tokens, decision.reason) == (4064, PrefillReason.UNPROMISED)


def test_fixed_uses_the_rest_of_the_budget() -> None:
    """Budget 1,024 with 96 decodes and 1,800 waiting prefill tokens: 928 now, 872 later."""
    params = replace(PARAMS, law=BudgetLaw.FIXED, max_tokens=1024)
    decodes = StepShape.of(decodes=96, decode_context_tokens=9600)
    assert _decide(params, decodes=decodes, tightest_ms=1)[1].tokens == 928


def test_ema_divides_the_target_by_the_time_per_token() -> None:
    params = replace(PARAMS, law=BudgetLaw.EMA)
    measured = StepSample(DECODES.with_chunk(0, 968), 100 * MS)
    state, decision = _decide(params, measured=measured)
    assert state.ns_per_token == 100_000
    assert decision.tokens == 384, "45 ms are 450 tokens, 32 of them decodes; in whole 64s"


def test_ema_starts_with_64_tokens() -> None:
    assert _decide(replace(PARAMS, law=BudgetLaw.EMA))[1].tokens == 64


def test_law_and_bounds_may_change_between_two_steps() -> None:
    state, by_model = _decide()
    state, fixed = _decide(replace(PARAMS, law=BudgetLaw.FIXED), state)
    state, lower = _decide(replace(PARAMS, max_tokens=256), state)
    assert fixed.tokens == 4064
    assert lower.tokens == 224
    assert by_model.tokens not in (fixed.tokens, lower.tokens)


def test_a_decision_can_be_recomputed_from_its_inputs() -> None:
    state, first = _decide(measured=StepSample(DECODES, 5 * MS))
    _, decision = _decide(state=state, tightest_ms=30)
    assert prefill_law(state, decision.observation, decision.params, decision.at_ns)[1] == decision
    assert first.observation.measured is not None

"""The token budget's inner loop in the engine: steps sized by the targets of decoding requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.builders.schedulers import SteppedCore, make_configure

from goodput_core.errors import InputError
from goodput_core.slo.targets import Targets
from goodput_core.spec.choices import BudgetLaw, Policy
from goodput_core.steptime import RooflineForm
from goodput_core.units import NS_PER_MS
from goodput_engine.core.build import build_core
from goodput_engine.device.load import load_profile
from goodput_engine.messages import ExecutorInput, Limits, SetLimits, Submit
from goodput_engine.scheduler.policies.registry import POLICIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_core.steptime import StepShape
    from goodput_engine.scheduler.plan import StepOutcome

MS = NS_PER_MS
PACED = sorted(policy for policy, kind in POLICIES.items() if kind.uses_prefill_budget)


@dataclass(slots=True)
class SlowingForm:
    """A device that can get slower while it serves."""

    slowness: float = 1.0
    context_ns: int = 1

    @property
    def _form(self) -> RooflineForm:
        """10 ms for the weights, 200 tokens' worth of arithmetic."""
        return RooflineForm(
            c0_ns=10 * MS,
            c1_ns_per_token=50_000,
            c2_ns_per_context_token=self.context_ns,
            c4_ns_per_request=5_000,
        )

    def step_ns(self, shape: StepShape) -> int:
        return round(self._form.step_ns(shape) * self.slowness)

    def chunk_within(self, beside: StepShape, start: int, limit_ns: float) -> float:
        return self._form.chunk_within(beside, start, limit_ns / self.slowness)

    def decode_times(self, num_decodes: int, contexts: Sequence[int]) -> list[int]:
        return [round(t * self.slowness) for t in self._form.decode_times(num_decodes, contexts)]


class SlowingCore(SteppedCore):
    """A core on such a device, with requests whose outputs have a known length."""

    def __init__(self, *, kv_blocks: int = 30_000, **changes: Any) -> None:
        values: dict[str, Any] = {
            "token_budget": 2048,
            "max_num_seqs": 64,
            "max_waiting": 10_000,
            "budget_law": "model",
        }
        self.form = SlowingForm()
        profile = replace(
            load_profile("unit"), form=self.form, kv_blocks=kv_blocks, max_model_tokens=1_000_000
        )
        super().__init__(core=build_core(make_configure(**(values | changes)), profile))
        self._rid = 0

    def submit_now(
        self, count: int = 1, *, prompt: int = 10, output: int = 10_000,
        tpot_ms: int | None = 50, ttft_ms: int | None = 1000,
    ) -> None:  # fmt: skip
        """Requests that come now."""
        for _ in range(count):
            self._rid += 1
            self.submit(
                Submit(
                    rid=self._rid,
                    arrival_ns=self.now_ns,
                    input_tokens=prompt,
                    targets=Targets(
                        ttft_ns=None if ttft_ms is None else ttft_ms * MS,
                        tpot_ns=None if tpot_ms is None else tpot_ms * MS,
                    ),
                    executor=ExecutorInput(output_tokens=output, ignore_eos=True),
                )
            )

    def steps(self, count: int) -> list[StepOutcome]:
        """So many steps more."""
        before = len(self.outcomes)
        self.wake()
        while len(self.outcomes) < before + count and self.advance():
            pass
        self.core.scheduler.check_integrity()
        return self.outcomes[before:]

    def took_ms(self, count: int) -> list[float]:
        """How long each of so many more steps took."""
        return [outcome.result.step_ns / MS for outcome in self.steps(count)]


def _learnt(**changes: Any) -> SlowingCore:
    """An engine in which 32 requests decode and a prompt that never ends is computed."""
    engine = SlowingCore(**changes)
    engine.submit_now(32)
    engine.steps(2)
    engine.submit_now(prompt=400_000, output=1)
    engine.steps(60)
    return engine


@pytest.mark.parametrize("policy", PACED)
@pytest.mark.parametrize("law", [BudgetLaw.EMA, BudgetLaw.MODEL])
def test_running_requests_keep_their_tpot_beside_a_long_prompt(policy: str, law: str) -> None:
    took = _learnt(policy=policy, budget_law=law).took_ms(100)
    assert max(took) <= 50
    assert sum(took) / 100 > 35, "and the prompt gets the time that they leave"


def test_without_the_law_a_long_prompt_stops_them() -> None:
    assert min(_learnt(budget_law=None).took_ms(10)) > 100
    assert min(_learnt(budget_law="fixed").took_ms(10)) > 100


def test_a_device_thirty_percent_slower_is_followed_within_twenty_steps() -> None:
    engine = _learnt()
    engine.form.slowness = 1.3
    took = engine.took_ms(40)
    assert took[1] > 50
    assert max(took[20:]) <= 50


def test_what_a_prompts_next_chunk_reads_of_itself_counts() -> None:
    """Late chunks of a long prompt read all of its computed tokens, and get smaller."""
    engine = SlowingCore(max_num_seqs=64)
    engine.form.context_ns = 100
    engine.submit_now(32)
    engine.steps(2)
    engine.submit_now(prompt=400_000, output=1)
    engine.steps(60)
    assert max(engine.took_ms(250)) <= 50
    late = engine.outcomes[-1].plan
    assert late.chunks[0].start * 100 > 10 * MS
    assert late.shape.prefill_tokens < engine.outcomes[40].plan.shape.prefill_tokens


def test_the_tightest_promise_of_those_who_decode_counts_while_they_do() -> None:
    engine = SlowingCore()
    engine.submit_now(8, tpot_ms=100)
    engine.submit_now(1, tpot_ms=25, output=100)
    engine.steps(2)
    engine.submit_now(prompt=400_000, output=1)
    steps = engine.took_ms(160)
    assert max(steps[40:90]) <= 25
    assert min(steps[-20:]) > 50, "once it has ended, the others' promise counts"


def test_law_safety_and_budget_change_between_two_steps() -> None:
    engine = _learnt()
    before = engine.took_ms(5)

    def change(revision: int, **limits: Any) -> list[float]:
        engine.core.set_limits(SetLimits(revision=revision, limits=Limits(**limits)))
        return engine.took_ms(6)[2:]

    assert max(change(1, safety_percent=60)) < min(before)
    assert min(change(2, budget_law="fixed")) > 90
    assert max(change(3, token_budget=256)) < 20
    state = engine.core.state(engine.now_ns)
    assert (state.budget_law, state.safety_percent, state.token_budget) == ("fixed", 60, 256)
    assert (state.prompt_tokens, state.prompt_reason) == (224, "Ceiling")
    assert state.step_time_error < 0.1


def test_prompts_do_not_starve_behind_decodes_that_fill_the_step() -> None:
    engine = SlowingCore(token_budget=100)
    engine.submit_now(60, prompt=1, tpot_ms=None)
    engine.steps(3)
    engine.submit_now(prompt=1000, output=1, ttft_ms=1)
    engine.steps(1)
    shares = [outcome.plan.shape.prefill_tokens for outcome in engine.steps(40)]
    assert set(shares) == {0, 40}
    assert max(map(len, "".join("x" if s else " " for s in shares).split("x"))) == 8


def test_a_prompt_that_has_time_waits_for_64_tokens() -> None:
    engine = SlowingCore(token_budget=100)
    engine.submit_now(60, prompt=1, tpot_ms=None)
    engine.steps(3)
    engine.submit_now(prompt=1000, output=1, ttft_ms=100_000)
    assert {outcome.plan.shape.prefill_tokens for outcome in engine.steps(40)} == {0}


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - set(PACED)))
def test_policies_that_keep_prompts_whole_or_size_steps_themselves_are_left_alone(
    policy: str,
) -> None:
    assert SlowingCore(policy=policy).core.scheduler.prefill_budget is None


def test_a_law_that_does_not_exist_is_rejected() -> None:
    with pytest.raises(InputError, match="token budget law 'pid' is not one of fixed, ema, model"):
        SlowingCore(budget_law="pid")


@given(
    policy=st.sampled_from([Policy.SARATHI, Policy.SPLITFUSE]),
    law=st.sampled_from(BudgetLaw),
    budget=st.integers(8, 300),
    requests=st.lists(
        st.tuples(
            st.integers(0, 500),
            st.integers(1, 200),
            st.integers(1, 40),
            st.sampled_from([None, 12, 20, 50]),
        ),
        min_size=1,
        max_size=8,
    ),
)
@settings(max_examples=examples(30), deadline=None)
def test_all_requests_end_within_the_budget_and_fast_forward_changes_nothing(
    policy: str, law: str, budget: int, requests: list[tuple[int, int, int, int | None]]
) -> None:
    def life(*, skips: bool) -> list[tuple[int, ...]]:
        core = SlowingCore(
            kv_blocks=1000,
            policy=policy,
            budget_law=law,
            token_budget=budget,
        ).core
        ends: list[tuple[int, ...]] = []
        coming = sorted(((at_ms * MS, p, o, t) for at_ms, p, o, t in requests), key=itemgetter(0))
        while coming or core.scheduler.has_work:
            until_ns = coming[0][0] if coming else 1 << 60
            due_ns = core.next_event_ns()
            if due_ns is not None and due_ns < until_ns:
                if skips and core.fast_forward(until_ns) is not None:
                    continue
                outcome = core.advance(due_ns)
                if outcome is not None:
                    assert outcome.plan.shape.num_tokens <= budget
                    ends += [
                        (outcome.result.at_ns, p.request.rid, p.request.output_tokens)
                        for p in outcome.progress
                        if p.finish_reason
                    ]
                continue
            at_ns, prompt, output, tpot_ms = coming.pop(0)
            core.submit(
                Submit(
                    rid=len(coming),
                    arrival_ns=at_ns,
                    input_tokens=prompt,
                    targets=Targets(
                        ttft_ns=100 * MS, tpot_ns=None if tpot_ms is None else tpot_ms * MS
                    ),
                    executor=ExecutorInput(output_tokens=output, ignore_eos=True),
                ),
                at_ns,
            )
            core.advance(at_ns)
        core.scheduler.check_integrity()
        return ends

    ends = life(skips=False)
    assert len(ends) == len(requests)
    assert life(skips=True) == ends

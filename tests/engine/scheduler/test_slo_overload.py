"""The gain of deadline-aware scheduling, on an emulated device in virtual time."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from goodput_core.slo.targets import Targets
from goodput_core.spec.choices import Policy, Preemption
from goodput_core.units import BYTES_PER_GIB, NS_PER_MS, NS_PER_S
from goodput_engine.core.build import build_core
from goodput_engine.device.load import load_profile
from goodput_engine.messages import Configure, ExecutorInput, Submit
from goodput_engine.scheduler.policies.slo.policy import SloPolicy

_DEVICE = "llama-3-8b-h100"
_INTERACTIVE = (500 * NS_PER_MS, 50 * NS_PER_MS)
_BATCH = (10 * NS_PER_S, 200 * NS_PER_MS)


@dataclass(slots=True, kw_only=True)
class Seen:
    """The observations of a client."""

    submit: Submit
    first_ns: int = 0
    last_ns: int = 0
    tokens: int = 0

    @property
    def attained(self) -> bool:
        """True if both targets held to the end."""
        sent, targets = self.submit, self.submit.targets
        ttft_ns, tpot_ns = targets.ttft_ns, targets.tpot_ns
        assert ttft_ns is not None
        assert tpot_ns is not None
        return (
            self.tokens == sent.executor.output_tokens
            and self.first_ns - sent.arrival_ns <= ttft_ns
            and self.last_ns - self.first_ns <= tpot_ns * (self.tokens - 1)
        )


def _workload(rate: float, seconds: int, seed: int) -> list[Submit]:
    """Prompts of about 1,100 and answers of about 210 tokens; a quarter may take its time."""
    rng = random.Random(seed)
    at_s, submits = 0.0, list[Submit]()
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        ttft_ns, tpot_ns = _BATCH if rng.random() < 0.25 else _INTERACTIVE
        submits.append(
            Submit(
                rid=len(submits),
                arrival_ns=round(at_s * NS_PER_S),
                input_tokens=min(8000, max(16, round(rng.lognormvariate(6.6, 0.9)))),
                max_output_tokens=2000,
                slo_class="batch" if ttft_ns == _BATCH[0] else "interactive",
                targets=Targets(ttft_ns=ttft_ns, tpot_ns=tpot_ns),
                executor=ExecutorInput(
                    output_tokens=min(2000, max(1, round(rng.lognormvariate(5.0, 0.8))))
                ),
            )
        )
    return submits


def _run(policy: Policy, submits: list[Submit]) -> tuple[int, SloPolicy | None]:
    """Requests that attained, and the policy."""
    config = Configure(
        device=_DEVICE,
        policy=policy,
        preemption=Preemption.HYBRID,
        token_budget=2048,
        min_token_budget=256,
        max_token_budget=8192,
        max_num_seqs=256,
        max_waiting=100_000,
        swap_space_bytes=16 * BYTES_PER_GIB,
    )
    core = build_core(config, load_profile(_DEVICE))
    seen = {submit.rid: Seen(submit=submit) for submit in submits}
    coming, now_ns = list(reversed(submits)), 0
    while True:
        event_ns = core.next_event_ns()
        if coming and (event_ns is None or coming[-1].arrival_ns <= event_ns):
            submit = coming.pop()
            now_ns = submit.arrival_ns
            core.submit(submit, now_ns)
        elif event_ns is None:
            break
        else:
            now_ns = event_ns
        outcome = core.advance(now_ns)
        if outcome is None:
            continue
        at_ns = outcome.result.at_ns
        for rid in (*outcome.advanced, *(p.request.rid for p in outcome.progress)):
            one = seen[rid]
            one.first_ns = one.first_ns or at_ns
            one.last_ns = at_ns
            one.tokens += 1
    used = core.scheduler.policy
    return sum(one.attained for one in seen.values()), used if isinstance(used, SloPolicy) else None


@pytest.mark.parametrize(
    ("rate", "times"), [(8.0, 1.0), (18.0, 1.0), (24.0, 1.5)], ids=["light", "full", "overload"]
)
def test_more_promises_are_kept_than_by_policies_that_do_not_know_them(
    rate: float, times: float
) -> None:
    submits = _workload(rate, 60, seed=1)
    kept, policy = _run(Policy.SLO, submits)
    others = [_run(name, submits)[0] for name in (Policy.VLLM, Policy.SARATHI, Policy.SJF)]
    assert kept >= times * max(others), (kept, others, len(submits))
    assert policy is not None
    assert policy.model.error < 0.05
    assert policy.prediction_error.judged > 100

"""Retries of refused requests: recognised by their prompts, and preferred to new requests."""

from __future__ import annotations

import heapq
import random
from typing import Any

import pytest
from tests.builders.slo_bench import SloBench

from goodput_core.slo.targets import Targets
from goodput_core.spec.choices import Policy, Preemption
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.core.build import build_core
from goodput_engine.device.load import load_profile
from goodput_engine.messages import Configure, ExecutorInput, Submit
from goodput_engine.scheduler.policies.slo.admission import Refusal, SLOAdmission
from goodput_engine.scheduler.policies.slo.offers import OfferedWork
from goodput_engine.scheduler.policies.slo.retries import RefusedPrompts
from goodput_engine.scheduler.request_table import ScheduledRequest

_DEVICE = "llama-3-8b-h100"


def _request(
    arrival_s: float, hashes: tuple[int, ...], *, tokens: int = 64, slo_class: str = "chat"
) -> ScheduledRequest:
    return ScheduledRequest(
        rid=1,
        arrival_ns=round(arrival_s * NS_PER_S),
        input_tokens=tokens,
        block_hashes=hashes,
        slo_class=slo_class,
    )


@pytest.mark.parametrize(
    ("retry", "invited"),
    [
        (_request(2, (1, 2, 3)), True),
        (_request(30, (1, 2, 3)), True),
        (_request(1.9, (1, 2, 3)), False),
        (_request(2, (1, 2)), False),
        (_request(2, (1, 2, 3, 4)), False),
        (_request(2, (1, 2, 3), tokens=65), False),
        (_request(2, (1, 2, 3), slo_class="batch"), False),
    ],
    ids=["in time", "later", "too early", "shorter", "longer", "other question", "other class"],
)
def test_a_prompt_is_recognised_from_the_stated_time_on(
    retry: ScheduledRequest, *, invited: bool
) -> None:
    refused = RefusedPrompts()
    refused.add(_request(0, (1, 2, 3)), 2 * NS_PER_S)
    assert refused.accepts_invitation(retry) is invited


def test_each_refusal_invites_one_retry() -> None:
    refused = RefusedPrompts()
    refused.add(_request(0, (7,)), NS_PER_S)
    refused.add(_request(0, (7,)), 2 * NS_PER_S)
    assert [refused.accepts_invitation(_request(5, (7,))) for _ in range(3)] == [True, True, False]


def test_a_retry_before_the_stated_time_waits_again() -> None:
    refused = RefusedPrompts()
    refused.add(_request(0, (7,)), NS_PER_S)
    assert not refused.accepts_invitation(_request(0.5, (7,)))
    refused.add(_request(0.5, (7,)), 3 * NS_PER_S)
    assert not refused.accepts_invitation(_request(1.5, (7,)))


def test_a_prompt_without_a_full_block_is_not_recognised() -> None:
    refused = RefusedPrompts()
    refused.add(_request(0, ()), NS_PER_S)
    assert not refused.accepts_invitation(_request(5, ()))


def test_the_oldest_prompts_are_forgotten_first() -> None:
    refused = RefusedPrompts()
    for number in range(5000):
        refused.add(_request(0, (number,)), NS_PER_S)
    known = [n for n in range(5000) if refused.accepts_invitation(_request(1, (n,)))]
    assert known == list(range(5000 - 4096, 5000))


def test_a_retry_that_waits_for_a_decision_remains_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its invitation is used up at its arrival."""
    bench = SloBench()
    retries: list[tuple[int, bool]] = []
    decide = SLOAdmission.decide

    def open_once(
        admission: SLOAdmission, request: ScheduledRequest, *args: Any, **options: Any
    ) -> Any:
        retries.append((request.rid, options["retry"]))
        if not options.get("again"):
            return Refusal(wait_ns=0, final=request.rid == 1)
        return decide(admission, request, *args, **options)

    monkeypatch.setattr(SLOAdmission, "decide", open_once)
    bench.add(1, 64, ttft_ms=1000, block_hashes=(7, 8, 9, 10))
    assert bench.refusals[-1] is not None
    bench.pass_time(1000)
    bench.add(2, 64, ttft_ms=1000, block_hashes=(7, 8, 9, 10))
    bench.add(3, 64, ttft_ms=1000, block_hashes=(7, 8, 9, 10))
    bench.step()
    assert retries == [(1, False), (2, True), (3, False), (2, True), (3, False)]


def test_the_load_counts_requests_worth_at_least_as_much() -> None:
    offered = OfferedWork()
    low, high = OfferedWork.rank(0, 1, 100), OfferedWork.rank(0, 100, 1)
    for number in range(400):
        rank, share = (low, 0.5) if number % 2 else (high, 0.25)
        at_ns = number * NS_PER_S // 20
        offered.add(rank, share * NS_PER_S / 10, window_ns=0, stay_ns=0.0, now_ns=at_ns)
    now_ns = 20 * NS_PER_S
    assert offered.load(high, now_ns) == pytest.approx(0.25, rel=0.05)
    assert offered.load(low, now_ns) == pytest.approx(0.75, rel=0.05)


def _first_retries(rate_per_s: float, *, recognised: bool) -> tuple[int, int]:
    """Offer equal requests for 60 s, each refused one once more at the stated time.

    Returns:
        The numbers of retries within these 60 s and of those that were admitted.
    """
    core = build_core(
        Configure(
            device=_DEVICE,
            policy=Policy.SLO,
            preemption=Preemption.RECOMPUTE,
            token_budget=2048,
            min_token_budget=64,
            max_token_budget=8192,
            max_num_seqs=256,
            max_waiting=1000,
        ),
        load_profile(_DEVICE),
    )
    rng, at_s = random.Random(5), 0.0
    coming: list[tuple[int, int, bool]] = []
    while (at_s := at_s + rng.expovariate(rate_per_s)) < 60:
        coming.append((round(at_s * NS_PER_S), len(coming), False))
    sent = retries = admitted = 0
    while coming:
        event_ns = core.next_event_ns()
        if event_ns is not None and event_ns < coming[0][0]:
            core.advance(event_ns)
            continue
        now_ns, client, again = heapq.heappop(coming)
        sent += 1
        rejected = core.submit(
            Submit(
                rid=sent,
                arrival_ns=now_ns,
                input_tokens=1024,
                max_output_tokens=60,
                block_hashes=[client if recognised else sent + 10**6],
                targets=Targets(ttft_ns=500 * NS_PER_MS, tpot_ns=50 * NS_PER_MS),
                executor=ExecutorInput(output_tokens=60),
            ),
            now_ns,
        )
        if again and now_ns < 60 * NS_PER_S:
            retries += 1
            admitted += rejected is None
        core.advance(now_ns)
        if rejected is not None and not again:
            assert 1 <= rejected.retry_after_s <= 10
            heapq.heappush(coming, (now_ns + rejected.retry_after_s * NS_PER_S, client, True))
    return retries, admitted


def test_clients_enter_more_often_at_their_first_retry_than_as_new_ones() -> None:
    """At this rate, more is offered than can be served."""
    retries, admitted = _first_retries(33, recognised=True)
    assert retries > 50
    others, lucky = _first_retries(33, recognised=False)
    assert admitted / retries > lucky / others + 0.1

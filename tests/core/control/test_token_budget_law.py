"""The token-budget law, rule by rule as docs/control.md lists them."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from goodput_core.control import (
    Bounds,
    ClassWindow,
    ReplicaPhase,
    ReplicaWindow,
    ServiceObservation,
    ServiceParams,
    Signal,
    TargetCounts,
    TargetStatus,
    TokenBudgetDecision,
    TokenBudgetReason,
    TokenBudgetState,
    Traffic,
    token_budget_law,
)
from goodput_core.slo.targets import SLOClass
from goodput_core.spec.choices import ControlMode
from goodput_core.units import NS_PER_S

S = NS_PER_S
PARAMS = ServiceParams(
    mode=ControlMode.AUTO,
    classes=(
        SLOClass(name="chat", ttft_ms=500, tpot_ms=50, objective=Fraction(9, 10)),
        SLOClass(name="batch", ttft_ms=30_000, tpot_ms=200, objective=Fraction(9, 10)),
        SLOClass(name="free", ttft_ms=500, tpot_ms=50),
    ),
    min_tokens=256,
    max_tokens=4096,
    initial_tokens=1024,
    max_num_seqs=64,
)
MISSED = TargetCounts(judged=50, missed=25)
CLOSE = TargetCounts(judged=50, close=40)
SLACK = TargetCounts(judged=50)
NONE = TargetCounts()
FEW = TargetCounts(judged=3, missed=3)


class Engines:
    """Engines that apply every decision."""

    def __init__(self, params: ServiceParams = PARAMS) -> None:
        self.params = params
        self.state = TokenBudgetState()
        self.now_s = 0

    def step(
        self,
        ttft: TargetCounts = NONE,
        tpot: TargetCounts = NONE,
        *,
        name: str = "chat",
        signal: Signal = Signal.FRESH,
        arrivals: int = 100,
        running: int = 10,
        waiting: int = 0,
        preemptions: int = 0,
        kv_used: int = 50,
        ready: int = 1,
        also: tuple[ClassWindow, ...] = (),
    ) -> TokenBudgetDecision:
        """Run one interval of ten seconds."""
        self.now_s += 10
        replica = ReplicaWindow(
            name="chat",
            phase=ReplicaPhase.READY,
            signal=Signal.FRESH,
            running=running,
            waiting=waiting,
            preemptions=preemptions,
            kv_used_blocks=kv_used,
            kv_total_blocks=100,
        )
        observation = ServiceObservation(
            interval_ns=10 * S,
            traffic=Traffic(signal=signal, arrivals=arrivals),
            classes=(ClassWindow(name=name, ttft=ttft, tpot=tpot), *also),
            replicas=tuple(replace(replica, name=f"chat-{i}") for i in range(ready)),
            desired_replicas=ready,
        )
        self.state, decision = token_budget_law(
            self.state, observation, self.params, self.now_s * S
        )
        return decision

    def run_until_exhausted(
        self, ttft: TargetCounts, tpot: TargetCounts, **interval: int
    ) -> list[TokenBudgetDecision]:
        """Repeat an interval until only more replicas help."""
        moves: list[TokenBudgetDecision] = []
        for _ in range(400):
            decision = self.step(ttft, tpot, **interval)  # type: ignore[arg-type]
            if decision.reason is TokenBudgetReason.NEEDS_REPLICAS:
                return [*moves, decision]
            if decision.reason is not TokenBudgetReason.SETTLING:
                moves.append(decision)
        raise AssertionError("the limits still change after 400 intervals")


def test_missed_tpot_lowers_the_budget_if_ttft_has_slack() -> None:
    decision = Engines().step(SLACK, MISSED)
    assert decision.reason is TokenBudgetReason.TPOT_MISSED
    assert decision.bounds == Bounds(
        min_tokens=256, max_tokens=768, safety_percent=85, max_num_seqs=64
    )


def test_missed_ttft_raises_the_budget_if_tpot_has_slack() -> None:
    decision = Engines().step(MISSED, SLACK)
    assert decision.reason is TokenBudgetReason.TTFT_MISSED
    assert decision.bounds == Bounds(
        min_tokens=256, max_tokens=1280, safety_percent=95, max_num_seqs=64
    )


def test_a_target_without_requests_has_slack() -> None:
    assert Engines().step(MISSED).reason is TokenBudgetReason.TTFT_MISSED, "outputs of one token"


@pytest.mark.parametrize(
    ("ttft", "tpot"), [(MISSED, MISSED), (CLOSE, MISSED), (MISSED, CLOSE)], ids=str
)
def test_replicas_are_needed_if_neither_target_has_slack(
    ttft: TargetCounts, tpot: TargetCounts
) -> None:
    decision = Engines().step(ttft, tpot)
    assert decision.reason is TokenBudgetReason.NEEDS_REPLICAS
    assert decision.bounds == Bounds.initial(PARAMS)


def test_missed_tpot_at_the_lower_bound_narrows_a_full_batch() -> None:
    moves = Engines().run_until_exhausted(SLACK, MISSED, running=64)
    reasons = [m.reason for m in moves]
    first = reasons.index(TokenBudgetReason.BATCH_TOO_WIDE)
    assert set(reasons[:first]) == {TokenBudgetReason.TPOT_MISSED}
    assert moves[first - 1].bounds.max_tokens == 256
    assert moves[first - 1].bounds.safety_percent == 60
    assert moves[first].bounds.max_num_seqs == 48
    assert moves[-1].bounds.max_num_seqs == 8, "an eighth of the manifest's is the lower bound"


def test_missed_tpot_at_the_lower_bound_needs_replicas_if_the_batch_is_not_full() -> None:
    moves = Engines().run_until_exhausted(SLACK, MISSED, running=20)
    assert {m.reason for m in moves[:-1]} == {TokenBudgetReason.TPOT_MISSED}
    assert moves[-1].bounds.max_num_seqs == 64


def test_missed_ttft_at_the_upper_bound_widens_a_full_batch() -> None:
    engines = Engines()
    engines.state = TokenBudgetState(
        bounds=replace(Bounds.initial(PARAMS), max_num_seqs=16), ready=1
    )
    moves = engines.run_until_exhausted(MISSED, SLACK, running=64)
    reasons = [m.reason for m in moves]
    first = reasons.index(TokenBudgetReason.BATCH_TOO_NARROW)
    assert moves[first - 1].bounds.max_tokens == 4096
    assert [m.bounds.max_num_seqs for m in moves[first:]] == [20, 25, 31, 38, 47, 58, 64, 64]


def test_missed_ttft_at_the_upper_bound_needs_replicas_if_kv_memory_is_full() -> None:
    engines = Engines()
    engines.state = TokenBudgetState(
        bounds=replace(Bounds.initial(PARAMS), max_num_seqs=16), ready=1
    )
    moves = engines.run_until_exhausted(MISSED, SLACK, running=64, kv_used=99)
    assert moves[-1].bounds.max_num_seqs == 16


def test_preemptions_narrow_the_batch() -> None:
    decision = Engines().step(MISSED, MISSED, running=40, preemptions=9)
    assert decision.reason is TokenBudgetReason.KV_EXHAUSTED
    assert decision.bounds.max_num_seqs == 30, "three quarters of the 40 running requests"


def test_more_replicas_restore_the_batch_width() -> None:
    engines = Engines()
    narrow = engines.step(MISSED, MISSED, running=40, preemptions=9)
    alone = [engines.step(SLACK, SLACK) for _ in range(30)]
    assert {d.bounds.max_num_seqs for d in alone} == {narrow.bounds.max_num_seqs}
    assert engines.step(SLACK, SLACK, ready=2).bounds.max_num_seqs == PARAMS.max_num_seqs


def test_limits_stay_within_the_manifest() -> None:
    lowest = Engines().run_until_exhausted(SLACK, MISSED)[-1].bounds
    highest = Engines().run_until_exhausted(MISSED, SLACK)[-1].bounds
    assert (lowest.max_tokens, highest.max_tokens) == (256, 4096)
    assert lowest.min_tokens == highest.min_tokens == 256


def test_a_changed_manifest_clamps_the_limits() -> None:
    engines = Engines()
    engines.step(SLACK, SLACK)
    engines.params = replace(PARAMS, max_tokens=512, max_num_seqs=16)
    bounds = engines.step(SLACK, SLACK).bounds
    assert (bounds.max_tokens, bounds.max_num_seqs) == (512, 16)


def test_requests_served_before_a_change_are_not_counted() -> None:
    engines = Engines()
    engines.step(MISSED, SLACK)
    settling = [engines.step(MISSED, SLACK) for _ in range(2)]
    assert {d.reason for d in settling} == {TokenBudgetReason.SETTLING}
    assert {d.ttft for d in settling} == {TargetStatus.UNKNOWN}
    assert engines.step(MISSED, SLACK).reason is TokenBudgetReason.TTFT_MISSED


def test_requests_queued_before_a_change_are_not_counted() -> None:
    engines = Engines()
    engines.step(MISSED, SLACK, waiting=100)
    queue = [80, 60, 40, 20, 10, 0, 0, 0]
    reasons = [engines.step(MISSED, SLACK, waiting=n).reason for n in queue]
    assert set(reasons) == {TokenBudgetReason.SETTLING}
    assert engines.step(MISSED, SLACK).reason is TokenBudgetReason.TTFT_MISSED


def test_a_changed_number_of_replicas_discards_the_counts() -> None:
    engines = Engines()
    engines.step(MISSED, MISSED, ready=2)
    assert engines.step(MISSED, MISSED, ready=3).reason is TokenBudgetReason.SETTLING
    crowd = Engines()
    crowd.step(MISSED, MISSED, ready=40)
    assert crowd.step(MISSED, MISSED, ready=41).reason is TokenBudgetReason.NEEDS_REPLICAS


@pytest.mark.parametrize(
    ("interval", "reason"),
    [
        ({"signal": Signal.MISSING}, TokenBudgetReason.METRICS_MISSING),
        ({"signal": Signal.FAILED}, TokenBudgetReason.SCRAPE_FAILED),
        ({"arrivals": 0}, TokenBudgetReason.NO_TRAFFIC),
        ({"arrivals": 5, "ttft": FEW, "tpot": FEW}, TokenBudgetReason.TOO_FEW),
        ({"ttft": SLACK, "tpot": SLACK}, TokenBudgetReason.KEPT),
    ],
    ids=lambda v: v.value if isinstance(v, TokenBudgetReason) else "",
)
def test_the_limits_stay(interval: dict[str, object], reason: TokenBudgetReason) -> None:
    engines = Engines()
    if reason is TokenBudgetReason.NO_TRAFFIC:
        observation = ServiceObservation(
            interval_ns=10 * S, traffic=Traffic(signal=Signal.FRESH), desired_replicas=1
        )
        _, decision = token_budget_law(TokenBudgetState(), observation, PARAMS, 10 * S)
    else:
        decision = engines.step(**interval)  # type: ignore[arg-type]
    assert decision.reason is reason
    assert decision.bounds == Bounds.initial(PARAMS)


def test_a_class_without_an_objective_is_ignored() -> None:
    assert Engines().step(MISSED, SLACK, name="free").reason is TokenBudgetReason.TOO_FEW


def test_the_worst_class_determines_the_status_of_a_target() -> None:
    batch = ClassWindow(name="batch", ttft=SLACK, tpot=SLACK)
    assert Engines().step(MISSED, SLACK, also=(batch,)).reason is TokenBudgetReason.TTFT_MISSED
    pressed = ClassWindow(name="batch", ttft=SLACK, tpot=CLOSE)
    assert Engines().step(MISSED, SLACK, also=(pressed,)).reason is TokenBudgetReason.NEEDS_REPLICAS


def test_counts_add_up_over_intervals() -> None:
    engines = Engines()
    few = TargetCounts(judged=5, missed=4)
    reasons = [engines.step(few, TargetCounts(judged=5)).reason for _ in range(4)]
    assert reasons == [TokenBudgetReason.TOO_FEW] * 3 + [TokenBudgetReason.TTFT_MISSED]


def test_misses_explained_by_chance_change_nothing() -> None:
    decision = Engines().step(TargetCounts(judged=50, missed=6), SLACK)
    assert decision.ttft is TargetStatus.KEPT
    assert decision.reason is TokenBudgetReason.KEPT

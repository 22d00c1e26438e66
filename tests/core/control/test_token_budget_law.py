"""The token budget's outer loop: each sentence of DESIGN.md's "Control" that is about it."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from goodput_core.control import (
    Bounds,
    ClassWindow,
    PromiseCounts,
    ReplicaPhase,
    ReplicaWindow,
    ServiceObservation,
    ServiceParams,
    Signal,
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
MISSED = PromiseCounts(judged=50, missed=25)
CLOSE = PromiseCounts(judged=50, close=40)
SLACK = PromiseCounts(judged=50)
NOBODY = PromiseCounts()
FEW = PromiseCounts(judged=3, missed=3)


class Engines:
    """Engines that apply every decision."""

    def __init__(self, params: ServiceParams = PARAMS) -> None:
        self.params = params
        self.state = TokenBudgetState()
        self.now_s = 0

    def step(
        self,
        ttft: PromiseCounts = NOBODY,
        tpot: PromiseCounts = NOBODY,
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
        """One interval of ten seconds."""
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
            replicas_asked=ready,
        )
        self.state, decision = token_budget_law(
            self.state, observation, self.params, self.now_s * S
        )
        return decision

    def until_stuck(
        self, ttft: PromiseCounts, tpot: PromiseCounts, **how: int
    ) -> list[TokenBudgetDecision]:
        """The same, until nothing moves any more."""
        moves: list[TokenBudgetDecision] = []
        for _ in range(400):
            decision = self.step(ttft, tpot, **how)  # type: ignore[arg-type]
            if decision.reason is TokenBudgetReason.NEEDS_REPLICAS:
                return [*moves, decision]
            if decision.reason is not TokenBudgetReason.SETTLING:
                moves.append(decision)
        raise AssertionError("it never gets stuck")


def test_tpot_missed_and_ttft_with_slack_lowers() -> None:
    decision = Engines().step(SLACK, MISSED)
    assert decision.reason is TokenBudgetReason.TPOT_MISSED
    assert decision.bounds == Bounds(
        min_tokens=256, max_tokens=768, safety_percent=85, max_num_seqs=64
    )


def test_ttft_missed_and_tpot_with_slack_raises() -> None:
    decision = Engines().step(MISSED, SLACK)
    assert decision.reason is TokenBudgetReason.TTFT_MISSED
    assert decision.bounds == Bounds(
        min_tokens=256, max_tokens=1280, safety_percent=95, max_num_seqs=64
    )


def test_a_target_without_requests_has_slack() -> None:
    assert Engines().step(MISSED).reason is TokenBudgetReason.TTFT_MISSED, "answers of one token"


@pytest.mark.parametrize(
    ("ttft", "tpot"), [(MISSED, MISSED), (CLOSE, MISSED), (MISSED, CLOSE)], ids=str
)
def test_where_neither_can_give_the_budget_stays_and_replicas_are_needed(
    ttft: PromiseCounts, tpot: PromiseCounts
) -> None:
    decision = Engines().step(ttft, tpot)
    assert decision.reason is TokenBudgetReason.NEEDS_REPLICAS
    assert decision.bounds == Bounds.initial(PARAMS)


def test_missed_at_the_lower_bound_narrows_a_full_batch_and_then_needs_replicas() -> None:
    moves = Engines().until_stuck(SLACK, MISSED, running=64)
    reasons = [m.reason for m in moves]
    first = reasons.index(TokenBudgetReason.BATCH_TOO_WIDE)
    assert set(reasons[:first]) == {TokenBudgetReason.TPOT_MISSED}
    assert moves[first - 1].bounds.max_tokens == 256
    assert moves[first - 1].bounds.safety_percent == 60
    assert moves[first].bounds.max_num_seqs == 48
    assert moves[-1].bounds.max_num_seqs == 8, "an eighth of the manifest's is the floor"


def test_missed_at_the_lower_bound_with_room_in_the_batch_needs_replicas() -> None:
    moves = Engines().until_stuck(SLACK, MISSED, running=20)
    assert {m.reason for m in moves[:-1]} == {TokenBudgetReason.TPOT_MISSED}
    assert moves[-1].bounds.max_num_seqs == 64


def test_missed_at_the_upper_bound_widens_a_full_batch_and_then_needs_replicas() -> None:
    engines = Engines()
    engines.state = TokenBudgetState(
        bounds=replace(Bounds.initial(PARAMS), max_num_seqs=16), ready=1
    )
    moves = engines.until_stuck(MISSED, SLACK, running=64)
    reasons = [m.reason for m in moves]
    first = reasons.index(TokenBudgetReason.BATCH_TOO_NARROW)
    assert moves[first - 1].bounds.max_tokens == 4096
    assert [m.bounds.max_num_seqs for m in moves[first:]] == [20, 25, 31, 38, 47, 58, 64, 64]


def test_missed_at_the_upper_bound_without_room_in_memory_needs_replicas() -> None:
    engines = Engines()
    engines.state = TokenBudgetState(
        bounds=replace(Bounds.initial(PARAMS), max_num_seqs=16), ready=1
    )
    moves = engines.until_stuck(MISSED, SLACK, running=64, kv_used=99)
    assert moves[-1].bounds.max_num_seqs == 16


def test_requests_that_evict_each_other_narrow_the_batch() -> None:
    decision = Engines().step(MISSED, MISSED, running=40, preemptions=9)
    assert decision.reason is TokenBudgetReason.KV_EXHAUSTED
    assert decision.bounds.max_num_seqs == 30, "of the 40 that run: the rest is not filled"


def test_a_batch_that_was_narrowed_is_widened_again_when_more_replicas_share_the_load() -> None:
    engines = Engines()
    narrow = engines.step(MISSED, MISSED, running=40, preemptions=9)
    alone = [engines.step(SLACK, SLACK) for _ in range(30)]
    assert {d.bounds.max_num_seqs for d in alone} == {narrow.bounds.max_num_seqs}
    assert engines.step(SLACK, SLACK, ready=2).bounds.max_num_seqs == PARAMS.max_num_seqs


def test_the_bounds_never_leave_the_manifest() -> None:
    lowest = Engines().until_stuck(SLACK, MISSED)[-1].bounds
    highest = Engines().until_stuck(MISSED, SLACK)[-1].bounds
    assert (lowest.max_tokens, highest.max_tokens) == (256, 4096)
    assert lowest.min_tokens == highest.min_tokens == 256


def test_a_manifest_that_changes_takes_the_bounds_along() -> None:
    engines = Engines()
    engines.step(SLACK, SLACK)
    engines.params = replace(PARAMS, max_tokens=512, max_num_seqs=16)
    bounds = engines.step(SLACK, SLACK).bounds
    assert (bounds.max_tokens, bounds.max_num_seqs) == (512, 16)


def test_requests_served_before_a_change_do_not_count_after_it() -> None:
    engines = Engines()
    engines.step(MISSED, SLACK)
    settling = [engines.step(MISSED, SLACK) for _ in range(2)]
    assert {d.reason for d in settling} == {TokenBudgetReason.SETTLING}
    assert {d.ttft for d in settling} == {TargetStatus.UNKNOWN}
    assert engines.step(MISSED, SLACK).reason is TokenBudgetReason.TTFT_MISSED


def test_a_queue_from_before_a_change_is_waited_for() -> None:
    engines = Engines()
    engines.step(MISSED, SLACK, waiting=100)
    queue = [80, 60, 40, 20, 10, 0, 0, 0]
    reasons = [engines.step(MISSED, SLACK, waiting=n).reason for n in queue]
    assert set(reasons) == {TokenBudgetReason.SETTLING}
    assert engines.step(MISSED, SLACK).reason is TokenBudgetReason.TTFT_MISSED


def test_other_replicas_make_what_ended_so_far_no_evidence() -> None:
    engines = Engines()
    engines.step(MISSED, MISSED, ready=2)
    assert engines.step(MISSED, MISSED, ready=3).reason is TokenBudgetReason.SETTLING
    crowd = Engines()
    crowd.step(MISSED, MISSED, ready=40)
    assert crowd.step(MISSED, MISSED, ready=41).reason is TokenBudgetReason.NEEDS_REPLICAS


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"signal": Signal.MISSING}, TokenBudgetReason.METRICS_MISSING),
        ({"signal": Signal.FAILED}, TokenBudgetReason.SCRAPE_FAILED),
        ({"arrivals": 0}, TokenBudgetReason.NO_TRAFFIC),
        ({"arrivals": 5, "ttft": FEW, "tpot": FEW}, TokenBudgetReason.TOO_FEW),
        ({"ttft": SLACK, "tpot": SLACK}, TokenBudgetReason.KEPT),
    ],
    ids=lambda v: v.value if isinstance(v, TokenBudgetReason) else "",
)
def test_everything_stays(how: dict[str, object], reason: TokenBudgetReason) -> None:
    engines = Engines()
    if reason is TokenBudgetReason.NO_TRAFFIC:
        observation = ServiceObservation(
            interval_ns=10 * S, traffic=Traffic(signal=Signal.FRESH), replicas_asked=1
        )
        _, decision = token_budget_law(TokenBudgetState(), observation, PARAMS, 10 * S)
    else:
        decision = engines.step(**how)  # type: ignore[arg-type]
    assert decision.reason is reason
    assert decision.bounds == Bounds.initial(PARAMS)


def test_a_class_without_an_objective_is_reported_and_never_steered_by() -> None:
    assert Engines().step(MISSED, SLACK, name="free").reason is TokenBudgetReason.TOO_FEW


def test_one_class_that_is_missed_is_enough_and_one_without_slack_too() -> None:
    batch = ClassWindow(name="batch", ttft=SLACK, tpot=SLACK)
    assert Engines().step(MISSED, SLACK, also=(batch,)).reason is TokenBudgetReason.TTFT_MISSED
    pressed = ClassWindow(name="batch", ttft=SLACK, tpot=CLOSE)
    assert Engines().step(MISSED, SLACK, also=(pressed,)).reason is TokenBudgetReason.NEEDS_REPLICAS


def test_few_requests_add_up_over_intervals_until_they_tell() -> None:
    engines = Engines()
    few = PromiseCounts(judged=5, missed=4)
    reasons = [engines.step(few, PromiseCounts(judged=5)).reason for _ in range(4)]
    assert reasons == [TokenBudgetReason.TOO_FEW] * 3 + [TokenBudgetReason.TTFT_MISSED]


def test_a_few_misses_that_chance_explains_move_nothing() -> None:
    decision = Engines().step(PromiseCounts(judged=50, missed=6), SLACK)
    assert decision.ttft is TargetStatus.KEPT
    assert decision.reason is TokenBudgetReason.KEPT

"""The verdict on a candidate against its objectives and a baseline."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from tests.core.test_pairs import burst_pair, even_pair

from goodput_core.slo.attainment import SecondCounts
from goodput_core.slo.distributions import student_t_quantile
from goodput_core.slo.gate import (
    GateClass,
    GateRule,
    GateVerdict,
    attainment_evidence,
    decide_gate,
    format_points,
)
from goodput_core.slo.intervals import WindowEstimate
from goodput_core.slo.pairs import DifferenceEstimate, PairCounts, RunSpread
from goodput_core.slo.verdict import Reason, VerdictKind

PASS, FAIL = VerdictKind.PASS, VerdictKind.FAIL
INCONCLUSIVE, INVALID = VerdictKind.INCONCLUSIVE, VerdictKind.INVALID


def run(missed: int = 0, *, per_s: int = 10, seconds: int = 600) -> SecondCounts:
    misses = [missed * (s + 1) // seconds - missed * s // seconds for s in range(seconds)]
    return SecondCounts(good=[per_s - m for m in misses], total=[per_s] * seconds)


def one_class(
    pairs: list[PairCounts] | None,
    *,
    missed: int = 6,
    name: str = "chat",
    objective: str | None = "0.99",
    runs: int = 4,
    unjudged: int = 0,
    tests: int = 2,
) -> GateClass:
    return GateClass(
        candidate=attainment_evidence(
            name,
            None if objective is None else Fraction(objective),
            [run(missed)] * runs,
            tests=tests,
            unjudged=unjudged,
        ),
        difference=None if pairs is None else DifferenceEstimate(pairs),
    )


def decide(*classes: GateClass, margin: str = "0.01", baseline: bool = True) -> GateVerdict:
    return decide_gate(classes, margin=Fraction(margin), with_baseline=baseline)


def check(verdict: GateVerdict, rule: GateRule) -> tuple[VerdictKind, Reason]:
    return next((c.kind, c.reason) for c in verdict.checks if c.rule is rule)


def test_a_candidate_that_keeps_its_objectives_and_loses_nothing_passes() -> None:
    verdict = decide(one_class([even_pair(gained=3, lost=3)] * 4))
    assert (verdict.kind, verdict.reason) == (PASS, Reason.ATTAINED)
    assert [c.kind for c in verdict.checks] == [PASS, PASS]


def test_a_loss_beyond_the_margin_fails_though_the_objective_is_met() -> None:
    lost = [even_pair(lost=n) for n in (100, 110, 120, 105)]
    verdict = decide(one_class(lost, objective="0.9"))
    assert (verdict.kind, verdict.reason) == (FAIL, Reason.WORSE_THAN_BASELINE)
    assert check(verdict, GateRule.OBJECTIVE)[0] is PASS
    assert "−1.82 points" in verdict.sentence


def test_a_missed_objective_fails_though_the_baseline_missed_it_too() -> None:
    verdict = decide(one_class([even_pair()] * 4, missed=300))
    assert (verdict.kind, verdict.reason) == (FAIL, Reason.BELOW_OBJECTIVE)
    assert check(verdict, GateRule.DIFFERENCE)[0] is PASS


def test_one_pair_is_inconclusive_and_says_how_many_would_decide() -> None:
    verdict = decide(one_class([even_pair(gained=3, lost=3)], runs=1))
    assert (verdict.kind, verdict.reason) == (INCONCLUSIVE, Reason.SINGLE_PAIR)
    difference = verdict.checks[1]
    assert difference.pairs_to_decide == 4
    assert "about 4 pairs like these would decide" in verdict.sentence


def test_one_pair_that_is_far_worse_does_not_fail_by_the_difference() -> None:
    verdict = decide(one_class([even_pair(lost=3000)], runs=1, objective="0.3", missed=3000))
    assert (verdict.kind, verdict.reason) == (INCONCLUSIVE, Reason.SINGLE_PAIR)


def test_one_pair_still_fails_if_the_candidate_misses_its_objective() -> None:
    verdict = decide(one_class([even_pair(lost=3000)], runs=1, missed=3000))
    assert (verdict.kind, verdict.reason) == (FAIL, Reason.BELOW_OBJECTIVE)


def test_a_margin_between_the_bounds_is_inconclusive() -> None:
    lost = [burst_pair(n) for n in (0, 120, 40, 0)]
    verdict = decide(one_class(lost, objective="0.9"))
    assert (verdict.kind, verdict.reason) == (INCONCLUSIVE, Reason.INTERVAL_SPANS_MARGIN)


def test_a_class_of_ten_requests_never_passes() -> None:
    short = SecondCounts(good=[1] * 10 + [0] * 50, total=[1] * 10 + [0] * 50)
    pair = PairCounts(gained=[0] * 60, lost=[0] * 60, total=short.total)
    small = GateClass(
        candidate=attainment_evidence("rare", Fraction(99, 100), [short] * 4, tests=2),
        difference=DifferenceEstimate([pair] * 4),
    )
    verdict = decide(small)
    assert (verdict.kind, verdict.reason) == (INCONCLUSIVE, Reason.TOO_FEW_REQUESTS)


def test_every_class_must_pass_and_one_that_fails_decides() -> None:
    good = one_class([even_pair()] * 4, name="chat", tests=4)
    bad = one_class([even_pair(lost=200)] * 4, name="batch", tests=4, objective="0.9", missed=200)
    verdict = decide(good, bad)
    assert verdict.kind is FAIL
    assert verdict.sentence.startswith("batch: ")


def test_an_invalid_run_makes_the_comparison_invalid() -> None:
    verdict = decide_gate(
        [one_class([even_pair(lost=3000)] * 4)],
        with_baseline=True,
        invalid=["runs/b-2 has 40 rows that were never sent"],
    )
    assert (verdict.kind, verdict.reason) == (INVALID, Reason.INVALID_RUN)
    assert "runs/b-2" in verdict.sentence


def test_unjudged_requests_leave_both_rules_open() -> None:
    verdict = decide(one_class([even_pair(lost=300)] * 4, missed=300, unjudged=5))
    assert verdict.kind is INCONCLUSIVE
    assert {c.reason for c in verdict.checks} == {Reason.UNJUDGED}


def test_without_matched_requests_the_difference_is_inconclusive() -> None:
    verdict = decide(one_class(None))
    assert check(verdict, GateRule.DIFFERENCE) == (INCONCLUSIVE, Reason.NO_ROWS)
    assert verdict.kind is INCONCLUSIVE


def test_without_a_baseline_only_the_objective_is_judged() -> None:
    verdict = decide(one_class(None), baseline=False)
    assert verdict.kind is PASS
    assert [c.rule for c in verdict.checks] == [GateRule.OBJECTIVE]


def test_a_class_without_objective_is_not_judged() -> None:
    verdict = decide(one_class([even_pair(lost=300)] * 4, objective=None))
    assert (verdict.kind, verdict.reason) == (INCONCLUSIVE, Reason.NO_OBJECTIVE)


def test_a_burst_that_every_run_meets_counts_as_one_event() -> None:
    """Four runs of one trace say no more about other bursts than one run does."""
    burst = SecondCounts(good=[0 if 100 <= s < 106 else 10 for s in range(600)], total=[10] * 600)
    together = attainment_evidence("chat", Fraction(98, 100), [burst] * 4).interval
    alone = WindowEstimate(burst).interval()
    assert together is not None
    assert together.lower == pytest.approx(alone.lower, abs=2e-4)


def test_independent_misses_of_several_runs_sharpen_the_bound() -> None:
    together = attainment_evidence("chat", None, [run(60)] * 4).interval
    alone = WindowEstimate(run(60)).interval()
    assert together is not None
    assert together.lower > alone.lower


def test_runs_that_differ_widen_the_bounds_of_the_attainment() -> None:
    runs = [run(0), run(240), run(0), run(240)]
    noisy = attainment_evidence("chat", None, runs).interval
    exact = attainment_evidence("chat", None, runs, deterministic=True).interval
    assert noisy is not None
    assert exact is not None
    assert noisy.lower < exact.lower
    assert noisy.upper > exact.upper


def test_the_spread_of_earlier_pairs_widens_the_interval_of_one_run() -> None:
    history = RunSpread.of([0.0, 0.02, -0.02, 0.01, -0.01], 0.02)
    alone = attainment_evidence("chat", None, [run(60)]).interval
    known = attainment_evidence("chat", None, [run(60)], history=history).interval
    assert alone is not None
    assert known is not None
    reach = student_t_quantile(0.95, 4) * math.sqrt(history.variance / 2)
    assert known.lower == pytest.approx(1 - 60 / sum(run(60).total) - reach)
    assert known.lower < alone.lower
    assert known.upper > alone.upper


def test_a_declared_outage_counts_once_in_several_runs() -> None:
    def lower(runs: int) -> float:
        interval = attainment_evidence("chat", None, [run()] * runs, outage_s=10).interval
        assert interval is not None
        return interval.lower

    assert lower(4) > lower(1)
    assert lower(4) < 1 - 10 / 2400, "the outage is still in the bound"


@pytest.mark.parametrize(
    ("difference", "up", "text"),
    [
        (-0.01234, False, "−1.24 points"),
        (-0.01234, True, "−1.23 points"),
        (0.01234, False, "+1.23 points"),
        (0.0, False, "0.00 points"),
        (0.01, True, "+1.00 points"),
    ],
)
def test_points_are_rounded_away_from_a_wrong_verdict(
    difference: float, up: bool, text: str
) -> None:
    assert format_points(difference, up=up) == text

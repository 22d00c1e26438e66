"""The study of wrong verdicts: its processes, its copies of the bounds, and its short form."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from benchmarks.simulated import pairs
from benchmarks.simulated.differences import Differences, all_pass, any_fails, attainment_bounds
from benchmarks.simulated.intervals import Scales, bounds, failing, passing
from benchmarks.simulated.processes import Lengths, Windows, episodes
from benchmarks.simulated.queues import Queue, estimate_miss
from benchmarks.simulated.single_runs import CASES, Case
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples

from benchmarks import error_rates
from goodput_core.slo.attainment import SecondCounts
from goodput_core.slo.evidence import class_evidence
from goodput_core.slo.gate import GateClass, GateRule, attainment_evidence, decide_gate
from goodput_core.slo.pairs import (
    DifferenceEstimate,
    PairCounts,
    RunSpread,
)
from goodput_core.slo.verdict import VerdictKind, decide

OBJECTIVES = [Fraction(n, 10_000) for n in (5_003, 8_017, 9_011, 9_507, 9_907, 9_991)]
"""No bound of small counts equals one of them, so rounding decides no verdict."""


@given(
    seconds=st.sampled_from([2, 7, 19, 20, 59, 60, 61, 119, 120, 300, 777]),
    per_s=st.sampled_from([0.02, 0.5, 5, 50]),
    miss=st.sampled_from([0, 0.001, 0.03, 0.5, 0.98, 1]),
    outage_s=st.sampled_from([0, 1, 5, 30, 400]),
    objective=st.sampled_from(OBJECTIVES),
    seed=st.integers(0, 1_000_000),
)
def test_the_vectorised_interval_is_that_of_the_product(
    seconds: int, per_s: float, miss: float, outage_s: int, objective: Fraction, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    total = rng.poisson(per_s, (4, seconds))
    total[:, 0] += total.sum(axis=1) == 0
    # The chance of a miss varies much from second to second.
    missed = rng.binomial(total, np.clip(miss * rng.gamma(0.5, 2, total.shape), 0, 1))
    found = bounds(Scales(Windows(total=total, missed=missed), outage_s=outage_s))
    passed, failed = passing(found, objective), failing(found, objective)
    for window in range(len(total)):
        good = total[window] - missed[window]
        counts = SecondCounts(good=good.tolist(), total=total[window].tolist())
        evidence = class_evidence("chat", objective, counts, outage_s=outage_s)
        assert evidence.interval is not None
        assert found.lower[window] == pytest.approx(evidence.interval.lower, abs=1e-9)
        assert found.upper[window] == pytest.approx(evidence.interval.upper, abs=1e-9)
        kind = decide([evidence], None).kind
        assert passed[window] == (kind is VerdictKind.PASS)
        assert failed[window] == (kind is VerdictKind.FAIL)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_process_misses_as_often_as_it_states(case: Case) -> None:
    windows = max(20, 60_000 // case.seconds)
    drawn = case.process.draw(windows, case.seconds, np.random.default_rng(2))
    missed, total = drawn.missed.sum(axis=1), drawn.total.sum(axis=1)
    assert (drawn.missed >= 0).all()
    assert (drawn.missed <= drawn.total).all()
    miss = missed.sum() / total.sum()
    error = math.sqrt(float(np.sum((missed - miss * total) ** 2))) / total.sum()
    # The estimate of the error is itself uncertain if few windows have an outage.
    assert miss == pytest.approx(case.process.miss, abs=5 * error + 1e-9)


@pytest.mark.parametrize(
    "lengths",
    [
        Lengths(kind="fixed", mean_s=7),
        Lengths(kind="uniform", mean_s=7),
        Lengths(kind="exponential", mean_s=7),
        Lengths(kind="pareto", mean_s=3, exponent=1.5, longest_s=60),
    ],
    ids=lambda lengths: lengths.kind,
)
def test_episodes_are_stationary_from_the_first_second_on(lengths: Lengths) -> None:
    gaps = Lengths(kind="exponential", mean_s=20)
    inside = episodes(20_000, 50, gaps, lengths, np.random.default_rng(3))
    share = lengths.expected_s / (lengths.expected_s + 20)
    assert ((inside > -1e-9) & (inside < 1 + 1e-9)).all()
    # The standard error of the mean of one second is at most 0.5 / √20,000.
    assert np.abs(inside.mean(axis=0) - share).max() < 5 * 0.5 / math.sqrt(20_000)


def test_an_estimated_share_of_misses_agrees_with_the_exact_one() -> None:
    exact = Queue.erlang(servers=3, service_s=0.2, busy=0.7, miss=0.05)
    found = estimate_miss(exact, windows=100, seconds=600, seed=4)
    assert 0 < found.miss_error < 0.003
    assert found.miss == pytest.approx(exact.miss, abs=4 * found.miss_error)


def pair_counts(drawn: pairs.PairCounts, trial: int) -> list[PairCounts]:
    return [
        PairCounts(gained=gained.tolist(), lost=lost.tolist(), total=total.tolist())
        for gained, lost, total in zip(
            drawn.only_b[trial], drawn.only_a[trial], drawn.total[trial], strict=True
        )
    ]


def known_spread(
    history: pairs.PairCounts | None, judged: pairs.PairCounts, trial: int
) -> RunSpread | None:
    if history is None:
        return None
    spread = RunSpread.of(
        history.difference[trial].tolist(), float(history.missed[:, trial].mean())
    )
    return spread.at(float(judged.missed[0, trial]))


SHORT_CASES = [case for case in pairs.CASES if case.seconds * case.pairs <= 1800]


@given(
    case=st.sampled_from(SHORT_CASES),
    worse_by=st.integers(0, 2),
    confidence=st.sampled_from([0.8, 0.95, 0.9987]),
    earlier=st.sampled_from([0, 2, 7]),
    quiet=st.sampled_from([0.0, 0.2, 0.6, 1.0]),
    outage_s=st.sampled_from([0, 7, 60]),
    seed=st.integers(0, 1_000_000),
)
@settings(max_examples=examples(40), deadline=None)
def test_the_vectorised_bounds_of_a_gate_are_those_of_the_product(
    case: pairs.PairCase,
    worse_by: int,
    confidence: float,
    earlier: int,
    quiet: float,
    outage_s: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    drawn = pairs.draw(case, worse_by, 2, rng)
    history: list[pairs.PairCounts | None] = [None] * len(drawn)
    if earlier:
        history = list(pairs.draw(replace(case, history=earlier, quiet=quiet).earlier, 0, 2, rng))
    found = [
        Differences(one, known, outage_s=outage_s)
        for one, known in zip(drawn, history, strict=True)
    ]
    failed = any_fails(found, margin=case.margin, confidence=confidence)
    passed = all_pass(found, margin=case.margin, confidence=confidence)
    limits = [
        attainment_bounds(one, known, outage_s=outage_s)
        for one, known in zip(drawn, history, strict=True)
    ]
    tests = 2 * len(drawn)
    for trial in range(2):
        deterministic = case.pairs == 1 and not earlier
        classes = []
        for number, one in enumerate(drawn):
            spread = known_spread(history[number], one, trial)
            estimate = DifferenceEstimate(
                pair_counts(one, trial),
                history=spread,
                deterministic=deterministic,
                outage_s=outage_s,
            )
            interval = estimate.interval(confidence)
            assert found[number].bound(confidence, -1)[trial] == pytest.approx(interval.lower)
            assert found[number].bound(confidence, 1)[trial] == pytest.approx(interval.upper)
            build = one.second_build
            runs = [
                SecondCounts(good=(total - missed).tolist(), total=total.tolist())
                for total, missed in zip(build.total[trial], build.missed[trial], strict=True)
            ]
            evidence = attainment_evidence(
                f"class {number}",
                Fraction(1, 10),
                runs,
                tests=tests,
                outage_s=outage_s,
                history=spread,
                deterministic=deterministic,
            )
            assert evidence.interval is not None
            lower, upper = limits[number]
            assert lower[trial] == pytest.approx(evidence.interval.lower)
            assert upper[trial] == pytest.approx(evidence.interval.upper)
            classes.append(GateClass(candidate=evidence, difference=estimate))
        verdict = decide_gate(
            classes,
            margin=Fraction(case.margin).limit_denominator(1000),
            confidence=confidence,
            with_baseline=True,
        )
        kinds = [check.kind for check in verdict.checks if check.rule is GateRule.DIFFERENCE]
        assert failed[trial] == (VerdictKind.FAIL in kinds)
        assert passed[trial] == (set(kinds) == {VerdictKind.PASS})


@pytest.mark.parametrize("case", pairs.CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("worse_by", [0, 1])
def test_builds_differ_by_as_much_as_stated(case: pairs.PairCase, worse_by: int) -> None:
    trials = max(10, 60_000 // (case.pairs * case.seconds))
    drawn = pairs.draw(case, worse_by, trials, np.random.default_rng(5))
    for one, counts in zip(case.classes, drawn, strict=True):
        total = counts.total.sum(axis=(1, 2))
        missed_b = counts.second_build.missed.sum(axis=(1, 2)) / total
        missed_a = missed_b - (counts.only_a - counts.only_b).sum(axis=(1, 2)) / total
        for share, expected in (
            (missed_a, one.miss),
            (missed_b - missed_a, worse_by * case.margin * one.extra),
        ):
            error = share.std(ddof=1) / math.sqrt(trials)
            assert share.mean() == pytest.approx(expected, abs=5 * error + 1e-9)


def test_orders_are_random_and_balanced_within_two_pairs() -> None:
    factors = pairs.RunFactors(drift=1.0).draw(3, 8, np.random.default_rng(1))
    assert factors[0].tolist() == sorted(factors[0].tolist())
    case = next(c for c in pairs.CASES if c.name.startswith("drift"))
    drawn = pairs.draw(case, 0, 400, np.random.default_rng(1))[0]
    change = drawn.difference
    # The drift favours the first run of a pair; the order of the next pair is the opposite.
    assert abs(change.mean()) < 0.001
    assert (np.sign(change[:, 0]) != np.sign(change[:, 1])).mean() > 0.5


@pytest.mark.parametrize(
    ("count", "trials", "broken"),
    [(19, 200, False), (20, 200, True), (70, 1000, False), (71, 1000, True), (0, 1, False)],
)
def test_a_rate_is_too_large_above_three_standard_errors(
    count: int, trials: int, broken: bool
) -> None:
    assert error_rates.broken(count, trials) is broken


def test_undeclared_outages_cause_wrong_passes_and_declared_ones_do_not() -> None:
    case = next(c for c in CASES if c.name == "outages of 3 s, 50/s, 99.9 %, 1 h")
    unknown, declared = error_rates.measure(case, trials=200, seed=1)
    assert (unknown.outage_s, unknown.required) == (0, False)
    assert (declared.outage_s, declared.required) == (3, True)
    assert unknown.wrong_pass > 40  # no outage in 30 % of the windows
    assert not unknown.broken
    assert declared.wrong_pass == 0


def test_an_undeclared_outage_of_the_new_build_passes_wrongly_and_a_declared_one_does_not() -> None:
    case = next(c for c in pairs.CASES if c.name.startswith("outages of 10 s only on the second"))
    unknown, declared = error_rates.measure_pairs(case, trials=200, seed=1)
    assert (unknown.outage_s, unknown.required) == (0, False)
    assert (declared.outage_s, declared.required) == (10, True)
    assert unknown.wrong_pass > 30  # no outage in 30 % of the comparisons
    assert declared.wrong_pass == 0


@pytest.mark.slow(25)
@pytest.mark.timeout(300)
def test_verdicts_are_wrong_as_rarely_as_stated(capsys: pytest.CaptureFixture[str]) -> None:
    code = error_rates.main(["--quick", "--jobs", "1", "--json"])
    document = json.loads(capsys.readouterr().out)
    required = [row for row in document["runs"] if row["required"]]
    assert len(required) > 50
    assert len([row for row in document["pairs"] if row["required"]]) > 40
    assert not [row["case"] for row in document["runs"] + document["pairs"] if row["broken"]]
    assert code == 0


def test_the_tables_name_the_rule(capsys: pytest.CaptureFixture[str]) -> None:
    code = error_rates.main(["--trials", "50", "--jobs", "1", "--cases", "30 requests"])
    table = capsys.readouterr().out
    assert code == 0
    assert "30 requests, outages of 3 s, 90 %" in table
    assert "30 requests a run, margin 5 %, 10 pairs" in table
    # Three cases of single runs, two of them also judged without their outages, and one of pairs.
    assert "4 rows are judged, 0 break it" in table


def test_looks_spend_the_error_and_end_with_the_first_decision() -> None:
    looks = next(c for c in pairs.CASES if c.name == "independent, looks at 4, 6, 8 and 10 pairs")
    fixed = next(c for c in pairs.CASES if c.name == "independent, 10 pairs")
    (sequential,) = error_rates.measure_pairs(looks, trials=200, seed=1)
    (single,) = error_rates.measure_pairs(fixed, trials=200, seed=1)
    assert sequential.margin_to_pass is None
    assert sequential.right_pass > 190
    assert abs(sequential.right_fail - single.right_fail) < 20

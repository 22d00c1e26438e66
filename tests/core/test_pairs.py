"""The difference of attainment between two builds, from pairs of runs."""

from __future__ import annotations

import math
import random
from itertools import groupby, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples

from goodput_core.slo.distributions import normal_quantile, student_t_quantile
from goodput_core.slo.pairs import DifferenceEstimate, PairCounts, RunSpread, tango_bounds


def even_pair(
    *, gained: int = 0, lost: int = 0, total: int = 6000, seconds: int = 600
) -> PairCounts:
    """Return a pair whose changed requests are spread evenly over the window."""

    def even(count: int) -> list[int]:
        return [count * (s + 1) // seconds - count * s // seconds for s in range(seconds)]

    return PairCounts(gained=even(gained), lost=even(lost), total=even(total))


def burst_pair(lost: int, *, start: int = 100, per_s: int = 10, seconds: int = 600) -> PairCounts:
    """Return a pair in which all lost requests follow one another."""
    losses = [0] * seconds
    for i in range(lost):
        losses[start + i // per_s] += 1
    return PairCounts(gained=[0] * seconds, lost=losses, total=[per_s] * seconds)


@st.composite
def pairs(draw: st.DrawFn, seconds: int = 0) -> PairCounts:
    seconds = seconds or draw(st.integers(1, 150))
    rng = random.Random(draw(st.integers(0, 2**32)))
    busiest = draw(st.sampled_from([1, 5, 50]))
    total = [rng.randint(0, busiest) for _ in range(seconds)]
    total[rng.randrange(seconds)] += 1
    chance = draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    lost = [sum(rng.random() < chance for _ in range(n)) for n in total]
    gained = [rng.randint(0, n - c) for n, c in zip(total, lost, strict=True)]
    return PairCounts(gained=gained, lost=lost, total=total)


def test_without_a_change_the_bound_is_that_of_independent_requests() -> None:
    z = normal_quantile(0.95)
    estimate = DifferenceEstimate([even_pair(total=1000)])
    interval = estimate.interval()
    assert interval.difference == 0
    assert interval.lower == pytest.approx(-(z**2) / (1000 + z**2), rel=1e-5)
    assert interval.upper == -interval.lower


@given(
    counts=st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(0, 400)),
    quantile=st.floats(0.1, 3.5),
)
def test_tango_bounds_solve_the_score_equation(
    counts: tuple[int, int, int], quantile: float
) -> None:
    """The restricted maximum likelihood is found here by search, not by the formula."""
    gained, lost, same = counts
    total = max(1, gained + lost + same)
    low, high = tango_bounds(gained, lost, total, quantile)
    mean = (gained - lost) / total
    assert -1 <= low <= mean + 1e-8
    assert mean - 1e-8 <= high <= 1
    for bound, sign in ((low, 1), (high, -1)):
        if abs(bound) < 1 - 1e-6:
            score = _score(gained, lost, total, bound)
            assert score == pytest.approx(sign * quantile, rel=1e-2, abs=1e-2)


def _score(gained: int, lost: int, total: int, difference: float) -> float:
    def likelihood(share: float) -> float:
        cells = (
            (gained, share + difference),
            (lost, share),
            (total - gained - lost, 1 - 2 * share - difference),
        )
        if any(p < 0 or (n and p <= 0) for n, p in cells):
            return -math.inf
        return sum(n * math.log(p) for n, p in cells if n)

    low, high = max(0.0, -difference), (1 - difference) / 2
    for _ in range(200):  # the likelihood has one maximum
        a, b = low + (high - low) / 3, high - (high - low) / 3
        if likelihood(a) < likelihood(b):
            low = a
        else:
            high = b
    variance = total * (low + high + difference * (1 - difference))
    return (gained - lost - total * difference) / math.sqrt(variance)


@settings(max_examples=examples(60), deadline=None)
@given(sample=st.lists(pairs(), min_size=1, max_size=5), confidence=st.floats(0.6, 0.99))
def test_the_bounds_surround_the_difference_and_widen_with_confidence_and_tests(
    sample: list[PairCounts], confidence: float
) -> None:
    estimate = DifferenceEstimate(sample)
    interval = estimate.interval(confidence, tests=3)
    assert -1 <= interval.lower <= interval.difference <= interval.upper <= 1
    assert list(interval.uppers) == sorted(interval.uppers)
    wider = estimate.interval(confidence + 0.005)
    assert wider.lower <= interval.lower + 1e-12
    assert wider.upper >= interval.upper - 1e-12


def formula(sample: list[PairCounts], confidence: float) -> tuple[float, float]:
    """Compute the bounds by the formula of docs/verdicts.md."""
    count, seconds = len(sample), len(sample[0].total)
    z = normal_quantile(confidence)
    gained, lost, total = (
        sum(sum(counts) for counts in kind)
        for kind in zip(*((p.gained, p.lost, p.total) for p in sample), strict=True)
    )
    differences = [(sum(p.gained) - sum(p.lost)) / sum(p.total) for p in sample]
    mean = sum(differences) / count
    arrived = [sum(n) for n in zip(*(pair.total for pair in sample), strict=True)]
    kept: list[int] = []
    for is_idle, run in groupby(range(seconds), key=lambda second: arrived[second] == 0):
        gap = list(run)
        kept += [] if is_idle and len(gap) > max(1, seconds // 60) else gap
    gaps, seconds = len(kept) < seconds, len(kept)
    within, losses, gains = [0.0] * count, [0.0], [0.0]
    finest = min(60, seconds)
    for blocks in (finest, *(b for b in (30, 15, 8) if b < finest)):
        length = seconds // blocks
        inflation = (student_t_quantile(confidence, blocks - 1) / z) ** 2
        at_offsets = []
        for number, (pair, d) in enumerate(zip(sample, differences, strict=True)):
            rows = zip(pair.gained, pair.lost, pair.total, strict=True)
            e = [(g - c - d * n) / sum(pair.total) for g, c, n in rows]
            e = [e[second] for second in kept]
            ends = [b * (seconds if gaps else length * blocks) // blocks for b in range(blocks + 1)]
            sums = [sum(e[begin:end]) for begin, end in pairwise(ends)]
            spread = sum((s - sum(sums) / blocks) ** 2 for s in sums) * blocks / (blocks - 1)
            spread *= inflation * seconds / ends[-1]
            within[number] = max(within[number], spread)
            at_offsets += [sum((e + e)[at : at + length]) for at in range(seconds)]
        gains.append(max(at_offsets) + min(at_offsets))
        losses.append(-gains[-1])
    between = 0.0
    if count > 1:
        variance = sum((d - mean) ** 2 for d in differences) / (count - 1)
        between = student_t_quantile(confidence, count - 1) * math.sqrt(variance / count)
    v = sum(within) / count**2
    weight = count * min(sum(p.total) for p in sample) / total
    tango = tango_bounds(gained * weight, lost * weight, total * weight, z)
    bounds = []
    for sign, unseen, independent in ((-1, losses, tango[0]), (1, gains, tango[1])):
        s = max(1 / total, max(unseen) / count)
        independent_distance = abs(independent - (gained - lost) / total)
        distance = max(between, s + z * math.sqrt(v + s * s), independent_distance)
        bounds.append(min(1.0, max(-1.0, mean + sign * distance)))
    return bounds[0], bounds[1]


@settings(max_examples=examples(60), deadline=None)
@given(
    sample=st.integers(60, 130).flatmap(
        lambda seconds: st.lists(pairs(seconds), min_size=1, max_size=4)
    ),
    confidence=st.floats(0.8, 0.999),
)
def test_bounds_follow_the_formula(sample: list[PairCounts], confidence: float) -> None:
    interval = DifferenceEstimate(sample).interval(confidence)
    lower, upper = formula(sample, confidence)
    assert interval.lower == pytest.approx(lower, abs=1e-9)
    assert interval.upper == pytest.approx(upper, abs=1e-9)


@settings(max_examples=examples(60), deadline=None)
@given(sample=st.lists(pairs(), min_size=1, max_size=4))
def test_exchanging_the_builds_exchanges_the_bounds(sample: list[PairCounts]) -> None:
    exchanged = [PairCounts(gained=p.lost, lost=p.gained, total=p.total) for p in sample]
    one = DifferenceEstimate(sample).interval()
    other = DifferenceEstimate(exchanged).interval()
    assert other.difference == pytest.approx(-one.difference, abs=1e-12)
    assert other.lower == pytest.approx(-one.upper, abs=1e-6)
    assert other.upper == pytest.approx(-one.lower, abs=1e-6)


def test_a_burst_widens_the_bound_beyond_that_of_independent_requests() -> None:
    spread = DifferenceEstimate([even_pair(lost=60)]).interval()
    burst = DifferenceEstimate([burst_pair(60)]).interval()
    assert burst.difference == spread.difference
    assert burst.lower < 2 * spread.lower


def test_the_spread_between_pairs_counts_even_if_each_pair_is_smooth() -> None:
    losses = (0, 120, 0, 120)
    interval = DifferenceEstimate([even_pair(lost=lost) for lost in losses]).interval()
    error = (0.01**2 * 4 / 3) ** 0.5 / 2  # the differences are 0 and −2 %
    assert interval.difference == pytest.approx(-0.01)
    assert interval.lower == pytest.approx(-0.01 - student_t_quantile(0.95, 3) * error, rel=1e-6)


def test_the_worst_burst_counts_once_more() -> None:
    """One burst of 60 requests, of 24,000: another one could have come by chance."""
    interval = DifferenceEstimate([burst_pair(60), *[even_pair()] * 3]).interval()
    assert interval.lower < -3 * 60 / 24_000
    assert interval.upper < 60 / 24_000 * 2


def test_a_declared_outage_that_did_not_occur_lowers_the_lower_bound_only() -> None:
    sample = [even_pair()] * 4
    plain = DifferenceEstimate(sample).interval()
    declared = DifferenceEstimate(sample, outage_s=10).interval()
    unseen = 10 / 600 / 4
    assert declared.upper == plain.upper
    assert declared.lower == pytest.approx(-unseen * (1 + normal_quantile(0.95)), rel=1e-6)
    # It counts more if the requests arrive at once, so that few of them can show an outage.
    at_once = [10 * (second % 60 == 0) for second in range(600)]
    pair = PairCounts(gained=[0] * 600, lost=[0] * 600, total=at_once)
    rare = DifferenceEstimate([pair] * 4, outage_s=10).interval()
    assert rare.lower == pytest.approx(-(1 + normal_quantile(0.95)) / 10 / 4, rel=1e-6)


def test_the_advised_number_of_pairs_excludes_the_declared_outage() -> None:
    needed = DifferenceEstimate([even_pair()] * 4, outage_s=10).pairs_to_decide(0.005)
    assert needed is not None
    lower = [
        DifferenceEstimate([even_pair()] * pairs, outage_s=10).interval().lower
        for pairs in (needed - 1, needed)
    ]
    assert lower[0] < -0.005 <= lower[1]


def test_few_pairs_with_the_same_spread_as_their_blocks_decide() -> None:
    """The quantile of t with three degrees of freedom is for the spread between pairs only."""
    sample = [even_pair(gained=120, lost=120 + lost) for lost in (-4, 4, -4, 4)]
    interval = DifferenceEstimate(sample).interval()
    normal = normal_quantile(0.95) * math.sqrt(240 / 6000**2 / 4)
    assert interval.lower == pytest.approx(-normal, rel=0.02)


def test_equal_pairs_are_not_taken_as_proof_that_runs_have_no_noise() -> None:
    """The variance within the pairs stays, although the pairs agree exactly."""
    interval = DifferenceEstimate([burst_pair(60, start=s) for s in (50, 200, 350, 500)]).interval()
    assert interval.lower < -0.015


def test_one_pair_covers_runs_only_with_a_history_or_without_noise() -> None:
    pair = even_pair(lost=6)
    assert not DifferenceEstimate([pair]).interval().covers_runs
    assert DifferenceEstimate([pair], deterministic=True).interval().covers_runs
    history = RunSpread.of([0.0, 0.004, -0.004, 0.002, -0.002], 0.02)
    known = DifferenceEstimate([pair], history=history).interval()
    assert known.covers_runs
    error = history.variance**0.5
    assert known.lower == pytest.approx(-0.001 - student_t_quantile(0.95, 4) * error, rel=1e-6)


def test_a_history_adds_its_degrees_of_freedom_to_those_of_the_pairs() -> None:
    sample = [even_pair(lost=lost) for lost in (0, 12, 0, 12)]
    alone = DifferenceEstimate(sample).interval()
    history = RunSpread.of([0.0, 0.002] * 10, 0.02)
    pooled = DifferenceEstimate(sample, history=history).interval()
    assert alone.lower < pooled.lower < pooled.difference


@given(
    differences=st.lists(st.floats(-0.1, 0.1), min_size=2, max_size=10),
    earlier=st.floats(1e-6, 0.5),
    missed=st.floats(0, 0.5),
)
def test_the_spread_of_a_history_grows_with_the_misses_of_the_judged_runs(
    differences: list[float], earlier: float, missed: float
) -> None:
    history = RunSpread.of(differences, earlier)
    spread = history.at(missed)
    assert spread.degrees == history.degrees
    assert spread.variance >= history.variance
    if missed <= earlier:
        assert spread == history
    else:
        # The spread as a share of the misses does not fall.
        assert spread.variance * earlier**2 >= history.variance * missed**2 * (1 - 1e-9)
    if missed > 2 * earlier:
        assert spread.variance >= 2 * missed**2


def test_a_history_without_misses_does_not_make_one_pair_decide() -> None:
    quiet = RunSpread.of([0.0] * 10, 0.0).at(0.05)
    interval = DifferenceEstimate([even_pair(lost=60)], history=quiet).interval()
    assert interval.lower < -0.05 < interval.upper
    assert interval.upper > 0


def test_repeated_runs_without_noise_are_refused() -> None:
    with pytest.raises(ValueError, match="a second pair adds no evidence"):
        DifferenceEstimate([even_pair(), even_pair()], deterministic=True)


@pytest.mark.parametrize("lost", [0, 30, 200])
def test_the_predicted_number_of_pairs_decides_if_further_pairs_are_alike(lost: int) -> None:
    first = even_pair(lost=lost)
    needed = DifferenceEstimate([first]).pairs_to_decide(0.01)
    assert needed is not None
    interval = DifferenceEstimate([first] * needed).interval()
    assert interval.lower >= -0.01 or interval.upper < -0.01


def test_no_number_of_equal_pairs_decides() -> None:
    assert DifferenceEstimate([even_pair()], deterministic=True).pairs_to_decide(0.01) is None


def test_a_difference_at_the_margin_is_not_decided_by_any_number_of_pairs() -> None:
    assert DifferenceEstimate([even_pair(lost=60)]).pairs_to_decide(0.01) is None


@pytest.mark.parametrize(
    ("gained", "lost", "total"),
    [([], [], []), ([0], [0, 0], [1]), ([1], [1], [1])],
    ids=["empty", "lengths differ", "more changes than requests"],
)
def test_impossible_counts_are_rejected(
    gained: list[int], lost: list[int], total: list[int]
) -> None:
    with pytest.raises(ValueError, match=r"entry per second|more requests changed"):
        PairCounts(gained=gained, lost=lost, total=total)


def test_a_pair_without_requests_is_rejected() -> None:
    with pytest.raises(ValueError, match="at least one matched request"):
        DifferenceEstimate([PairCounts(gained=[0], lost=[0], total=[0])])

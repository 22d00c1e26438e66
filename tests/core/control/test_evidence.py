"""Inputs of the laws: counts of each target, and the demand with its uncertainty."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from goodput_core.control import ClassWindow, TargetCounts, TargetStatus, WindowTally
from goodput_core.control.capacity import ReplicaCapacity
from goodput_core.control.demand import ArrivalSample, estimate_demand, estimate_growth
from goodput_core.control.slo_window import target_status, wilson_upper
from goodput_core.histogram import LengthMix
from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.slo.targets import Targets
from goodput_core.units import NS_PER_MS, NS_PER_S

MS, S = NS_PER_MS, NS_PER_S
TARGETS = Targets(ttft_ns=1000 * MS, tpot_ns=100 * MS)


def _record(
    ttft_ms: int | None = 100, tpot_ms: int = 10, outcome: Outcome = Outcome.OK, tokens: int = 11
) -> RequestRecord:
    first = None if ttft_ms is None else ttft_ms * MS
    last = None if first is None else first + (tokens - 1) * tpot_ms * MS
    return RequestRecord(
        request_id="r",
        slo_class="chat",
        scheduled_ns=0,
        outcome=outcome,
        first_token_ns=first,
        last_token_ns=last,
        end_ns=5 * S if last is None else last,
        output_tokens=0 if first is None else tokens,
    )


MET, CLOSE, MISSED = (
    TargetCounts(judged=1),
    TargetCounts(judged=1, close=1),
    TargetCounts(judged=1, missed=1),
)
NONE = TargetCounts()


@pytest.mark.parametrize(
    ("record", "ttft", "tpot"),
    [
        pytest.param(_record(), MET, MET, id="both met"),
        pytest.param(_record(ttft_ms=800), MET, MET, id="a fifth to spare is slack"),
        pytest.param(_record(ttft_ms=801), CLOSE, MET, id="less is close"),
        pytest.param(_record(tpot_ms=81), MET, CLOSE, id="close in TPOT"),
        pytest.param(_record(ttft_ms=1001), MISSED, MET, id="TTFT missed"),
        pytest.param(_record(tpot_ms=101), MET, MISSED, id="TPOT missed"),
        pytest.param(_record(tokens=1), MET, NONE, id="one token has no TPOT"),
        pytest.param(_record(None, outcome=Outcome.SHED), MISSED, NONE, id="shed"),
        pytest.param(_record(None, outcome=Outcome.TIMEOUT), MISSED, NONE, id="timed out"),
        pytest.param(_record(outcome=Outcome.SHED), MET, MISSED, id="dropped after a token"),
        pytest.param(
            _record(ttft_ms=1001, outcome=Outcome.SHED), MISSED, MISSED, id="dropped, late token"
        ),
        pytest.param(_record(outcome=Outcome.TIMEOUT), MET, MISSED, id="timed out after a token"),
    ],
)
def test_a_request_counts_for_each_target_separately(
    record: RequestRecord, ttft: TargetCounts, tpot: TargetCounts
) -> None:
    tally = WindowTally()
    tally.add(record, TARGETS)
    assert tally.take() == (ClassWindow(name="chat", ttft=ttft, tpot=tpot),)
    assert tally.take() == ()


@pytest.mark.parametrize("outcome", [Outcome.ERROR, Outcome.UNSENT, Outcome.CANCELLED])
def test_outcomes_unrelated_to_load_are_not_counted(outcome: Outcome) -> None:
    tally = WindowTally()
    tally.add(_record(outcome=outcome), TARGETS)
    assert tally.take() == ()


def test_a_request_that_missed_only_its_e2e_target_counts_against_both_targets() -> None:
    tally = WindowTally()
    tally.add(_record(), Targets(ttft_ns=1000 * MS, tpot_ns=100 * MS, e2e_ns=1))
    assert tally.take() == (ClassWindow(name="chat", ttft=MISSED, tpot=MISSED),)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        (TargetCounts(judged=19, missed=19), TargetStatus.UNKNOWN),
        (TargetCounts(judged=100, missed=30), TargetStatus.MISSED),
        (TargetCounts(judged=100, missed=12), TargetStatus.KEPT),
        (TargetCounts(judged=100, missed=5, close=10), TargetStatus.KEPT),
        (TargetCounts(judged=100, missed=5, close=5), TargetStatus.SLACK),
    ],
)
def test_a_target_is_missed_only_if_chance_is_an_unlikely_cause(
    counts: TargetCounts, expected: TargetStatus
) -> None:
    assert target_status(counts, Fraction(9, 10)) is expected


CAPACITY = ReplicaCapacity(device_s=0.1, spread=1.0, batch=1, feasible=True)


def _samples(rates: list[float]) -> list[ArrivalSample]:
    """Return one sample for every ten seconds."""
    return [
        ArrivalSample(
            at_ns=(i + 1) * 10 * S,
            interval_ns=10 * S,
            requests=round(rate * 10),
            finished=LengthMix(),
        )
        for i, rate in enumerate(rates)
    ]


def test_demand_is_the_counted_load_with_a_lower_bound() -> None:
    found = estimate_demand(_samples([9.0] * 60), CAPACITY, 600 * S)
    assert found.likely == pytest.approx(0.9)
    assert 0.8 < found.sustained <= found.lower < 0.9


@pytest.mark.parametrize(
    ("before", "after", "latest"),
    [
        pytest.param(1.0, 2.0, 0.2, id="120 in the last minute"),
        pytest.param(0.5, 1.0, 0.1 * 100 / 140, id="100 in 140 s"),
        pytest.param(0.2, 0.4, 0.024, id="72 in five minutes"),
    ],
)
def test_the_latest_demand_is_that_of_enough_requests(
    before: float, after: float, latest: float
) -> None:
    samples = _samples([before] * 60 + [after] * 6)
    assert estimate_demand(samples, CAPACITY, 660 * S).latest == pytest.approx(latest)


def test_few_or_uneven_requests_lower_the_bound_of_the_demand() -> None:
    many = estimate_demand(_samples([100.0] * 30), CAPACITY, 300 * S)
    few = estimate_demand(_samples([1.0] * 30), CAPACITY, 300 * S)
    uneven = estimate_demand(
        _samples([100.0] * 30),
        ReplicaCapacity(device_s=0.1, spread=9.0, batch=1, feasible=True),
        300 * S,
    )
    assert few.lower / few.likely < many.lower / many.likely
    assert uneven.lower < many.lower
    assert uneven.likely == many.likely


def test_a_gap_in_the_samples_does_not_count_as_idle_time() -> None:
    samples = [s for s in _samples([9.0] * 30) if not 100 * S < s.at_ns < 250 * S]
    assert estimate_demand(samples, CAPACITY, 300 * S).likely == pytest.approx(0.9)


def test_a_ramp_is_a_trend_and_a_step_is_not() -> None:
    ramp = _samples([20 + i / 2 for i in range(60)])
    assert estimate_growth(ramp, CAPACITY, 600 * S, 300 * S) == pytest.approx(1.5, rel=0.2)
    for at in range(0, 60, 3):
        step = _samples([20.0] * (60 - at) + [50.0] * at)
        assert estimate_growth(step, CAPACITY, 600 * S, 300 * S) == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize(("before", "after"), [(2.3, 4.6), (0.5, 2.0), (10.0, 14.0)])
def test_a_step_is_rarely_a_trend_although_chance_makes_it_look_like_a_ramp(
    before: float, after: float
) -> None:
    found = 0
    for seed in range(20):
        step = [before] * 60 + [after] * 30
        found += max(_growths(_random_samples(seed, step), 40)) > 0
    assert found <= 6


def test_a_trend_needs_samples_over_twice_the_horizon() -> None:
    ramp = _samples([20 + i / 2 for i in range(30)])
    assert estimate_growth(ramp, CAPACITY, 300 * S, 300 * S) == 0.0


def test_growth_explained_by_chance_is_not_a_trend() -> None:
    rates = [6.0] * 15 + [6.6] * 15 + [7.2] * 15 + [7.8] * 15
    uneven = ReplicaCapacity(device_s=0.1, spread=9.0, batch=1, feasible=True)
    # The demand grows by 0.06 in 150 s; from the middle of the last minute, the horizon is 330 s.
    found = estimate_growth(_samples(rates), CAPACITY, 600 * S, 300 * S)
    assert found == pytest.approx(0.06 * 330 / 150)
    assert estimate_growth(_samples(rates), uneven, 600 * S, 300 * S) == 0.0


def _random_samples(seed: int, rates: list[float], interval_s: int = 10) -> list[ArrivalSample]:
    """Return one sample of independent arrivals for each rate."""
    rng = random.Random(seed)
    samples = []
    for i, rate in enumerate(rates):
        requests, at_s = 0, rng.expovariate(rate)
        while at_s < interval_s:
            requests, at_s = requests + 1, at_s + rng.expovariate(rate)
        samples.append(
            ArrivalSample(
                at_ns=(i + 1) * interval_s * S,
                interval_ns=interval_s * S,
                requests=requests,
                finished=LengthMix(),
            )
        )
    return samples


def _growths(samples: list[ArrivalSample], horizon_s: int) -> list[float]:
    """Return the growth that is estimated after each interval."""
    return [
        estimate_growth(samples[max(0, end - 60) : end], CAPACITY, s.at_ns, horizon_s * S)
        for end, s in enumerate(samples, start=1)
    ]


@pytest.mark.parametrize("rate", [0.5, 3.7, 30.0])
def test_ten_hours_of_independent_arrivals_contain_no_trend(rate: float) -> None:
    for seed in range(3):
        assert max(_growths(_random_samples(seed, [rate] * 3600), 40)) == 0


def test_a_ramp_of_few_requests_is_found_before_it_ends() -> None:
    found = 0
    for seed in range(10):
        ramp = [0.2] * 30 + [0.2 + i * 0.09 for i in range(60)]
        growths = _growths(_random_samples(seed, ramp), 40)
        assert max(growths[:30]) == 0
        found += max(growths[30:60]) > 0
    assert found >= 9


def test_a_slow_ramp_is_found_although_a_replica_starts_quickly() -> None:
    found = 0
    for seed in range(10):
        ramp = [2.0] * 60 + [2.0 + i * 0.04 for i in range(90)]
        found += max(_growths(_random_samples(seed, ramp), 40)) > 0
    assert found >= 9


@pytest.mark.parametrize("interval_s", [2, 10, 30, 60])
def test_a_ramp_is_found_at_every_control_interval(interval_s: int) -> None:
    rates = [20 + i * interval_s / 20 for i in range(1200 // interval_s)]
    samples = _random_samples(1, rates, interval_s)
    growth = estimate_growth(samples, CAPACITY, samples[-1].at_ns, 40 * S)
    assert growth == pytest.approx(0.1 * 70 / 20, rel=0.5)


@pytest.mark.parametrize("seed", range(5))
def test_random_arrivals_are_not_a_trend_even_with_a_short_horizon(seed: int) -> None:
    rng = random.Random(seed)
    at_s, arrivals = 0.0, [0] * 600
    while (at_s := at_s + rng.expovariate(5.0)) < len(arrivals):
        arrivals[int(at_s)] += 1
    samples = [
        ArrivalSample(at_ns=(i + 1) * S, interval_ns=S, requests=requests, finished=LengthMix())
        for i, requests in enumerate(arrivals)
    ]
    ends = range(60, len(arrivals) + 1)
    most = max(estimate_growth(samples[:end], CAPACITY, end * S, 5 * S) for end in ends)
    assert most < 0.05 * 0.5, "5 % of a demand of 0.5 device seconds per second"


@pytest.mark.parametrize(
    ("good", "total", "upper"),
    [
        # Root of (p̂ − p)² = z²·p(1 − p)/n with z = 1.6448536; z²/(n + z²) where none attained.
        pytest.param(90, 100, 0.939282, id="90-of-100"),
        pytest.param(0, 30, 2.705543 / 32.705543, id="0-of-30"),
        pytest.param(7, 7, 1.0, id="all"),
    ],
)
def test_the_upper_bound_is_wilsons(good: int, total: int, upper: float) -> None:
    assert wilson_upper(good, total) == pytest.approx(upper, abs=1e-6)

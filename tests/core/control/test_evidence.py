"""Evidence of the laws: targets counted separately, and demand with its uncertainty."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from goodput_core.control import ClassWindow, PromiseCounts, TargetStatus, WindowTally
from goodput_core.control.capacity import ArrivalSample, ReplicaCapacity, demand, growth
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


KEPT, CLOSE, MISSED = (
    PromiseCounts(judged=1),
    PromiseCounts(judged=1, close=1),
    PromiseCounts(judged=1, missed=1),
)
NOBODY = PromiseCounts()


@pytest.mark.parametrize(
    ("record", "ttft", "tpot"),
    [
        pytest.param(_record(), KEPT, KEPT, id="both kept"),
        pytest.param(_record(ttft_ms=800), KEPT, KEPT, id="a fifth to spare is slack"),
        pytest.param(_record(ttft_ms=801), CLOSE, KEPT, id="less is close"),
        pytest.param(_record(tpot_ms=81), KEPT, CLOSE, id="close in TPOT"),
        pytest.param(_record(ttft_ms=1001), MISSED, KEPT, id="TTFT missed"),
        pytest.param(_record(tpot_ms=101), KEPT, MISSED, id="TPOT missed"),
        pytest.param(_record(tokens=1), KEPT, NOBODY, id="one token has no TPOT"),
        pytest.param(_record(None, outcome=Outcome.SHED), MISSED, NOBODY, id="shed"),
        pytest.param(_record(None, outcome=Outcome.TIMEOUT), MISSED, NOBODY, id="timed out"),
        pytest.param(_record(outcome=Outcome.TIMEOUT), KEPT, MISSED, id="timed out after a token"),
    ],
)
def test_a_request_counts_for_each_promise_apart(
    record: RequestRecord, ttft: PromiseCounts, tpot: PromiseCounts
) -> None:
    tally = WindowTally()
    tally.add(record, TARGETS)
    assert tally.take() == (ClassWindow(name="chat", ttft=ttft, tpot=tpot),)
    assert tally.take() == ()


@pytest.mark.parametrize("outcome", [Outcome.ERROR, Outcome.UNSENT, Outcome.CANCELLED])
def test_what_has_nothing_to_do_with_load_is_left_out(outcome: Outcome) -> None:
    tally = WindowTally()
    tally.add(_record(outcome=outcome), TARGETS)
    assert tally.take() == ()


def test_an_answer_that_is_late_as_a_whole_counts_against_both() -> None:
    tally = WindowTally()
    tally.add(_record(), Targets(ttft_ns=1000 * MS, tpot_ns=100 * MS, e2e_ns=1))
    assert tally.take() == (ClassWindow(name="chat", ttft=MISSED, tpot=MISSED),)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        (PromiseCounts(judged=19, missed=19), TargetStatus.UNKNOWN),
        (PromiseCounts(judged=100, missed=30), TargetStatus.MISSED),
        (PromiseCounts(judged=100, missed=12), TargetStatus.KEPT),
        (PromiseCounts(judged=100, missed=5, close=10), TargetStatus.KEPT),
        (PromiseCounts(judged=100, missed=5, close=5), TargetStatus.SLACK),
    ],
)
def test_a_promise_is_missed_only_when_chance_does_not_explain_it(
    counts: PromiseCounts, expected: TargetStatus
) -> None:
    assert target_status(counts, Fraction(9, 10)) is expected


CARRIED = ReplicaCapacity(device_s=0.1, spread=1.0, batch=1, feasible=True)


def _samples(rates: list[float]) -> list[ArrivalSample]:
    """One every ten seconds."""
    return [
        ArrivalSample(
            at_ns=(i + 1) * 10 * S,
            interval_ns=10 * S,
            requests=round(rate * 10),
            finished=LengthMix(),
        )
        for i, rate in enumerate(rates)
    ]


def test_demand_is_what_is_counted_and_less_is_sure() -> None:
    found = demand(_samples([9.0] * 60), CARRIED, 600 * S)
    assert found.likely == pytest.approx(0.9)
    assert 0.8 < found.sustained <= found.least < 0.9


def test_few_requests_and_uneven_ones_are_less_sure() -> None:
    many = demand(_samples([100.0] * 30), CARRIED, 300 * S)
    few = demand(_samples([1.0] * 30), CARRIED, 300 * S)
    uneven = demand(
        _samples([100.0] * 30),
        ReplicaCapacity(device_s=0.1, spread=9.0, batch=1, feasible=True),
        300 * S,
    )
    assert few.least / few.likely < many.least / many.likely
    assert uneven.least < many.least
    assert uneven.likely == many.likely


def test_a_gap_in_the_samples_is_no_time_without_requests() -> None:
    samples = [s for s in _samples([9.0] * 30) if not 100 * S < s.at_ns < 250 * S]
    assert demand(samples, CARRIED, 300 * S).likely == pytest.approx(0.9)


def test_a_ramp_is_a_trend_and_a_step_is_not() -> None:
    ramp = _samples([20 + i / 2 for i in range(60)])
    assert growth(ramp, CARRIED, 600 * S, 300 * S) == pytest.approx(1.5, rel=0.2)
    for at in range(0, 60, 3):
        step = _samples([20.0] * (60 - at) + [50.0] * at)
        assert growth(step, CARRIED, 600 * S, 300 * S) == pytest.approx(0, abs=0.01)


def test_a_trend_needs_twice_the_horizon_to_show() -> None:
    ramp = _samples([20 + i / 2 for i in range(30)])
    assert growth(ramp, CARRIED, 300 * S, 300 * S) == 0.0


def test_growth_that_chance_explains_is_no_trend() -> None:
    rates = [1.0] * 15 + [1.1] * 15 + [1.2] * 15 + [1.3] * 15
    uneven = ReplicaCapacity(device_s=0.1, spread=9.0, batch=1, feasible=True)
    assert growth(_samples(rates), CARRIED, 600 * S, 300 * S) == pytest.approx(0.02)
    assert growth(_samples(rates), uneven, 600 * S, 300 * S) == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_chance_within_seconds_is_no_trend_however_soon_replicas_are_there(seed: int) -> None:
    rng = random.Random(seed)
    at_s, came = 0.0, [0] * 600
    while (at_s := at_s + rng.expovariate(5.0)) < len(came):
        came[int(at_s)] += 1
    samples = [
        ArrivalSample(at_ns=(i + 1) * S, interval_ns=S, requests=requests, finished=LengthMix())
        for i, requests in enumerate(came)
    ]
    ends = range(60, len(came) + 1)
    most = max(growth(samples[:end], CARRIED, end * S, 5 * S) for end in ends)
    assert most < 0.05 * 0.5, "of 0.5 device seconds per second, at no time more than a little"


@pytest.mark.parametrize(
    ("good", "total", "upper"),
    [
        # Root of (p̂ − p)² = z²·p(1 − p)/n with z = 1.6448536; z²/(n + z²) where none attained.
        pytest.param(90, 100, 0.939282, id="90-of-100"),
        pytest.param(0, 30, 2.705543 / 32.705543, id="0-of-30"),
        pytest.param(7, 7, 1.0, id="all"),
    ],
)
def test_the_laws_bound_is_wilsons(good: int, total: int, upper: float) -> None:
    assert wilson_upper(good, total) == pytest.approx(upper, abs=1e-6)

"""The length predictor: survival curves, censored outputs, its error, and forgetting."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_engine.scheduler.prediction import KnownLengths, LearnedLengths, PredictionError
from goodput_engine.scheduler.request_table import ScheduledRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LONG = 4000
"""A limit that no output of these tests reaches."""


def _request(
    slo_class: str = "chat", *, has: int = 0, limit: int = 1000, input_tokens: int = 1
) -> ScheduledRequest:
    return ScheduledRequest(
        rid=1,
        arrival_ns=0,
        input_tokens=input_tokens,
        slo_class=slo_class,
        max_output_tokens=limit,
        output_limit=limit,
        base_sampled=has,
        base_emitted=has,
    )


def _taught(
    outputs: dict[str, list[int]], *, limit: int = 1000, running: Sequence[ScheduledRequest] = ()
) -> LearnedLengths:
    lengths = LearnedLengths()
    for slo_class, tokens in outputs.items():
        for has in tokens:
            lengths.learn(_request(slo_class, has=has, limit=limit), running)
    return lengths


def test_before_anything_is_known_a_limit_counts_if_it_is_a_likely_length() -> None:
    lengths = LearnedLengths()
    means = [lengths.output_tokens(_request(limit=limit)) for limit in (10, 123, 1000, 10_000)]
    assert means[:3] == sorted(set(means[:3]))
    assert means[0] == 10
    assert 70 < means[1] < 110
    assert 250 < means[2] < 400
    assert 240 < means[3] < 320, "about the typical length: the limit only protects"
    assert lengths.output_tokens(_request(limit=1)) == 1


def test_a_limit_that_the_client_did_not_state_is_no_length() -> None:
    lengths = LearnedLengths()
    for _ in range(100):
        lengths.learn(_request(has=700, limit=700), ())
    assert lengths.output_tokens(_request(limit=300)) == 300
    unstated = _request(limit=30_000)
    unstated.max_output_tokens = None
    assert lengths.chance_within(unstated, 2000) > 0.5
    assert lengths.output_tokens(unstated) < lengths.output_tokens(_request(limit=30_000))


def test_a_class_is_predicted_by_its_own_outputs() -> None:
    lengths = _taught({"chat": [10] * 20, "batch": [500] * 20})
    assert lengths.output_tokens(_request("chat")) == pytest.approx(10, abs=2)
    assert lengths.output_tokens(_request("batch")) == pytest.approx(500, rel=0.15)


def test_a_class_without_outputs_is_predicted_by_those_of_all() -> None:
    lengths = _taught({"chat": [10] * 20, "batch": [500] * 20})
    assert lengths.output_tokens(_request("new")) == pytest.approx(255, rel=0.15)


def test_a_class_with_few_outputs_moves_from_all_to_its_own() -> None:
    lengths = _taught({"batch": [500] * 40, "rare": [7]})
    few = lengths.output_tokens(_request("rare"))
    assert few < lengths.output_tokens(_request("new"))
    for _ in range(50):
        lengths.learn(_request("rare", has=7), ())
    assert lengths.output_tokens(_request("rare")) < few / 2


def test_the_tokens_of_an_output_so_far_rule_out_shorter_ones() -> None:
    lengths = _taught({"chat": ([10] * 3 + [100]) * 100})
    assert lengths.output_tokens(_request(has=5)) == pytest.approx(32, rel=0.1)
    assert lengths.output_tokens(_request(has=20)) == pytest.approx(100, rel=0.1)
    again = lengths.output_tokens(_request(has=200))
    assert 300 < again < 700, "longer than all: about as long again, as before anything is known"


@given(
    outputs=st.lists(st.integers(1, 2000), max_size=60),
    limit=st.integers(1, 1000),
    has=st.integers(0, 999),
    share=st.floats(0, 1),
    running=st.lists(st.integers(0, 2000), max_size=5),
)
def test_a_prediction_is_longer_than_the_output_so_far_and_within_the_limit(
    outputs: list[int], limit: int, has: int, share: float, running: list[int]
) -> None:
    request = _request(has=min(has, limit - 1), limit=limit)
    others = [_request(has=age, limit=2001) for age in running]
    lengths = _taught({"chat": outputs}, running=others)
    assert request.sampled_tokens < lengths.output_tokens(request) <= limit
    assert request.sampled_tokens < lengths.quantile(request, share) <= limit


@given(
    outputs=st.lists(st.integers(1, 2000), max_size=60),
    limit=st.integers(1, 1000),
    has=st.integers(0, 999),
    tokens=st.lists(st.integers(0, 1500), min_size=2, max_size=10),
)
def test_the_chance_of_an_end_within_some_tokens_grows_with_them_from_0_to_1(
    outputs: list[int], limit: int, has: int, tokens: list[int]
) -> None:
    request = _request(has=min(has, limit - 1), limit=limit)
    lengths = _taught({"chat": outputs})
    chances = [lengths.chance_within(request, within) for within in sorted(tokens)]
    assert chances == sorted(chances)
    assert all(0 <= chance <= 1 for chance in chances)
    assert lengths.chance_within(request, request.sampled_tokens) == 0
    assert lengths.chance_within(request, limit) == 1


@given(
    outputs=st.lists(st.integers(1, 2000), max_size=60),
    shares=st.lists(st.floats(0, 1), min_size=2, max_size=6),
)
def test_quantiles_grow_with_their_share(outputs: list[int], shares: list[float]) -> None:
    lengths = _taught({"chat": outputs})
    quantiles = [lengths.quantile(_request(), share) for share in sorted(shares)]
    assert quantiles == sorted(quantiles)


def _geometric(draw: random.Random) -> int:
    return math.ceil(draw.expovariate(1 / 200))


def _uniform(draw: random.Random) -> int:
    return draw.randint(50, 500)


@pytest.mark.parametrize("sample", [_geometric, _uniform], ids=["geometric", "uniform"])
def test_quantiles_agree_with_those_of_2000_samples(sample: Callable[[random.Random], int]) -> None:
    draw = random.Random(7)
    samples = [sample(draw) for _ in range(2000)]
    lengths = _taught({"chat": samples}, limit=_LONG)
    # The last 1,024 outputs weigh most.
    recent = sorted(samples[-1024:])
    for share in (0.05, 0.25, 0.5, 0.75, 0.9, 0.95):
        empirical = recent[int(share * len(recent))]
        predicted = lengths.quantile(_request(limit=_LONG), share)
        assert predicted == pytest.approx(empirical, rel=0.15)
    mean = sum(recent) / len(recent)
    assert lengths.output_tokens(_request(limit=_LONG)) == pytest.approx(mean, rel=0.1)


@pytest.mark.parametrize("tokens", [1, 2, 10, 31, 100, 300, 2000])
def test_outputs_that_are_all_equally_long_are_predicted_at_that_length(tokens: int) -> None:
    lengths = _taught({"chat": [tokens] * 500}, limit=_LONG)
    request = _request(limit=_LONG)
    assert lengths.output_tokens(request) == pytest.approx(tokens, rel=0.15, abs=1)
    assert lengths.quantile(request, 0.05) == pytest.approx(tokens, rel=0.15, abs=1)
    assert lengths.quantile(request, 0.95) == pytest.approx(tokens, rel=0.15, abs=1)


def test_an_output_of_one_token_ends_within_one_token() -> None:
    lengths = _taught({"chat": [1, 30] * 300})
    assert lengths.chance_within(_request(), 1) == pytest.approx(0.5, abs=0.05)
    assert lengths.chance_within(_request(), 20) == pytest.approx(0.5, abs=0.05)


def test_survival_is_estimated_as_by_kaplan_and_meier() -> None:
    # Of 100 parts, 40 end after 10 tokens, 20 run with 20, 20 end after 50, 10 run with 80, and 10
    # end after 200: S(10) = 60/100, S(50) = 60/100 · 20/40, S(200) = 0.
    outputs = ([10] * 4 + [50] * 2 + [200]) * 100
    draw = random.Random(3)
    draw.shuffle(outputs)
    running = [_request(has=20, limit=_LONG)] * 200 + [_request(has=80, limit=_LONG)] * 100
    lengths = _taught({"chat": outputs}, limit=_LONG, running=running)
    new = _request(limit=_LONG)
    assert lengths.chance_within(new, 5) == pytest.approx(0, abs=0.03)
    assert lengths.chance_within(new, 15) == pytest.approx(1 - 0.6, abs=0.03)
    assert lengths.chance_within(new, 40) == pytest.approx(1 - 0.6, abs=0.03)
    assert lengths.chance_within(new, 100) == pytest.approx(1 - 0.6 * 0.5, abs=0.03)
    assert lengths.chance_within(new, 300) == pytest.approx(1, abs=0.03)
    started = _request(has=15, limit=_LONG)
    assert lengths.chance_within(started, 100) == pytest.approx(0.5, abs=0.03)


def test_outputs_that_were_cancelled_count_as_longer() -> None:
    # As above, but the 20 and the 10 parts were cancelled with 20 and 80 tokens.
    outputs = ([10] * 4 + [50] * 2 + [200]) * 100
    random.Random(3).shuffle(outputs)
    lengths = LearnedLengths()
    for has in [20] * 200 + [80] * 100:
        lengths.censor(_request(has=has, limit=_LONG))
    for has in outputs:
        lengths.learn(_request(has=has, limit=_LONG), ())
    new = _request(limit=_LONG)
    assert lengths.chance_within(new, 40) == pytest.approx(1 - 0.6, abs=0.03)
    assert lengths.chance_within(new, 100) == pytest.approx(1 - 0.6 * 0.5, abs=0.03)
    assert lengths.error.judged == len(outputs), "a cancelled output is no error"


def test_outputs_that_end_at_their_limit_count_as_longer() -> None:
    draw = random.Random(2)
    lengths = LearnedLengths()
    for _ in range(1000):
        lengths.learn(_request(has=min(300, _geometric(draw)), limit=300), ())
    # Below the limit the curve is that of the geometric distribution with mean 200. A fifth of
    # the outputs reached the limit, and so may have been given their length.
    unknown = 1 - math.exp(-300 / 200)
    expected = unknown * (1 - math.exp(-100 / 200))
    assert lengths.chance_within(_request(limit=300), 100) == pytest.approx(expected, abs=0.05)
    assert lengths.output_tokens(_request(limit=10_000)) > 500, "more than any output so far"


def test_outputs_that_all_end_at_different_limits_are_predicted_at_their_limit() -> None:
    draw = random.Random(2)
    lengths = LearnedLengths()
    for _ in range(300):
        tokens = draw.randint(20, 900)
        lengths.learn(_request(has=tokens, limit=tokens), ())
    for limit in (50, 300, 800):
        request = _request(limit=limit)
        assert lengths.output_tokens(request) == pytest.approx(limit, rel=0.02)
        assert lengths.quantile(request, 0.05) == limit
        assert lengths.chance_within(request, limit - 1) < 0.02


def test_running_outputs_count_as_longer_than_they_are() -> None:
    running = [_request(has=100)] * 100
    alone, beside = _taught({"chat": [10] * 100}), _taught({"chat": [10] * 100}, running=running)
    assert alone.chance_within(_request(), 50) > 0.95
    assert beside.chance_within(_request(), 50) == pytest.approx(0.5, abs=0.05)
    assert beside.output_tokens(_request()) > 50


def test_requests_that_have_not_started_are_no_evidence() -> None:
    waiting = [_request()] * 1000
    outputs = {"chat": [10, 200] * 50}
    alone, beside = _taught(outputs), _taught(outputs, running=waiting)
    for share in (0.1, 0.5, 0.9):
        assert alone.quantile(_request(), share) == beside.quantile(_request(), share)


def test_prompts_of_different_sizes_are_predicted_separately() -> None:
    lengths = LearnedLengths()
    for _ in range(100):
        lengths.learn(_request(has=20, input_tokens=30), ())
        lengths.learn(_request(has=400, input_tokens=5000), ())
    assert lengths.output_tokens(_request(input_tokens=30)) == pytest.approx(20, rel=0.15)
    assert lengths.output_tokens(_request(input_tokens=5000)) == pytest.approx(400, rel=0.15)
    assert lengths.output_tokens(_request(input_tokens=500)) == pytest.approx(210, rel=0.15)


def test_a_change_of_lengths_is_followed() -> None:
    lengths = _taught({"chat": [10] * 5000 + [300] * 5000})
    assert lengths.output_tokens(_request()) == pytest.approx(300, rel=0.15)


def test_the_revision_rises_after_an_eighth_more_outputs_and_at_least_every_128() -> None:
    lengths = LearnedLengths()
    seen = []
    for _ in range(5000):
        lengths.learn(_request(has=10), ())
        seen.append(lengths.revision)
    assert seen == sorted(seen)
    assert seen[:8] == list(range(1, 9)), "at once where there is little evidence"
    assert seen[127] - seen[111] <= 2
    assert seen[-1] - seen[-1025] == 8


def test_means_change_only_with_the_revision() -> None:
    draw = random.Random(5)
    lengths = _taught({"chat": [_geometric(draw) for _ in range(500)]})
    asked = [_request(has=has) for has in (0, 20, 300)]
    revision, means = lengths.revision, [lengths.output_tokens(request) for request in asked]
    for _ in range(500):
        lengths.learn(_request(has=draw.randint(1, 999)), ())
        now = [lengths.output_tokens(request) for request in asked]
        assert now == means or lengths.revision > revision
        revision, means = lengths.revision, now


def test_memory_is_bounded_whatever_classes_lengths_and_prompts_come() -> None:
    lengths = LearnedLengths()
    draw = random.Random(4)
    for i in range(5000):
        request = _request(
            f"class-{i % 500}",
            has=draw.randint(1, 1 << 20),
            limit=1 << 21,
            input_tokens=1 << draw.randint(0, 20),
        )
        lengths.learn(request, ())
        lengths.quantile(_request(limit=draw.randint(1, 1 << 21)), draw.random())
    assert len(lengths._curves) <= 256
    assert len(lengths._all._ends) == 8 * 20
    assert len(lengths._all._known) <= 8192


def test_its_error_is_the_mean_log_ratio_of_its_predictions() -> None:
    lengths = LearnedLengths()
    ratios = []
    for tokens in (100, 10, 100, 100, 500, 20) * 50:
        ratios.append(abs(math.log(lengths.output_tokens(_request()) / tokens)))
        lengths.learn(_request(has=tokens), ())
    assert lengths.error.judged == 300
    assert lengths.error.mean_abs_log_ratio == pytest.approx(sum(ratios) / 300)


def test_old_errors_fade() -> None:
    lengths = _taught({"chat": [10, 1000] * 200})
    assert lengths.error.mean_abs_log_ratio > 1
    for _ in range(10_000):
        lengths.learn(_request(has=100), ())
    assert lengths.error.judged == 10_400
    assert lengths.error.mean_abs_log_ratio < 0.1


def test_its_error_is_small_for_equal_lengths_and_large_for_mixed_ones() -> None:
    assert _taught({"even": [100] * 1000}).error.mean_abs_log_ratio < 0.1
    assert _taught({"wild": [10, 1000] * 500}, limit=2000).error.mean_abs_log_ratio > 1


def test_the_oracle_is_never_wrong_but_for_the_limit() -> None:
    known = KnownLengths({1: 700}.__getitem__)
    assert known.output_tokens(_request()) == 700
    assert known.output_tokens(_request(limit=50)) == 50
    assert known.quantile(_request(), 0.05) == 700
    assert known.chance_within(_request(), 699) == 0
    assert known.chance_within(_request(), 700) == 1
    known.learn(_request(has=700), ())
    assert known.error == PredictionError()


def test_before_outputs_end_a_short_end_to_end_target_announces_short_outputs() -> None:
    lengths = LearnedLengths()
    before = lengths.output_tokens(_request("quick", limit=_LONG))
    for tokens in (20, 40, 80):
        lengths.expect(_request("quick", limit=_LONG), tokens)
    assert 30 < lengths.output_tokens(_request("quick", limit=_LONG)) < before / 2
    assert lengths.chance_within(_request("quick", limit=_LONG), 40) > 0.7
    assert lengths.output_tokens(_request("other", limit=_LONG)) == before
    assert lengths.num_learned(_request("quick")) == 0


def test_a_loose_end_to_end_target_announces_no_length() -> None:
    lengths = LearnedLengths()
    before = lengths.output_tokens(_request(limit=_LONG))
    lengths.expect(_request(limit=_LONG), 3000)
    assert lengths.output_tokens(_request(limit=_LONG)) == before


def test_ended_outputs_outweigh_the_announced_lengths() -> None:
    lengths = LearnedLengths()
    for _ in range(8):
        lengths.expect(_request(limit=_LONG), 10)
    for _ in range(20):
        lengths.learn(_request(has=200, limit=_LONG), ())
    learned = lengths.output_tokens(_request(limit=_LONG))
    assert learned == pytest.approx(200, rel=0.1)
    lengths.expect(_request(limit=_LONG), 1)
    assert lengths.output_tokens(_request(limit=_LONG)) == learned

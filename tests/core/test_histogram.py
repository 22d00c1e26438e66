"""Histograms of durations and of lengths."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from goodput_core.histogram import DurationHistogram, LengthHistogram, LengthMix
from goodput_core.quantiles import P50, P99, quantile

REQUESTS = st.lists(
    st.tuples(st.integers(1, 100_000), st.integers(0, 1000), st.integers(1, 10_000)), max_size=60
)


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=200))
def test_a_quantile_of_durations_is_within_one_per_cent(durations: list[int]) -> None:
    histogram = DurationHistogram()
    for ns in durations:
        histogram.add(ns)
    for share in (P50, P99):
        exact = quantile(durations, share)
        # Within 1 %, and truncated to whole nanoseconds.
        assert abs(histogram.quantile_ns(float(share)) - exact) <= 0.0102 * exact + 1
    assert (histogram.count, histogram.max_ns) == (len(durations), max(durations))


@given(
    st.lists(st.integers(1, 10**12), max_size=200),
    st.lists(st.integers(1, 10**12), min_size=1, max_size=20, unique=True),
)
def test_counts_up_to_bounds_are_exact_for_durations_over_one_per_cent_away(
    durations: list[int], bounds: list[int]
) -> None:
    histogram = DurationHistogram()
    for ns in durations:
        histogram.add(ns)
    bounds.sort()
    counts = histogram.counts_up_to(bounds)
    assert counts == sorted(counts)
    for bound, count in zip(bounds, counts, strict=True):
        assert sum(ns < 0.989 * bound for ns in durations) <= count
        assert count <= sum(ns < 1.011 * bound for ns in durations)
    assert histogram.sum_ns == sum(durations)


def test_an_empty_histogram_has_quantile_zero() -> None:
    assert DurationHistogram().quantile_ns(0.99) == 0


def test_negative_durations_count_as_zero() -> None:
    histogram = DurationHistogram()
    histogram.add(-5)
    assert (histogram.count, histogram.max_ns, histogram.quantile_ns(0.5)) == (1, 1, 1)


@given(REQUESTS, REQUESTS)
def test_mixes_add_up_to_the_mix_of_all_requests(
    one: list[tuple[int, int, int]], other: list[tuple[int, int, int]]
) -> None:
    together = LengthMix.of_requests([*one, *other])
    assert together.requests == len(one) + len(other)
    for column, name in enumerate(("input_tokens", "cached_tokens", "output_tokens")):
        assert sum(getattr(b, name) for b in together.bins) == sum(
            row[column] for row in [*one, *other]
        )
    keys = [b.key for b in together.bins]
    assert keys == sorted(set(keys))


def test_requests_of_similar_lengths_share_a_bin() -> None:
    histogram = LengthHistogram()
    histogram.add(input_tokens=100, cached_tokens=0, output_tokens=10)
    histogram.add(input_tokens=120, cached_tokens=64, output_tokens=12)
    histogram.add(input_tokens=1000, cached_tokens=0, output_tokens=10)
    assert histogram.rows() == [[2, 220, 64, 22], [1, 1000, 0, 10]]
    assert [(b.requests, b.input_tokens) for b in histogram.mix().bins] == [(2, 220), (1, 1000)]

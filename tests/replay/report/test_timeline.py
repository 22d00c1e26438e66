"""Stretches of time contain every request, and their values equal a plain count."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.slo.attainment import SecondCounts
from goodput_core.slo.judging import JudgementKind, MissReason
from goodput_core.slo.record import Outcome
from goodput_replay.report.in_flight import InFlightSearch
from goodput_replay.report.latency_figures import (
    MEASURES,
    Curve,
    CurveReader,
    latency_figure,
)
from goodput_replay.report.timeline import attainment_so_far, cut_timeline, interval_edges
from goodput_replay.runs.columns import ColumnParts, GapCounts, RunColumns, read_parts
from goodput_replay.runs.folder import RunWriter
from goodput_replay.runs.summary import SLOSummary

if TYPE_CHECKING:
    from tests.replay.conftest import SyntheticRun

_KINDS, _OUTCOMES = list(JudgementKind), list(Outcome)


def _columns(spans: list[tuple[float, float]]) -> RunColumns:
    """Make columns of attained requests from pairs of start and end, in seconds."""
    starts, ends = (np.array([span[i] for span in spans], dtype=np.float64) * 1e9 for i in (0, 1))
    zeros = np.zeros(len(spans), dtype=np.int64)
    return RunColumns(
        class_names=("chat",),
        class_code=zeros,
        outcome_code=zeros + _OUTCOMES.index(Outcome.OK),
        kind_code=zeros + _KINDS.index(JudgementKind.ATTAINED),
        reason_code=zeros - 1,
        scheduled_ns=starts,
        sent_ns=starts,
        first_token_ns=ends,
        last_token_ns=ends,
        end_ns=ends,
        input_tokens=zeros,
        output_tokens=zeros,
        tbt_p99_us=starts * np.nan,
        row=np.arange(len(spans)),
    )


_SPANS = st.lists(
    st.tuples(st.integers(0, 590), st.integers(1, 200)).map(lambda s: (s[0] / 10, sum(s) / 10)),
    max_size=40,
)


@given(spans=_SPANS)
def test_the_maximum_in_flight_equals_a_count_at_every_start(
    spans: list[tuple[float, float]],
) -> None:
    timeline = cut_timeline([_columns(spans)], ("chat",), start_s=0, length_s=60)
    for index, (begin, end) in enumerate(pairwise(timeline.edges_s.tolist())):
        instants = [begin, *(s for s, _ in spans if begin <= s < end)]
        expected = max(sum(s <= at < e for s, e in spans) for at in instants)
        assert timeline.in_flight[index] == expected


@given(
    spans=st.lists(
        st.tuples(
            st.one_of(st.just(np.nan), st.integers(-40, 900).map(lambda tenths: tenths / 10)),
            st.one_of(st.just(np.nan), st.integers(-40, 900).map(lambda tenths: tenths / 10)),
        ),
        max_size=60,
    ),
    max_kept=st.integers(0, 130),
    bins=st.sampled_from([1, 3, 64]),
)
def test_the_maximum_in_flight_does_not_depend_on_the_slices(
    spans: list[tuple[float, float]], max_kept: int, bins: int
) -> None:
    edges = interval_edges(60)
    sent, ends = (np.array([span[i] for span in spans], dtype=np.float64) for i in (0, 1))
    whole = InFlightSearch(edges)
    sliced = InFlightSearch(edges, max_kept=max_kept, bins=bins)
    for search in (whole, sliced):
        while not search.finished:
            for start in range(0, len(spans), 7):
                search.add(sent[start : start + 7], ends[start : start + 7])
            search.end_pass()
    assert sliced.maxima.tolist() == whole.maxima.tolist()


@given(
    values=st.lists(
        st.floats(1e-3, 1e9) | st.sampled_from([0.05, 20.0, np.nan, np.inf]), max_size=300
    ),
    gaps_us=st.lists(st.integers(0, 10**7), max_size=30),
)
def test_a_figure_of_chosen_values_is_that_of_all_values(
    values: list[float], gaps_us: list[int]
) -> None:
    measure = MEASURES[2]
    assert measure.name == "tbt"
    columns = replace(
        _columns([(0, 1)] * len(values)), tbt_p99_us=np.array(values, dtype=np.float64) * 1000
    )
    gaps = GapCounts()
    gaps.add(np.array(gaps_us, dtype=np.int32))
    reader = CurveReader({"chat": gaps}, ["chat"])
    read_parts([columns], [reader])
    few = reader.curves(measure)
    measured = np.sort([value for value in measure.main_ms(columns) if np.isfinite(value)])
    shares = (np.arange(len(measured)) + 1) / max(1, len(measured))
    every = replace(few[0], values_ms=measured, shares=shares, count=len(measured))
    all_values = [every, *few[1:]]
    assert len(few[0].values_ms) <= 125
    assert latency_figure(measure, few, {}) == latency_figure(measure, all_values, {})


@given(spans=_SPANS, length_s=st.floats(60, 100_000))
def test_every_request_belongs_to_an_interval(
    spans: list[tuple[float, float]], length_s: float
) -> None:
    timeline = cut_timeline([_columns(spans)], ("chat",), start_s=0, length_s=length_s)
    assert timeline.offered.sum() == len(spans)
    assert timeline.classes[0].good.sum() == len(spans)
    assert timeline.served.sum() == sum(end <= length_s for _, end in spans)
    assert len(timeline.widths_s) <= 120
    assert timeline.widths_s.sum() == pytest.approx(length_s)
    assert 0.5 <= timeline.widths_s[-1] / timeline.widths_s[0] <= 1.5


def test_a_request_in_a_short_rest_of_the_window_is_no_burst() -> None:
    spans = [(at / 4, at / 4 + 0.1) for at in range(41)]
    timeline = cut_timeline([_columns(spans)], ("chat",), start_s=0, length_s=10.02)
    assert timeline.edges_s.tolist() == [*range(10), 10.02]
    assert (timeline.offered / timeline.widths_s).max() < 5
    assert (timeline.served / timeline.widths_s).max() < 5


def test_attainment_is_nan_without_judged_requests() -> None:
    timeline = cut_timeline([_columns([(0.5, 1), (2.5, 3)])], ("chat",), start_s=0, length_s=3)
    assert timeline.classes[0].attainment.tolist() == pytest.approx([1, np.nan, 1], nan_ok=True)


def test_a_window_that_begins_later_counts_from_its_start() -> None:
    timeline = cut_timeline([_columns([(100.5, 101)])], ("chat",), start_s=100, length_s=2)
    assert timeline.offered.tolist() == [1, 0]


def test_every_miss_is_counted_under_its_first_reason(
    tmp_path_factory: pytest.TempPathFactory, synthetic_run: SyntheticRun
) -> None:
    folder = tmp_path_factory.mktemp("misses")
    promise = synthetic_run.info.slo
    hard = replace(
        promise, classes=tuple(replace(c, ttft_ms=50, tpot_ms=30) for c in promise.classes)
    )
    with RunWriter(folder, slo=hard) as writer:
        judgements = [writer.append(record) for record in synthetic_run.records]
    timeline = cut_timeline(ColumnParts(folder), ("interactive",), start_s=0, length_s=300)
    for reason in MissReason:
        expected = sum(j is not None and j.reasons[:1] == (reason,) for j in judgements)
        found = timeline.misses.get(reason)
        assert (0 if found is None else found.sum()) == expected
    both = (MissReason.TTFT, MissReason.TPOT)
    assert any(j is not None and j.reasons == both for j in judgements)


def _second_counts() -> st.SearchStrategy[SecondCounts]:
    seconds = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=400)
    return seconds.map(
        lambda made: SecondCounts(
            good=[good for good, _ in made], total=[good + missed for good, missed in made]
        )
    )


@given(counts=_second_counts())
def test_the_attainment_so_far_ends_with_that_of_the_window(counts: SecondCounts) -> None:
    so_far = attainment_so_far(counts, confidence=0.95)
    assert len(so_far.end_s) <= 60
    assert so_far.end_s[-1] == len(counts.total)
    total = counts.attainment.total
    assert so_far.share[-1] == (counts.attainment.good / total if total else None)
    for share, lower, upper in zip(so_far.share, so_far.lower, so_far.upper, strict=True):
        if share is None or lower is None or upper is None:
            assert share is lower is upper is None
        else:
            assert 0 <= lower <= share + 1e-12
            assert share - 1e-12 <= upper <= 1


def test_a_curve_of_a_million_values_is_drawn_from_a_few_points() -> None:
    values = np.sort(np.random.default_rng(1).lognormal(3, 1, 1_000_000))
    shares = (np.arange(len(values)) + 1) / len(values)
    curve = Curve(group=0, name="chat", values_ms=values, shares=shares, count=len(values))
    slo = SLOSummary(
        name="chat", ttft_ms=100, tpot_ms=50, tbt_p99_ms=None, e2e_ms=None, objective=None
    )
    figure = latency_figure(MEASURES[0], [curve], {"chat": slo})
    (series,) = figure.series
    assert len(figure.x) == len(series.values) <= 130
    assert [mark.value for mark in figure.marks] == [100]
    assert figure.x[-1] == pytest.approx(6.301, abs=1e-3)
    assert series.values[-1] == pytest.approx(values[-1], rel=1e-5)
    median = figure.x.index(min(figure.x, key=lambda place: abs(place - 0.30103)))
    expected = np.quantile(values, 1 - 10 ** -figure.x[median], method="inverted_cdf")
    assert series.values[median] == pytest.approx(expected, rel=1e-3)


def test_each_curve_ends_at_its_own_maximum() -> None:
    curves = [
        Curve(
            group=group,
            name=f"class-{group}",
            values_ms=np.arange(1, count + 1, dtype=np.float64),
            shares=np.arange(1, count + 1) / count,
            count=count,
        )
        for group, count in enumerate((10, 1000, 0))
    ]
    figure = latency_figure(MEASURES[0], curves, {})
    short, long = ([v for v in series.values if v is not None] for series in figure.series)
    assert short[-1] == 10
    assert long[-1] == 1000
    assert len(short) < len(long)
    assert [one.group for one in figure.series] == [0, 1]

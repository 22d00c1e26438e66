"""Transforms: windows, warps, burst-preserving scales, classes, and their order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.units import NS_PER_S
from goodput_traces.format.schema import TraceRow
from goodput_traces.transforms import (
    TransformPlan,
    Window,
    apply,
    parse_class_rules,
    parse_factor,
    parse_window,
    scale_rate,
    warp_time,
)

SCALES = st.fractions(min_value=Fraction(1, 50), max_value=4, max_denominator=50)


def row(number: int, **changes: Any) -> TraceRow:
    base = TraceRow(
        request_id=f"r{number}",
        timestamp_start_unix_ns=number * NS_PER_S,
        input_tokens=100 + number,
        output_tokens=10,
    )
    return replace(base, **changes)


@st.composite
def session_rows(draw: st.DrawFn) -> list[TraceRow]:
    sessions = draw(st.lists(st.sampled_from(["", "a", "b", "c", "d", "e"]), max_size=40))
    return [
        row(
            at,
            provided_session_id=session or None,
            total_hashes=(1, 2, 10 + at),
            block_size=16,
            parent_request_id=f"r{at - 1}" if at else None,
            prompt="hello",
        )
        for at, session in enumerate(sessions)
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10m..20m", Window(start_ns=600 * NS_PER_S, end_ns=1200 * NS_PER_S)),
        ("90s..", Window(start_ns=90 * NS_PER_S, end_ns=None)),
        ("..1h30m", Window(start_ns=0, end_ns=5400 * NS_PER_S)),
        ("0s..500ms", Window(start_ns=0, end_ns=500_000_000)),
    ],
)
def test_windows_are_written_as_durations(text: str, expected: Window) -> None:
    assert parse_window(text) == expected


@pytest.mark.parametrize("text", ["", "..", "10m", "10..20", "20m..10m", "5s..5s", "a..b", "-1s.."])
def test_wrong_windows_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"write|ends|duration"):
        parse_window(text)


def test_a_window_counts_from_the_first_arrival_and_excludes_its_end() -> None:
    rows = [row(at) for at in range(100, 140)]
    kept = list(apply(rows, TransformPlan(window=parse_window("10s..20s"))))
    assert [r.request_id for r in kept] == [f"r{at}" for at in range(110, 120)]
    assert kept[0] is rows[10]


def test_a_known_first_arrival_needs_no_rows_before_the_window() -> None:
    plan = TransformPlan(window=parse_window("10s..12s"), first_ns=100 * NS_PER_S)
    kept = list(apply([row(at) for at in range(110, 140)], plan))
    assert [r.request_id for r in kept] == ["r110", "r111"]
    assert plan.zero_ns(100 * NS_PER_S) == 110 * NS_PER_S
    assert plan.end_ns(100 * NS_PER_S) == 112 * NS_PER_S


def test_an_empty_trace_stays_empty() -> None:
    assert list(apply([], TransformPlan(window=parse_window("1s.."), speed=Fraction(2)))) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2", Fraction(2)),
        ("0.5", Fraction(1, 2)),
        ("3/2", Fraction(3, 2)),
        *((text, None) for text in ("1e3", "0", "1/0", "-1", "99999", "nan", "")),
    ],
)
def test_factors_are_exact_and_bounded(text: str, expected: Fraction | None) -> None:
    if expected is None:
        with pytest.raises(ValueError, match=r"write, for example|out of bounds"):
            parse_factor(text)
    else:
        assert parse_factor(text) == expected


@given(
    gaps=st.lists(st.integers(0, 10**12), min_size=1, max_size=30),
    speed=st.fractions(min_value=Fraction(1, 100), max_value=100, max_denominator=100),
    start=st.integers(0, 2 * 10**18),
)
def test_a_warp_keeps_order_ties_and_time_zero(
    gaps: list[int], speed: Fraction, start: int
) -> None:
    times, now = [], start
    for gap in gaps:
        times.append(now)
        now += gap
    rows = [row(at, timestamp_start_unix_ns=time) for at, time in enumerate(times)]
    warped = [r.timestamp_start_unix_ns for r in warp_time(rows, speed, zero_ns=start)]
    assert warped[0] == start
    assert warped == sorted(warped)
    for time, after in zip(times, warped, strict=True):
        assert after == start + (Fraction(time - start) / speed).__floor__()


def test_a_warp_starts_at_the_windows_start() -> None:
    plan = TransformPlan(window=parse_window("10s.."), speed=Fraction(2))
    warped = list(apply([row(at) for at in range(0, 30, 5)], plan))
    assert [r.timestamp_start_unix_ns / NS_PER_S for r in warped] == [10, 12.5, 15, 17.5]


@given(rows=session_rows(), low=SCALES, high=SCALES, seed=st.integers(0, 5))
def test_samples_are_nested_across_scales(
    rows: list[TraceRow], low: Fraction, high: Fraction, seed: int
) -> None:
    low, high = sorted((low, high))
    few = {r.request_id for r in scale_rate(rows, low, seed=seed)}
    many = {r.request_id for r in scale_rate(rows, high, seed=seed)}
    assert few <= many


@given(rows=session_rows(), share=st.fractions(min_value=Fraction(1, 50), max_value=1),
       seed=st.integers(0, 5))  # fmt: skip
def test_sessions_kept_below_one_are_the_first_to_be_copied_above(
    rows: list[TraceRow], share: Fraction, seed: int
) -> None:
    chosen = {r.request_id for r in scale_rate(rows, share, seed=seed)}
    scaled = {r.request_id for r in scale_rate(rows, share + 1, seed=seed)}
    assert {name.removesuffix("~1") for name in scaled if name.endswith("~1")} == chosen
    assert {name for name in scaled if "~" not in name} == {r.request_id for r in rows}


@given(rows=session_rows(), scale=SCALES, seed=st.integers(0, 5))
def test_scaling_keeps_complete_sessions_timestamps_and_unique_ids(
    rows: list[TraceRow], scale: Fraction, seed: int
) -> None:
    scaled = list(scale_rate(rows, scale, seed=seed))
    ids = [r.request_id for r in scaled]
    assert len(set(ids)) == len(ids)
    times = {r.request_id: r.timestamp_start_unix_ns for r in rows}
    for r in scaled:
        assert r.timestamp_start_unix_ns == times[r.request_id.partition("~")[0]]
    assert [r.timestamp_start_unix_ns for r in scaled] == sorted(
        r.timestamp_start_unix_ns for r in scaled
    )
    size = Counter(r.session_id for r in rows if r.session_id)
    for session, rows_kept in Counter(r.session_id for r in scaled if r.session_id).items():
        assert rows_kept == size[session.partition("~")[0]]


@given(rows=session_rows(), seed=st.integers(0, 5))
def test_copies_share_prefixes_with_copies_only(rows: list[TraceRow], seed: int) -> None:
    scaled = list(scale_rate(rows, Fraction(3), seed=seed))
    worlds: dict[str, list[TraceRow]] = {}
    for r in scaled:
        worlds.setdefault(r.request_id.partition("~")[2], []).append(r)
    blocks = {name: {h for r in world for h in r.total_hashes} for name, world in worlds.items()}
    for name, world in worlds.items():
        for other in blocks.keys() - {name}:
            assert not blocks[name] & blocks[other]
        assert len(blocks[name]) == len(blocks[""])
        for copy, original in zip(world, rows, strict=True):
            assert len(copy.total_hashes) == len(original.total_hashes)
            assert copy.total_hashes[:2] == world[0].total_hashes[:2]
            assert copy.input_tokens == original.input_tokens
            if name:
                assert copy.prompt is None
                assert copy.parent_request_id in {None, f"{original.parent_request_id}~{name}"}


@pytest.mark.parametrize("scale", ["0.3", "0.5", "1.7", "2.5"])
def test_the_mean_number_of_requests_matches_the_scale_and_bursts_keep_their_shape(
    scale: str,
) -> None:
    rows = [row(at, timestamp_start_unix_ns=at // 50 * NS_PER_S) for at in range(10_000)]
    scaled = list(scale_rate(rows, parse_factor(scale), seed=3))
    assert len(scaled) == pytest.approx(float(scale) * len(rows), rel=0.03)
    per_instant = Counter(r.timestamp_start_unix_ns for r in scaled)
    assert len(per_instant) == 200  # every burst is still there, at its instant


def test_another_seed_selects_other_rows() -> None:
    rows = [row(at) for at in range(200)]
    half = Fraction(1, 2)
    one, other = ({r.request_id for r in scale_rate(rows, half, seed=s)} for s in (1, 2))
    assert one != other
    assert one == {r.request_id for r in scale_rate(rows, half, seed=1)}


def test_a_scale_does_not_depend_on_where_the_window_starts() -> None:
    rows = [row(at) for at in range(200)]
    whole = list(apply(rows, TransformPlan(rate_scale=Fraction(1, 2))))
    part = TransformPlan(rate_scale=Fraction(1, 2), window=parse_window("50s..100s"))
    assert list(apply(rows, part)) == [r for r in whole if 50 <= int(r.request_id[1:]) < 100]


def test_derived_sessions_are_kept_completely_and_copied_by_name() -> None:
    rows = [row(at, poor_man_session_id=7) for at in range(3)]
    copies = [r for r in scale_rate(rows, Fraction(2), seed=0) if "~" in r.request_id]
    assert {r.session_id for r in copies} == {"7~1"}


def test_the_limit_counts_requests_that_are_sent() -> None:
    plan = TransformPlan(rate_scale=Fraction(2), limit=5)
    kept = list(apply([row(at) for at in range(10)], plan))
    assert [r.request_id for r in kept] == ["r0", "r0~1", "r1", "r1~1", "r2"]


@pytest.mark.parametrize(
    ("rules", "changes", "expected"),
    [
        (["batch: input_tokens >= 4000"], {"input_tokens": 4000}, "batch"),
        (["batch: input_tokens >= 4000"], {"input_tokens": 3999}, "mine"),
        (["batch: input_tokens >= 4000", "rest: *"], {"input_tokens": 1}, "rest"),
        (["a: input_tokens > 5 and output_tokens < 20"], {"input_tokens": 6}, "a"),
        (["a: input_tokens > 5 and output_tokens < 10"], {"input_tokens": 6}, "mine"),
        (["a: input_tokens>5 and output_tokens<=10"], {"input_tokens": 6}, "a"),
        (["a: model_name == 'big model'"], {"model_name": "big model"}, "a"),
        (['a: model_name == "x"'], {"model_name": "x"}, "a"),
        (["a: model_name != x"], {"model_name": "y"}, "a"),
        (["a: model_name != x"], {"model_name": None}, "mine"),
        (["a: priority < 0"], {"priority": -1}, "a"),
        (["a: delay_ms >= 0.5"], {"delay_ms": 0.5}, "a"),
        (["a: slo_class == mine"], {}, "a"),
        (["a: *", "b: *"], {}, "a"),
        ([], {}, "mine"),
    ],
    ids=str,
)
def test_the_first_matching_rule_assigns_the_class(
    rules: list[str], changes: dict[str, Any], expected: str
) -> None:
    plan = TransformPlan(class_rules=parse_class_rules(rules))
    (classed,) = apply([row(1, slo_class="mine", **changes)], plan)
    assert classed.slo_class == expected


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        ("batch", "is not a class rule"),
        ("batch:", "is not a class rule"),
        (": *", "is not a class name"),
        ("Batch: *", "is not a class name"),
        ("x" * 64 + ": *", "is not a class name"),
        ("a: input_tokens", "cannot read"),
        ("a: input_tokens >=", "cannot read"),
        ("a: input_tokens = 5", "cannot read"),
        ("a: input_tokens > 5 or turn > 2", "in place of 'or', add a second rule"),
        ("a: input_tokens > 5 and", "cannot read"),
        ("a: input_tokens > 5 and ", "cannot read"),
        ("a: input_tokens > five", "which is not a number"),
        ("a: prompt == x", "column 'prompt' in"),
        ("a: __class__ == x", "column '__class__' in"),
        ("a: input_tokens > __import__('os')", "cannot read"),
        ("a: 5 < input_tokens", "column '5' in"),
    ],
)
def test_wrong_rules_are_rejected(rule: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=r"rule|read|column|name|number") as caught:
        parse_class_rules([rule])
    assert sentence in str(caught.value)


def test_too_many_rules_are_rejected() -> None:
    with pytest.raises(ValueError, match="too many"):
        parse_class_rules(["a: *"] * 101)


def test_transforms_stream() -> None:
    endless = (row(number) for number in count())
    plan = TransformPlan(
        window=parse_window("5s.."),
        rate_scale=Fraction(3, 2),
        class_rules=parse_class_rules(["a: *"]),
        limit=4,
        speed=Fraction(2),
    )
    assert len(list(apply(endless, plan))) == 4

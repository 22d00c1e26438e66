"""Synthetic traces that are like another one: arrivals, lengths, classes, prefixes, sessions."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.builders.imitations import imitate, make_rows, session_relative, write

from goodput_core.units import NS_PER_S
from goodput_traces.errors import TraceError
from goodput_traces.format.reader import open_trace
from goodput_traces.format.schema import Clock, TraceRow
from goodput_traces.importers.run import import_trace
from goodput_traces.sample import sample_path
from goodput_traces.synthesis import prefixes as prefixes_module
from goodput_traces.synthesis.arrivals import find_tick, fit_arrivals
from goodput_traces.synthesis.like import fit_trace
from goodput_traces.synthesis.likeness import compare_traces, measure_trace
from goodput_traces.synthesis.prefixes import PrefixObserver, PromptHistory, shared_blocks
from goodput_traces.synthesis.units import UnitSample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


HOUR_NS = 3600 * NS_PER_S


def poisson(rng: Random) -> list[float]:
    times, now = [0.0], 0.0
    while now < 1800:
        now += rng.expovariate(4)
        times.append(now)
    return times


def on_off(rng: Random) -> list[float]:
    times, now = [0.0], 0.0
    while now < 2400:
        end = now + rng.expovariate(1 / 8)
        while now < end:
            now += rng.expovariate(30)
            times.append(now)
        now += rng.expovariate(1 / 25)
    return times


def half_a_day(rng: Random) -> list[float]:
    times, now = [0.0], 0.0
    while now < 43_200:
        now += rng.expovariate(0.5)
        if rng.random() < 0.55 - 0.45 * math.cos(now / 43_200 * 2 * math.pi):
            times.append(now)
    return times


def ties(rng: Random) -> list[float]:
    """Arrivals in batches every three seconds, a few milliseconds off."""
    times = []
    for batch in range(600):
        time = 3 * batch + rng.choice((-0.001, 0, 0, 0.001)) * (batch > 0)
        times += [time] * rng.randrange(4, 15)
    return times


def whole_seconds(rng: Random) -> list[float]:
    return [math.floor(time) for time in poisson(rng)]


def even(rng: Random) -> list[float]:
    return [at / 5 for at in range(4500)]


def slower(rng: Random) -> list[float]:
    """Gaps that grow from 0.1 to 0.5 s, rounded to milliseconds."""
    times, now = [], 0.0
    while now < 1800:
        times.append(round(now, 3))
        now += 0.1 + 0.4 * now / 1800
    return times


@pytest.mark.parametrize(
    ("process", "tolerances"),
    [
        (poisson, {"rate_per_s": 0.03, "gap_cv": 0.05, "dispersion_1s": 0.08,
                   "dispersion_10s": 0.25}),
        (on_off, {"rate_per_s": 0.1, "dispersion_1s": 0.2, "dispersion_10s": 0.4,
                  "dispersion_60s": 0.6, "peak_minute_per_s": 0.4}),
        (half_a_day, {"rate_per_s": 0.03, "dispersion_1s": 0.05, "dispersion_60s": 0.1,
                      "dispersion_600s": 0.1, "peak_minute_per_s": 0.2}),
        (ties, {"rate_per_s": 0.03, "tied_share": 0.01, "gap_cv": 0.05, "dispersion_1s": 0.1}),
        (whole_seconds, {"rate_per_s": 0.03, "tied_share": 0.02, "gap_cv": 0.05,
                         "dispersion_1s": 0.08}),
        (even, {"rate_per_s": 0.01, "peak_minute_per_s": 0.1}),
        (slower, {"rate_per_s": 0.03, "peak_minute_per_s": 0.1, "gap_cv": 0.1}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_arrivals_are_like_those_of_an_invented_process(
    process: Callable[[Random], list[float]], tolerances: dict[str, float], tmp_path: Path
) -> None:
    times = sorted(process(Random(7)))
    source = write(tmp_path / "source.parquet", list(make_rows(times)))
    duration_ns = source.last_ns - source.first_ns + 1
    expected = measure_trace(source, duration_ns)
    model = fit_trace(source)
    seen = defaultdict(list)
    for seed in range(3):
        rows = model.rows(seed=seed, duration_ns=duration_ns)
        result = write(tmp_path / f"{seed}.parquet", rows)
        for name, value in measure_trace(result, duration_ns).items():
            seen[name].append(value)
    for name, tolerance in tolerances.items():
        found = float(np.mean(seen[f"arrivals.{name}"]))
        assert found == pytest.approx(expected[f"arrivals.{name}"], rel=tolerance), name
    if process is even:
        assert np.mean(seen["arrivals.dispersion_10s"]) < 0.1
        assert np.mean(seen["arrivals.gap_cv"]) < 0.01


@pytest.mark.parametrize("factor", [0.25, 4])
def test_a_burst_keeps_its_share_of_another_rate(factor: float, tmp_path: Path) -> None:
    source = write(tmp_path / "source.parquet", list(make_rows(on_off(Random(3)))))
    duration_ns = source.last_ns - source.first_ns + 1
    rate = factor * source.num_rows / (duration_ns / NS_PER_S)
    result = imitate(source, rate=rate)
    features = {
        feature.name: feature
        for feature in compare_traces(source, result, duration_ns, rate_per_s=rate)
    }
    for name in ("rate_per_s", "dispersion_1s", "dispersion_10s"):
        feature = features[f"arrivals.{name}"]
        assert feature.source is not None
        assert feature.result is not None
        assert feature.expected != feature.source
        assert feature.result == pytest.approx(feature.expected, rel=0.35), name
    # Thinning a process keeps the excess of its dispersion in proportion to the rate.
    index = features["arrivals.dispersion_1s"]
    assert index.expected == pytest.approx(1 + factor * ((index.source or 0) - 1))


def test_the_curve_is_cut_and_repeated(tmp_path: Path) -> None:
    times = [*range(0, 100, 1), *(100 + at / 20 for at in range(2000))]  # 1/s, then 20/s
    source = write(tmp_path / "source.parquet", list(make_rows([float(time) for time in times])))
    first_half = imitate(source, duration_ns=90 * NS_PER_S)
    assert first_half.num_rows == pytest.approx(90, abs=30)
    twice = imitate(source, duration_ns=395 * NS_PER_S)
    per_part = Counter(row.timestamp_start_unix_ns // (100 * NS_PER_S) for row in twice.rows())
    assert per_part[0] == pytest.approx(100, rel=0.4)
    assert per_part[1] == pytest.approx(2000, rel=0.15)
    assert per_part[2] < 500
    assert per_part[3] > 1500


def test_lengths_are_drawn_together_within_their_class(tmp_path: Path) -> None:
    def two_classes() -> Iterator[TraceRow]:
        rng = Random(5)
        for at in range(6000):
            rare = rng.random() < 0.005
            prompt = rng.randrange(20_000, 30_000) if rare else rng.randrange(10, 1000)
            yield TraceRow(
                request_id=str(at),
                timestamp_start_unix_ns=at * 300_000_000,
                input_tokens=prompt,
                output_tokens=1 if rare else prompt // 2 + 1,
                slo_class="batch: nightly" if rare else "chat",
                ttft_target_ms=30_000.0 if rare else None,
            )

    source = write(tmp_path / "source.parquet", two_classes())
    result = imitate(source)
    rare = [row for row in result.rows() if row.slo_class == "batch: nightly"]
    assert len(rare) == pytest.approx(30, abs=15)
    for row in rare:
        assert 20_000 <= row.input_tokens < 30_000
        assert (row.output_tokens, row.ttft_target_ms) == (1, 30_000.0)
    assert all(
        row.output_tokens == row.input_tokens // 2 + 1
        for row in result.rows()
        if row.slo_class == "chat"
    )
    found = measure_trace(result, 1800 * NS_PER_S)
    assert found["class.batch: nightly.share"] == pytest.approx(len(rare) / result.num_rows)
    assert found["lengths.rank_correlation"] > 0.9


def test_the_mix_of_classes_follows_the_time(tmp_path: Path) -> None:
    rows = [
        TraceRow(
            request_id=str(at),
            timestamp_start_unix_ns=at * NS_PER_S // 2,
            input_tokens=10,
            output_tokens=1,
            slo_class="day" if at < 4000 else "night",
        )
        for at in range(8000)
    ]
    result = list(imitate(write(tmp_path / "source.parquet", rows)).rows())
    for row in result:
        if abs(row.timestamp_start_unix_ns - 2000 * NS_PER_S) > 100 * NS_PER_S:
            is_day = row.timestamp_start_unix_ns < 2000 * NS_PER_S
            assert row.slo_class == ("day" if is_day else "night")


def test_equal_seeds_give_equal_rows_and_other_seeds_others() -> None:
    model = fit_trace(open_trace(sample_path()))
    first, again, other = (
        list(model.rows(seed=seed, duration_ns=60 * NS_PER_S)) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_sessions_keep_requests_and_think_times(tmp_path: Path) -> None:
    source = open_trace(sample_path())
    result = imitate(write(tmp_path / "source.parquet", source.rows()), rate=40)
    sessions: dict[str, list[TraceRow]] = defaultdict(list)
    for row in result.rows():
        if row.session_id is not None:
            sessions[row.session_id].append(row)
    source_gaps = set()
    last: dict[str, int] = {}
    for row in source.rows():
        if row.session_id is not None:
            now_ns = row.timestamp_start_unix_ns
            source_gaps.add(now_ns - last.get(row.session_id, now_ns))
            last[row.session_id] = now_ns
    many = [turns for turns in sessions.values() if len(turns) > 1]
    assert len(many) > 50
    for turns in many:
        for before, after in pairwise(turns):
            gap_ns = after.timestamp_start_unix_ns - before.timestamp_start_unix_ns
            assert gap_ns in source_gaps
            assert (after.turn or 0) == (before.turn or 0) + 1
            assert after.parent_request_id == before.request_id
            assert after.total_hashes[: len(before.total_hashes)] == before.total_hashes
    singles = [row for row in result.rows() if row.session_id is None]
    assert {row.slo_class for row in singles} == {"batch"}


def test_nothing_that_identifies_a_request_is_copied(tmp_path: Path) -> None:
    rows = [
        TraceRow(
            request_id=f"secret-{at}",
            timestamp_start_unix_ns=at * NS_PER_S,
            input_tokens=64,
            output_tokens=2,
            prompt="secret prompt",
            output_text="secret output",
            org_id="secret org",
            provided_session_id=f"secret-session-{at // 3}",
            parent_request_id=f"secret-{at - 1}" if at % 3 else None,
            total_hashes=(987_654_321_000 + at // 3,),
            block_size=64,
            duration_ttft_ms=5,
            duration_e2e_ms=50,
            model_name="m",
        )
        for at in range(300)
    ]
    source = write(tmp_path / "source.parquet", rows, source="secret file", licence="CC0")
    result = imitate(source)
    for row in result.rows():
        assert "secret" not in repr(row)
        assert (row.duration_ttft_ms, row.duration_e2e_ms) == (None, None)
        assert row.model_name == "m"
        assert max(row.total_hashes) < 1_000_000
    assert "secret" not in result.metadata.source
    assert result.metadata.licence == "CC0"


def test_system_prompts_are_shared_with_their_popularity(tmp_path: Path) -> None:
    def rows() -> Iterator[TraceRow]:
        rng = Random(2)
        fresh = 100
        for at in range(3000):
            system = 0 if rng.random() < 0.7 else 1
            own = rng.randrange(1, 6)
            hashes = (*range(system * 10, system * 10 + 4), *range(fresh, fresh + own))
            fresh += own
            yield TraceRow(
                request_id=str(at),
                timestamp_start_unix_ns=at * 200_000_000,
                input_tokens=16 * len(hashes),
                output_tokens=3,
                total_hashes=hashes,
                block_size=16,
            )

    source = write(tmp_path / "source.parquet", rows())
    result = imitate(source)
    features = {
        feature.name: (feature.source, feature.result)
        for feature in compare_traces(source, result, 600 * NS_PER_S)
    }
    for name in ("prefixes.reused", "prefixes.reused_within_1m"):
        before, after = features[name]
        assert after == pytest.approx(before, rel=0.03), name
    roots = Counter(row.total_hashes[0] for row in result.rows())
    (_, first), (_, second) = roots.most_common(2)
    assert first + second > 0.95 * result.num_rows
    assert second > 0.05 * result.num_rows


def test_blocks_of_a_session_continue_an_earlier_turn(tmp_path: Path) -> None:
    """Two agents of a session alternate: each turn continues the one before the last."""
    rows = []
    for session in range(40):
        blocks: dict[int, tuple[int, ...]] = {
            agent: (session * 1000 + agent * 500,) for agent in range(2)
        }
        for turn in range(10):
            agent = turn % 2
            blocks[agent] = (*blocks[agent], session * 1000 + agent * 500 + turn + 1)
            rows.append(
                TraceRow(
                    request_id=f"{session}/{turn}",
                    timestamp_start_unix_ns=(session * 7 + turn * 3) * NS_PER_S,
                    input_tokens=16 * len(blocks[agent]),
                    output_tokens=1,
                    total_hashes=blocks[agent],
                    block_size=16,
                    provided_session_id=str(session),
                    turn=turn,
                )
            )
    rows.sort(key=lambda row: row.timestamp_start_unix_ns)
    result = imitate(write(tmp_path / "source.parquet", rows), duration_ns=400 * NS_PER_S)
    sessions = defaultdict(list)
    for row in result.rows():
        sessions[row.session_id].append(row)
    checked = 0
    for turns in sessions.values():
        for earlier, later in zip(turns, turns[2:], strict=False):
            shared = shared_blocks(earlier.total_hashes, later.total_hashes)
            assert shared == len(earlier.total_hashes)
            checked += 1
    assert checked > 50


def test_sessions_without_a_common_clock_start_at_random(tmp_path: Path) -> None:
    source = session_relative(tmp_path)
    result = imitate(source, duration_ns=HOUR_NS, rate=3)
    assert result.metadata.clock is Clock.TRACE_RELATIVE
    assert result.num_rows == pytest.approx(3 * 3600, rel=0.1)
    # Sessions that started before the trace are in it, so the rate does not rise at its start.
    minutes = Counter(row.timestamp_start_unix_ns // (60 * NS_PER_S) for row in result.rows())
    assert minutes[0] == pytest.approx(180, rel=0.4)
    features = compare_traces(source, result, HOUR_NS, rate_per_s=3)
    named = {feature.name: feature for feature in features}
    assert named["arrivals.rate_per_s"].source is None
    assert named["sessions.gap_p50_s"].result == 20


@given(data=st.data())
@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_trace_can_be_imitated(data: st.DataObject, tmp_path: Path) -> None:
    times = sorted(data.draw(st.lists(st.integers(0, 10**13), min_size=2, max_size=40)))
    if times[0] == times[-1]:
        times[-1] += 1
    rows = [
        TraceRow(
            request_id=str(at),
            timestamp_start_unix_ns=time,
            input_tokens=data.draw(st.integers(1, 10_000)),
            output_tokens=data.draw(st.integers(1, 100)),
            provided_session_id=data.draw(st.none() | st.sampled_from("ab")),
            total_hashes=tuple(data.draw(st.lists(st.integers(0, 9), unique=True, max_size=4))),
            block_size=16,
        )
        for at, time in enumerate(times)
    ]
    path = tmp_path / "source.parquet"
    path.unlink(missing_ok=True)
    source = write(path, rows)
    model = fit_trace(source)
    duration_ns = data.draw(st.integers(NS_PER_S, 2 * 10**13))
    rate = 100 / (duration_ns / NS_PER_S)
    drawn = list(
        model.rows(seed=data.draw(st.integers()), duration_ns=duration_ns, rate_per_s=rate)
    )
    arrivals = [row.timestamp_start_unix_ns for row in drawn]
    assert arrivals == sorted(arrivals)
    assert all(0 <= arrival < duration_ns for arrival in arrivals)
    assert len({row.request_id for row in drawn}) == len(drawn)
    lengths = {(row.input_tokens, row.output_tokens, len(row.total_hashes)) for row in rows}
    for row in drawn:
        assert (row.input_tokens, row.output_tokens, len(row.total_hashes)) in lengths
        assert len(set(row.total_hashes)) == len(row.total_hashes)


def test_requests_that_all_arrive_at_once_are_rejected(tmp_path: Path) -> None:
    source = write(tmp_path / "source.parquet", list(make_rows([5.0, 5.0, 5.0])))
    with pytest.raises(TraceError, match="all requests arrive at the same time"):
        fit_trace(source)


def test_one_session_for_all_requests_is_imitated(tmp_path: Path) -> None:
    rows = list(make_rows(poisson(Random(1))[:5000], provided_session_id=lambda rng: "default"))
    result = imitate(write(tmp_path / "source.parquet", rows))
    assert result.num_rows > 0


def test_a_sample_of_units_is_complete_sessions_in_any_order() -> None:
    rows = [
        TraceRow(
            request_id=f"{session}/{turn}",
            timestamp_start_unix_ns=turn * NS_PER_S + session,
            input_tokens=1,
            output_tokens=1,
            provided_session_id=None if session % 2 else str(session),
        )
        for turn in range(5)
        for session in range(400)
    ]
    all_units = UnitSample()
    some = UnitSample(max_turns=300)
    for row in rows:
        for sample in (all_units, some):
            sample.add(row, prefixes_module.PrefixLink())
    assert (all_units.share, len(all_units.units)) == (1.0, 200 + 1000)
    assert some.share in {0.5, 0.25, 0.125}
    assert sum(len(unit.turns) for unit in some.units) <= 300
    assert {len(unit.turns) for unit in some.units if unit.is_session} == {5}
    assert len(some.units) / some.share == pytest.approx(1200, rel=0.3)


def test_arrivals_fitted_on_a_share_have_the_rate_and_bursts_of_all() -> None:
    times = np.array(sorted(on_off(Random(4)))) * NS_PER_S
    span_ns = int(times[-1])
    rng = Random(8)
    some = np.array([time for time in times.astype(np.int64) if rng.random() < 0.25])
    whole = fit_arrivals(times.astype(np.int64), span_ns, 1, 1.0)
    share = fit_arrivals(some, span_ns, 1, 0.25)

    def second_counts(model: Any) -> np.ndarray[Any, Any]:
        drawn = [arrival for arrival, _ in model.draw(Random(2), span_ns, 1.0)]
        return np.bincount(np.array(drawn) // NS_PER_S, minlength=2400)

    first, second = second_counts(whole), second_counts(share)
    assert second.mean() == pytest.approx(first.mean(), rel=0.1)
    assert second.var() / second.mean() == pytest.approx(first.var() / first.mean(), rel=0.25)


@pytest.mark.parametrize("factor", [0.3, 1, 7])
@pytest.mark.parametrize("gap_ms", [3, 143, 2000])
def test_a_constant_rate_stays_constant_at_any_rate(factor: float, gap_ms: int) -> None:
    times = np.arange(500, dtype=np.int64) * gap_ms * 10**6
    model = fit_arrivals(times, int(times[-1]), 1, 1.0)
    drawn = [at for at, _ in model.draw(Random(3), int(times[-1]), factor)]
    gaps = np.diff(drawn)
    assert gaps.mean() == pytest.approx(gap_ms * 1e6 / factor, rel=0.03)
    assert gaps.std() / gaps.mean() < 0.02
    assert drawn == sorted(drawn)


@pytest.mark.parametrize(
    "process", [poisson, on_off, ties, whole_seconds], ids=lambda process: process.__name__
)
def test_other_sources_are_not_taken_for_constant_rates(
    process: Callable[[Random], list[float]],
) -> None:
    times = np.array([round(at * NS_PER_S) for at in sorted(process(Random(5)))])
    assert not fit_arrivals(times - times[0], int(times[-1] - times[0]), 1, 1.0).regular


@pytest.mark.parametrize(
    ("times", "resolution_ns", "expected_ns"),
    [
        (range(0, 10**12, 10**9), 1, 1_000),  # no ties: the stated resolution is kept
        (sorted([*range(0, 10**12, 3 * 10**9)] * 3), 10**6, 3 * 10**9),
        (sorted([*range(0, 10**12, 10**9)] * 2), 10**9, 10**9),
        ([0] * 50, 1, 1_000),
        (sorted([at * at * 10**6 for at in range(100)] * 3), 10**6, 10**6),
    ],
    ids=["no ties", "three seconds", "stated", "one instant", "uneven"],
)
def test_the_tick_of_a_source_is_found(
    times: Sequence[int], resolution_ns: int, expected_ns: int
) -> None:
    assert find_tick(np.array(times, dtype=np.int64), resolution_ns) == expected_ns


def test_links_name_the_latest_row_with_the_blocks() -> None:
    observer = PrefixObserver()

    def observe(at_s: int, *hashes: int) -> tuple[int, int]:
        row = TraceRow(
            request_id="x",
            timestamp_start_unix_ns=at_s * NS_PER_S,
            input_tokens=64,
            output_tokens=1,
            total_hashes=hashes,
            block_size=16,
        )
        link = observer.observe(row)
        return link.blocks, link.lag_ns // NS_PER_S

    assert observe(0, 1, 2, 3) == (0, 0)
    assert observe(5, 1, 2, 4) == (2, 5)
    assert observe(7, 1, 2, 3, 9) == (3, 7)
    assert observe(8, 1) == (1, 1)
    assert observe(9) == (0, 0)
    assert observe(9, 5, 6) == (0, 0)


def test_old_blocks_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes_module, "_MAX_OBSERVED", 10)
    observer = PrefixObserver()
    found = []
    for at in range(30):
        hashes = (0, 1, 2) if at in {0, 1, 29} else tuple(range(at * 10, at * 10 + 4))
        row = TraceRow(
            request_id="x",
            timestamp_start_unix_ns=at,
            input_tokens=64,
            output_tokens=1,
            total_hashes=hashes,
            block_size=16,
        )
        found.append(observer.observe(row).blocks)
    assert (found[1], found[29]) == (3, 0)


def test_a_history_is_bounded_and_prefers_prompts_that_were_not_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    history = PromptHistory()
    first = history.add(0, (), 4)
    assert history.find_prefix(0, 3) == first.blocks[:3]
    second = history.add(10, first.blocks[:3], 5)
    # The first three blocks were repeated at 10, so the row at 0 is not the latest with them.
    assert history.find_prefix(0, 3) == second.blocks[:3]
    assert history.find_prefix(0, 4) == first.blocks
    assert history.find_prefix(0, 9) == second.blocks  # the longest
    monkeypatch.setattr(prefixes_module, "_MAX_ROWS", 3)
    for at in range(20, 100, 10):
        history.add(at, (), 2)
    assert len(history._prompts) - history._first <= 3
    assert len(history._prompts) <= 8
    assert len(history.find_prefix(0, 5)) == 2


@pytest.mark.parametrize(
    ("name", "source", "tolerance"),
    [
        ("azure", "azure_llm_2023/AzureLLMInferenceTrace_conv.csv.gz", 0.2),
        ("mooncake", "mooncake_fast25/conversation_trace.jsonl.gz", 0.4),
    ],
)
def test_published_traces_are_imitated(
    name: str, source: str, tolerance: float, real_traces: Path, tmp_path: Path
) -> None:
    path = tmp_path / "source.parquet"
    import_trace((real_traces / source,), path)
    trace = open_trace(path)
    duration_ns = trace.last_ns - trace.first_ns + 1
    features = compare_traces(trace, imitate(trace, seed=3), duration_ns)
    assert len(features) > 12
    for feature in features:
        assert feature.result == pytest.approx(feature.source, rel=tolerance, abs=0.02), feature
    if name == "mooncake":
        reuse = next(one for one in features if one.name == "prefixes.reused")
        assert reuse.result == pytest.approx(0.366, abs=0.02)

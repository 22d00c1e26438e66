"""Request plans: schedule, classes, totals, and rejected traces."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
from tests.builders.traces import trace_row

from goodput_core.errors import InputError
from goodput_core.slo.targets import SLOClass
from goodput_core.units import NS_PER_S
from goodput_replay.plan import RequestPlan, survey
from goodput_replay.runs.slo import SLOClasses
from goodput_traces.format.reader import open_trace
from goodput_traces.format.schema import Clock, TraceRow
from goodput_traces.transforms import (
    TransformPlan,
    parse_class_rules,
    parse_session_arrivals,
    parse_window,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.replay.sending.builders import WriteTrace


SLO = SLOClasses(
    classes=(
        SLOClass(name="fast", ttft_ms=500, tpot_ms=50),
        SLOClass(name="slow", ttft_ms=5000, tpot_ms=50),
    ),
    default="fast",
)
EPOCH_NS = 1_700_000_000 * NS_PER_S


def row(number: int, at_s: float, **changes: Any) -> TraceRow:
    at_ns = EPOCH_NS + int(at_s * NS_PER_S)
    least: dict[str, Any] = {
        "timestamp_start_unix_ns": at_ns,
        "input_tokens": 10,
        "output_tokens": 5,
    }
    return trace_row(number, **(least | changes))


def plan_of(
    path: Path, slo: SLOClasses = SLO, warmup: int = 0, **transforms: object
) -> RequestPlan:
    trace = open_trace(path)
    values = {"first_ns": trace.first_ns, **transforms}
    plan = TransformPlan(**values)  # type: ignore[arg-type]  # any field may change
    return RequestPlan(trace=trace, transforms=plan, slo=slo, warmup=warmup)


def times(plan: RequestPlan) -> list[float]:
    return [request.scheduled_ns / NS_PER_S for request in plan.requests()]


def test_requests_are_scheduled_from_the_first_arrival(trace_of: WriteTrace) -> None:
    path = trace_of([row(0, 5), row(1, 5.25), row(2, 9)], clock=Clock.ABSOLUTE)
    assert times(plan_of(path)) == [0, 0.25, 4]


def test_the_zero_of_a_replay_is_the_start_of_its_window(trace_of: WriteTrace) -> None:
    path = trace_of([row(i, i) for i in range(10)])
    plan = plan_of(path, window=parse_window("2500ms..6s"))
    assert times(plan) == [0.5, 1.5, 2.5]
    assert plan.window_ns(survey(plan)) == 3.5 * NS_PER_S


def test_a_time_warp_shortens_the_window_as_well(trace_of: WriteTrace) -> None:
    path = trace_of([row(i, i) for i in range(10)])
    plan = plan_of(path, window=parse_window("2s..6s"), speed=Fraction(2))
    assert times(plan) == [0, 0.5, 1, 1.5]
    assert plan.window_ns(survey(plan)) == 2 * NS_PER_S


def test_a_plan_yields_the_same_requests_every_time(trace_of: WriteTrace) -> None:
    path = trace_of([row(i, i / 3) for i in range(50)])
    plan = plan_of(path, rate_scale=Fraction("1.5"), seed=3)
    assert list(plan.requests()) == list(plan.requests())


def test_the_survey_counts_the_requests_of_the_plan(trace_of: WriteTrace) -> None:
    at = [0, 3.1, 3.2, 3.9, 4.0, 4.09, 4.2, 9]
    rows = [row(i, t, slo_class="slow" if i % 2 else None) for i, t in enumerate(at)]
    stats = survey(plan_of(trace_of(rows), warmup=2))
    assert (stats.rows, stats.warmup_rows) == (8, 2)
    assert stats.first_judged_ns == int(3.2 * NS_PER_S)
    assert (stats.peak_1s, stats.peak_at_ns) == (5, int(3.1 * NS_PER_S))
    assert (stats.input_tokens, stats.output_tokens) == (80, 40)
    assert stats.classes == {"fast": 4, "slow": 4}
    assert stats.last_ns == 9 * NS_PER_S


def test_the_first_rows_are_warm_up(trace_of: WriteTrace) -> None:
    plan = plan_of(trace_of([row(i, i) for i in range(4)]), warmup=2)
    assert [request.warmup for request in plan.requests()] == [True, True, False, False]


def test_a_class_that_is_not_in_the_slo_is_rejected_by_name(trace_of: WriteTrace) -> None:
    path = trace_of([row(0, 0), row(1, 1, slo_class="gold")])
    with pytest.raises(
        InputError, match=r"request 'row-1' has the class 'gold', which is not among .*fast, slow"
    ):
        survey(plan_of(path))


def test_class_rules_assign_classes(trace_of: WriteTrace) -> None:
    path = trace_of([row(0, 0), row(1, 1, input_tokens=9000, slo_class="gold")])
    plan = plan_of(path, class_rules=parse_class_rules(["slow: input_tokens > 4000"]))
    assert [request.slo_class for request in plan.requests()] == ["fast", "slow"]


def test_without_an_slo_a_class_is_a_label(trace_of: WriteTrace) -> None:
    path = trace_of([row(0, 0), row(1, 1, slo_class="gold")])
    plan = plan_of(path, slo=SLOClasses())
    assert [request.slo_class for request in plan.requests()] == ["", "gold"]


def sessions(count: int, turns: int = 3) -> list[TraceRow]:
    """Return sessions of a few turns, ten seconds apart, each on its own clock."""
    return [
        row(
            session * turns + turn,
            0,
            timestamp_start_unix_ns=turn * 10 * NS_PER_S,
            provided_session_id=f"s{session:04}",
        )
        for session in range(count)
        for turn in range(turns)
    ]


def test_a_trace_of_sessions_needs_a_process_of_their_starts(trace_of: WriteTrace) -> None:
    path = trace_of(sessions(2), clock=Clock.SESSION_RELATIVE)
    with pytest.raises(InputError, match=r"such as --session-arrivals poisson:0\.2/s"):
        survey(plan_of(path))


def test_a_trace_with_one_clock_keeps_its_recorded_starts(trace_of: WriteTrace) -> None:
    path = trace_of([row(0, 0), row(1, 1)])
    with pytest.raises(InputError, match="remove --session-arrivals"):
        survey(plan_of(path, session_arrivals=parse_session_arrivals("poisson:1/s")))


def test_sessions_start_at_random_and_keep_their_times_inside(trace_of: WriteTrace) -> None:
    path = trace_of(sessions(200), clock=Clock.SESSION_RELATIVE)
    arrivals = parse_session_arrivals("poisson:0.5/s")
    planned = list(plan_of(path, session_arrivals=arrivals).requests())
    assert len(planned) == 600
    at = [request.scheduled_ns for request in planned]
    assert at == sorted(at)
    by_id = {request.request_id: request.scheduled_ns for request in planned}
    starts = [by_id[trace_row(3 * session).request_id] for session in range(200)]
    for session, start in enumerate(starts):
        turns = [by_id[trace_row(3 * session + turn).request_id] for turn in range(3)]
        assert [turn - start for turn in turns] == [0, 10 * NS_PER_S, 20 * NS_PER_S]
    assert starts == sorted(starts)
    assert starts[-1] / NS_PER_S == pytest.approx(400, rel=0.3)
    again = list(plan_of(path, session_arrivals=arrivals).requests())
    other = list(plan_of(path, session_arrivals=arrivals, seed=1).requests())
    assert again == planned
    assert other != planned


def test_a_window_of_sessions_counts_from_time_zero(trace_of: WriteTrace) -> None:
    path = trace_of(sessions(200), clock=Clock.SESSION_RELATIVE)
    arrivals = parse_session_arrivals("poisson:30/min")
    whole = times(plan_of(path, session_arrivals=arrivals))
    plan = plan_of(path, session_arrivals=arrivals, window=parse_window("60s..120s"))
    assert times(plan) == pytest.approx([at - 60 for at in whole if 60 <= at < 120])
    assert plan.window_ns(survey(plan)) == 60 * NS_PER_S


@pytest.mark.parametrize("text", ["", "poisson", "poisson:0/s", "poisson:-1/s", "gamma:1/s", "1/s"])
def test_a_process_of_session_starts_has_a_rate(text: str) -> None:
    with pytest.raises(ValueError, match="is not a process of session starts"):
        parse_session_arrivals(text)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"window": parse_window("1h..2h")},
            "no row is left to send: the trace spans .*; the window 3600s..7200s has no request",
        ),
        ({"warmup": 3}, "--warmup 3 excludes all 3 requests"),
    ],
    ids=["window beyond the trace", "all rows are warm-up"],
)
def test_a_plan_without_a_judged_request_is_rejected(
    trace_of: WriteTrace, changes: dict[str, object], sentence: str
) -> None:
    path = trace_of([row(i, i) for i in range(3)])
    with pytest.raises(InputError, match=sentence):
        survey(plan_of(path, **changes))  # type: ignore[arg-type]  # any option may change


def test_a_plan_of_more_than_a_year_is_rejected(trace_of: WriteTrace) -> None:
    path = trace_of([row(0, 0), row(1, 400 * 86_400)])
    with pytest.raises(InputError, match="a run lasts at most a year; choose a part with --window"):
        survey(plan_of(path))
    assert survey(plan_of(path, window=parse_window("..1h"))).rows == 1


def test_an_invalid_row_is_found_by_the_survey(trace_of: WriteTrace, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = trace_of([row(i, i) for i in range(3)])
    table = pq.read_table(path)
    index = table.schema.get_field_index("input_tokens")
    broken = table.set_column(index, table.schema.field(index), pa.array([10, 0, 10], pa.int64()))
    pq.write_table(broken, tmp_path / "broken.parquet")
    with pytest.raises(InputError, match=r"row 2, column input_tokens"):
        survey(plan_of(tmp_path / "broken.parquet"))


def test_two_requests_with_one_id_are_rejected_by_the_survey(trace_of: WriteTrace) -> None:
    path = trace_of([row(0, 0), row(1, 1), row(2, 2), row(1, 3)])
    with pytest.raises(InputError, match=r"request_id: 'row-1' is used by requests 2 and 4"):
        survey(plan_of(path))
    assert survey(plan_of(path, limit=3)).rows == 3, "rows outside the plan are ignored"

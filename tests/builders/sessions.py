"""Plans with sessions, without trace files of their own."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.builders.traces import trace_row, write_rows

from goodput_core.units import NS_PER_MS
from goodput_replay.plan import RequestPlan
from goodput_replay.runs.slo import SLOClasses
from goodput_replay.sessions import open_follow_ups
from goodput_traces.format.reader import open_trace
from goodput_traces.format.schema import Clock
from goodput_traces.transforms import TransformPlan

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from goodput_replay.sessions import FollowUps
    from goodput_traces.format.schema import TraceRow

__all__ = ["follow_ups_of", "plan_of_rows", "session_row"]


def session_row(number: int, at_ms: float, session: str | None = "s", **fields: Any) -> TraceRow:
    """Make a row of a session that arrives after some milliseconds."""
    at_ns = round(at_ms * NS_PER_MS)
    return trace_row(number, timestamp_start_unix_ns=at_ns, provided_session_id=session, **fields)


def plan_of_rows(
    folder: Path,
    rows: Iterable[TraceRow],
    *,
    clock: Clock = Clock.TRACE_RELATIVE,
    warmup: int = 0,
    slo: SLOClasses | None = None,
    **transforms: Any,
) -> RequestPlan:
    """Write the rows into a trace, and return its plan."""
    trace = open_trace(write_rows(folder / "trace.parquet", rows, clock))
    return RequestPlan(
        trace=trace,
        transforms=TransformPlan(first_ns=trace.first_ns, **transforms),
        slo=slo or SLOClasses(),
        warmup=warmup,
    )


@contextmanager
def follow_ups_of(folder: Path, rows: Iterable[TraceRow], **plan: Any) -> Iterator[FollowUps]:
    """Open the follow-ups of the rows, in the plan that the keywords describe."""
    with open_follow_ups(plan_of_rows(folder, rows, **plan)) as follow_ups:
        yield follow_ups

"""What a trace looks like: one streaming pass, bounded memory.

How it is shown is the business of `describe_view`. Lengths have exact quantiles, because they
are small whole numbers that can be counted; distinct sessions and blocks are exact up to two
million and estimated beyond, and say so.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from goodput_traces.describe_counts import (
    ArrivalCounts,
    LengthCounts,
    PrefixCounts,
    SessionCounts,
    integers,
)
from goodput_traces.description import TraceDescription
from goodput_traces.schema import Clock

if TYPE_CHECKING:
    from goodput_traces.reader import Trace

__all__ = ["describe"]

_MAX_CLASSES: Final = 1000
_COLUMNS: Final = (
    "input_tokens",
    "output_tokens",
    "total_hashes",
    "provided_session_id",
    "poor_man_session_id",
    "slo_class",
)


def describe(trace: Trace) -> TraceDescription:
    """Read a trace once and describe it.

    Raises:
        TraceError: a row breaks a rule, or the file is damaged.
    """
    prompt, answer = LengthCounts(), LengthCounts()
    arrivals = None if trace.metadata.clock is Clock.SESSION_RELATIVE else ArrivalCounts(trace)
    sessions, prefixes = SessionCounts(), PrefixCounts()
    classes: Counter[str] = Counter()
    rows = 0
    for columns, times in trace.batches(only=_COLUMNS):
        rows += len(times)
        prompt.add(integers(columns["input_tokens"]))
        answer.add(np.maximum(integers(columns["output_tokens"]), 1))
        sessions.add(columns)
        prefixes.add(columns)
        _count_classes(classes, columns, len(times))
        if arrivals is not None:
            arrivals.add(times)
    return TraceDescription(
        rows=rows,
        metadata=trace.metadata,
        floored_output_rows=trace.floored_output_rows,
        arrivals=None if arrivals is None else arrivals.summary(),
        prompt=prompt.summary(),
        answer=answer.summary(),
        sessions=sessions.distinct.count,
        session_rows=sessions.rows,
        sessions_exact=sessions.distinct.exact,
        prefixes=prefixes.summary(),
        classes=tuple(classes.most_common()),
    )


def _count_classes(classes: Counter[str], columns: dict[str, Any], rows: int) -> None:
    column = columns.get("slo_class")
    if column is None:
        classes[""] += rows
        return
    for entry in column.value_counts().to_pylist():
        name = entry["values"] or ""
        if name not in classes and len(classes) >= _MAX_CLASSES:
            name = "(others)"
        classes[name] += entry["counts"]

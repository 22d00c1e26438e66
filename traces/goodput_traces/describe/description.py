"""Describe a trace in one streaming pass with bounded memory.

Quantiles of lengths are exact, because the rows of each length are counted. Numbers of distinct
sessions and blocks are exact up to two million; larger numbers are marked as estimates.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from goodput_traces.describe.counters import (
    ArrivalCounts,
    Arrivals,
    LengthCounts,
    LengthSummary,
    PrefixCounts,
    PrefixReuse,
    SessionCounts,
    integers,
)
from goodput_traces.format.schema import Clock, TraceMetadata

if TYPE_CHECKING:
    from goodput_traces.format.reader import Trace

__all__ = ["TraceDescription", "describe"]

_MAX_CLASSES: Final = 1000
_COLUMNS: Final = (
    "input_tokens",
    "output_tokens",
    "total_hashes",
    "provided_session_id",
    "poor_man_session_id",
    "slo_class",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceDescription:
    """The figures that `goodput trace describe` shows.

    Args:
        rows: number of requests.
        metadata: the file's metadata.
        floored_output_rows: rows whose zero output tokens became 1.
        arrivals: distribution of arrivals; None if sessions share no clock.
        prompt: lengths of prompts.
        output: lengths of outputs.
        sessions: number of distinct sessions.
        session_rows: rows that belong to a session.
        sessions_exact: True if `sessions` is exact, False if it is an estimate.
        prefixes: prefix reuse.
        classes: rows per SLO class; the empty name counts rows without a class.
    """

    rows: int
    metadata: TraceMetadata
    floored_output_rows: int
    arrivals: Arrivals | None
    prompt: LengthSummary
    output: LengthSummary
    sessions: int
    session_rows: int
    sessions_exact: bool
    prefixes: PrefixReuse
    classes: tuple[tuple[str, int], ...]


def describe(trace: Trace) -> TraceDescription:
    """Read a trace once and describe it.

    Raises:
        TraceError: a row breaks a rule, or the file is damaged.
    """
    prompt, output = LengthCounts(), LengthCounts()
    arrivals = None if trace.metadata.clock is Clock.SESSION_RELATIVE else ArrivalCounts(trace)
    sessions, prefixes = SessionCounts(), PrefixCounts()
    classes: Counter[str] = Counter()
    rows = 0
    for columns, times in trace.batches(only=_COLUMNS):
        rows += len(times)
        prompt.add(integers(columns["input_tokens"]))
        output.add(np.maximum(integers(columns["output_tokens"]), 1))
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
        output=output.summary(),
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

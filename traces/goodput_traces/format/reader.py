"""Read and check a trace one row group at a time, so that memory does not grow with the file.

Every problem with a file ends in a `TraceError` of one sentence. Rows stay unchanged, except that
zero output tokens become 1; `goodput_traces.transforms` changes rows for a replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow.compute as pc

from goodput_core.units import NS_PER_MS
from goodput_traces.errors import RowError, TraceError
from goodput_traces.format.checks import OrderCheck, check_columns
from goodput_traces.format.columns import TRACE_SCHEMA, arrivals_ns, rows_from_columns
from goodput_traces.format.integrity import FileLayout
from goodput_traces.format.parquet_file import (
    ParquetTrace,
    open_parquet,
    require_columns,
    typed_columns,
)
from goodput_traces.format.schema import (
    COLUMN_MS,
    COLUMN_NS,
    REQUIRED_COLUMNS,
    Clock,
    TraceMetadata,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy as np

    from goodput_traces.format.schema import TraceRow

__all__ = ["Trace", "open_trace"]

_SORT_REMEDY: Final = "sort the trace with `goodput trace import --sort`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A checked trace without an open file, so that it can be read any number of times.

    Args:
        path: the file, as the user named it.
        metadata: the file's key-value metadata.
        num_rows: number of requests, at least 1.
        first_ns: the earliest arrival, on the trace's own clock.
        last_ns: the latest arrival.
        floored_output_rows: rows whose zero output tokens became 1, at import or in this file.
        layout: decoded sizes of the row groups, checked when the file was opened.
        max_decoded_bytes: largest decoded size of one pass over the rows; a larger file is
            rejected. None for the default of `open_trace`.
    """

    path: Path
    metadata: TraceMetadata
    num_rows: int
    first_ns: int
    last_ns: int
    floored_output_rows: int
    layout: FileLayout
    max_decoded_bytes: int | None = None

    def rows(self, *, start_ns: int | None = None, end_ns: int | None = None) -> Iterator[TraceRow]:
        """Yield the rows in the file's order; each call makes a new pass.

        Args:
            start_ns: earlier arrivals are skipped. Of a row group that ends earlier, only the
                arrivals are read. None for no lower bound.
            end_ns: this and later arrivals are skipped. None for no upper bound.

        Raises:
            TraceError: a row breaks a rule, or the file is damaged. Rows before the error were
                yielded.
        """
        low_ns = 0 if start_ns is None else start_ns
        for columns, _ in self.batches(start_ns=start_ns, end_ns=end_ns):
            for row in rows_from_columns(columns):
                arrival_ns = row.timestamp_start_unix_ns
                if arrival_ns >= low_ns and (end_ns is None or arrival_ns < end_ns):
                    yield row

    def batches(
        self,
        *,
        start_ns: int | None = None,
        end_ns: int | None = None,
        only: Sequence[str] | None = None,
    ) -> Iterator[tuple[dict[str, Any], np.ndarray[Any, np.dtype[np.int64]]]]:
        """For each batch, yield its checked Arrow columns by name, and its arrivals in nanoseconds.

        Args:
            start_ns: row groups that end before this time are skipped.
            end_ns: row groups that start at or after this time are skipped.
            only: columns to read besides those that the checks need; None for all columns.

        Raises:
            TraceError: as `rows`.
        """
        with open_parquet(
            self.path, layout=self.layout, max_decoded_bytes=self.max_decoded_bytes
        ) as file:
            arrival = _arrival_column(file)
            order = OrderCheck(self.metadata.clock, self.path, _SORT_REMEDY, column=arrival)
            names = _columns_to_read(file, only)
            first_row = 1
            for group in range(len(self.layout.group_bytes)):
                if _is_outside(file, group, start_ns, end_ns):
                    first_row += file.group_rows(group)
                    continue
                for batch in file.batches(names, [group]):
                    columns = typed_columns(batch, self.path, first_row)
                    check_columns(columns, path=self.path, first_row=first_row)
                    arrivals = arrivals_ns(columns)
                    self._check_last(arrivals, first_row, arrival)
                    order.check(arrivals, _session_ids(columns, len(arrivals)), first_row)
                    yield columns, arrivals
                    first_row += len(arrivals)

    def _check_last(
        self, arrivals: np.ndarray[Any, np.dtype[np.int64]], first_row: int, column: str
    ) -> None:
        # In a sorted trace, `last_ns` is the last row's arrival. A later arrival therefore proves
        # that the file is not sorted, before `OrderCheck` reaches the pair of rows that shows it.
        if len(arrivals) and arrivals.max() > self.last_ns:
            raise RowError(
                self.path,
                first_row + int(arrivals.argmax()),
                column,
                f"this row arrives after the file's last row; {_SORT_REMEDY}",
            )


def open_trace(path: Path | str, *, max_decoded_bytes: int | None = None) -> Trace:
    """Open a trace, check the file's integrity and find its span; `Trace.rows` checks the rows.

    Args:
        path: the file.
        max_decoded_bytes: largest decoded size; a larger file is rejected. None for 256 times the
            file's size, or 256 MiB if that is more.

    Raises:
        TraceError: the file is missing, empty, damaged, too large, or lacks a column.
        NotATraceError: the file has another format.
    """
    path = Path(path)
    with open_parquet(path, max_decoded_bytes=max_decoded_bytes) as file:
        require_columns(file)
        num_rows = file.file.metadata.num_rows
        if num_rows == 0:
            raise TraceError(path, "the trace has no rows; import it again from its source")
        try:
            metadata = TraceMetadata.from_key_values(
                file.key_values, has_ns=COLUMN_NS in file.names
            )
        except ValueError as error:
            raise TraceError(path, f"{error}; import the trace again") from error
        groups = range(len(file.layout.group_bytes))
        first_ns, last_ns = _find_span(file, metadata.clock)
        zeros = sum(
            int(pc.sum(pc.equal(column, 0)).as_py() or 0)
            for column in file.column("output_tokens", groups)
        )
        return Trace(
            path=path,
            metadata=metadata,
            num_rows=num_rows,
            first_ns=first_ns,
            last_ns=last_ns,
            floored_output_rows=metadata.floored_output_rows + zeros,
            layout=file.layout,
            max_decoded_bytes=max_decoded_bytes,
        )


def _arrival_column(file: ParquetTrace) -> str:
    """Return the column with the arrivals: nanoseconds if both exist."""
    return COLUMN_NS if COLUMN_NS in file.names else COLUMN_MS


def _find_span(file: ParquetTrace, clock: Clock) -> tuple[int, int]:
    """Return the earliest and the latest arrival.

    If rows are sorted by time, only the first and the last row group are read.
    """
    groups = [group for group in range(len(file.layout.group_bytes)) if file.group_rows(group)]
    if clock is not Clock.SESSION_RELATIVE:
        groups = sorted({groups[0], groups[-1]})
    span = _arrival_bounds(file, groups)
    if span is None:
        raise TraceError(
            file.path, f"column {_arrival_column(file)} is empty; every row needs an arrival"
        )
    return span


def _is_outside(file: ParquetTrace, group: int, start_ns: int | None, end_ns: int | None) -> bool:
    if start_ns is None and end_ns is None:
        return False
    bounds = _arrival_bounds(file, [group])
    if bounds is None:
        return False
    return (start_ns is not None and bounds[1] < start_ns) or (
        end_ns is not None and bounds[0] >= end_ns
    )


def _arrival_bounds(file: ParquetTrace, groups: Iterable[int]) -> tuple[int, int] | None:
    arrival = _arrival_column(file)
    scale = 1 if arrival == COLUMN_NS else NS_PER_MS
    bounds: tuple[int, int] | None = None
    for column in file.column(arrival, groups):
        extremes = pc.min_max(column)
        low, high = extremes["min"].as_py(), extremes["max"].as_py()
        if low is None:
            continue
        low, high = low * scale, high * scale
        bounds = (low, high) if bounds is None else (min(bounds[0], low), max(bounds[1], high))
    return bounds


def _columns_to_read(file: ParquetTrace, only: Sequence[str] | None) -> list[str]:
    names = [name for name in TRACE_SCHEMA.names if name in file.names]
    if COLUMN_NS in names and COLUMN_MS in names:
        names.remove(COLUMN_MS)  # the nanosecond column overrides it
    if only is None:
        return names
    needed = {*only, *REQUIRED_COLUMNS, COLUMN_NS, COLUMN_MS, "provided_session_id"}
    if "total_hashes" in only:
        needed.add("block_size")
    return [name for name in names if name in needed]


def _session_ids(columns: dict[str, Any], rows: int) -> list[str | None]:
    if "provided_session_id" not in columns:
        return [None] * rows
    sessions: list[str | None] = columns["provided_session_id"].to_pylist()
    return sessions

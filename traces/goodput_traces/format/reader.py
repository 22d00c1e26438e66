"""Reading a trace: checked, streamed row group by row group, so memory does not grow with it.

Everything that can be wrong with a file ends in a `TraceError` of one sentence. Nothing here
changes a row except that zero output tokens become 1; what a replay does to rows is in
`goodput_traces.transforms`.
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
from goodput_traces.format.parquet_file import (
    batch_rows,
    open_parquet,
    read_column,
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
    import pyarrow.parquet as pq

    from goodput_traces.format.schema import TraceRow

__all__ = ["Trace", "open_trace"]

_SORT_REMEDY: Final = "sort it with `goodput trace import --sort`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """An open trace; holds no file handle, so it can be read any number of times.

    Args:
        path: the file, as the user named it.
        metadata: what the file says about itself.
        num_rows: requests in it, at least 1.
        first_ns: the earliest arrival, on the trace's own clock.
        last_ns: the latest arrival.
        floored_output_rows: rows whose zero output tokens are read as 1, at import and now.
    """

    path: Path
    metadata: TraceMetadata
    num_rows: int
    first_ns: int
    last_ns: int
    floored_output_rows: int

    def rows(self, *, start_ns: int | None = None, end_ns: int | None = None) -> Iterator[TraceRow]:
        """The rows in the file's order; a new pass each time.

        Args:
            start_ns: skip arrivals before this; of row groups that end before it only the
                arrivals are read.
            end_ns: stop before this arrival.

        Raises:
            TraceError: a row that breaks a rule, or a damaged file; rows before it have come.
        """
        low = 0 if start_ns is None else start_ns
        for columns, _ in self.batches(start_ns=start_ns, end_ns=end_ns):
            for row in rows_from_columns(columns):
                now_ns = row.timestamp_start_unix_ns
                if now_ns >= low and (end_ns is None or now_ns < end_ns):
                    yield row

    def validate(self) -> None:
        """Check every row without building any: what `rows` would find, found before a run.

        Raises:
            TraceError: as `rows`.
        """
        for _ in self.batches():
            pass

    def batches(
        self,
        *,
        start_ns: int | None = None,
        end_ns: int | None = None,
        only: Sequence[str] | None = None,
    ) -> Iterator[tuple[dict[str, Any], np.ndarray[Any, np.dtype[np.int64]]]]:
        """Checked Arrow columns by name, and arrivals in nanoseconds, batch by batch.

        Args:
            start_ns: row groups that end before this are skipped.
            end_ns: row groups that start at or after this are skipped.
            only: columns to read besides those that the checks need; None: all.

        Raises:
            TraceError: as `rows`.
        """
        with open_parquet(self.path) as file:
            arrival = _arrival_column(file)
            order = OrderCheck(self.metadata.clock, self.path, _SORT_REMEDY, column=arrival)
            names = _columns_to_read(file, only)
            first_row = 1
            for group in range(file.metadata.num_row_groups):
                meta = file.metadata.row_group(group)
                if _outside(file, self.path, group, start_ns, end_ns):
                    first_row += meta.num_rows
                    continue
                for batch in file.iter_batches(
                    batch_size=batch_rows(meta), row_groups=[group], columns=names
                ):
                    columns = typed_columns(batch, self.path)
                    check_columns(columns, path=self.path, first_row=first_row)
                    arrivals = arrivals_ns(columns)
                    self._check_last(arrivals, first_row, arrival)
                    order.check(arrivals, _sessions(columns, len(arrivals)), first_row)
                    yield columns, arrivals
                    first_row += len(arrivals)

    def _check_last(
        self, arrivals: np.ndarray[Any, np.dtype[np.int64]], first_row: int, column: str
    ) -> None:
        # `last_ns` is the last row's where rows are sorted: nothing may come after it, even
        # if the disorder itself lies further down.
        if len(arrivals) and arrivals.max() > self.last_ns:
            raise RowError(
                self.path,
                first_row + int(arrivals.argmax()),
                column,
                f"rows are not sorted, this one arrives after the last one; {_SORT_REMEDY}",
            )


def open_trace(path: Path | str) -> Trace:
    """Open a trace and find its span; rows are read, and checked, by `rows`.

    Raises:
        TraceError: the file is missing, empty, truncated, or lacks a column.
        NotATraceError: the file is something else.
    """
    path = Path(path)
    with open_parquet(path) as file:
        require_columns(file, path)
        if file.metadata.num_rows == 0:
            raise TraceError(path, "the trace has no rows; import it again from its source")
        has_ns = COLUMN_NS in file.schema_arrow.names
        try:
            metadata = TraceMetadata.from_key_values(file.metadata.metadata or {}, has_ns=has_ns)
        except ValueError as error:
            raise TraceError(path, f"{error}; import the trace again") from error
        first_ns, last_ns = _span(file, path, metadata.clock)
        zeros = sum(
            int(pc.sum(pc.equal(column, 0)).as_py() or 0)
            for column in read_column(
                file, path, "output_tokens", range(file.metadata.num_row_groups)
            )
        )
        return Trace(
            path=path,
            metadata=metadata,
            num_rows=file.metadata.num_rows,
            first_ns=first_ns,
            last_ns=last_ns,
            floored_output_rows=metadata.floored_output_rows + zeros,
        )


def _arrival_column(file: pq.ParquetFile) -> str:
    """Where arrivals stand in this file; nanoseconds win."""
    return COLUMN_NS if COLUMN_NS in file.schema_arrow.names else COLUMN_MS


def _span(file: pq.ParquetFile, path: Path, clock: Clock) -> tuple[int, int]:
    """The earliest and the latest arrival; one look at each end where rows are sorted."""
    groups = [
        group
        for group in range(file.metadata.num_row_groups)
        if file.metadata.row_group(group).num_rows
    ]
    if clock is not Clock.SESSION_RELATIVE:
        groups = sorted({groups[0], groups[-1]}) if groups else []
    span = _arrival_bounds(file, path, groups)
    if span is None:
        raise TraceError(
            path, f"column {_arrival_column(file)} is empty; every row needs its arrival"
        )
    return span


def _outside(
    file: pq.ParquetFile, path: Path, group: int, start_ns: int | None, end_ns: int | None
) -> bool:
    if start_ns is None and end_ns is None:
        return False
    bounds = _arrival_bounds(file, path, [group])
    if bounds is None:
        return False
    return (start_ns is not None and bounds[1] < start_ns) or (
        end_ns is not None and bounds[0] >= end_ns
    )


def _arrival_bounds(
    file: pq.ParquetFile, path: Path, groups: Iterable[int]
) -> tuple[int, int] | None:
    arrival = _arrival_column(file)
    scale = 1 if arrival == COLUMN_NS else NS_PER_MS
    bounds: tuple[int, int] | None = None
    for column in read_column(file, path, arrival, groups):
        found = pc.min_max(column)
        least, most = found["min"].as_py(), found["max"].as_py()
        if least is None:
            continue
        least, most = least * scale, most * scale
        bounds = (least, most) if bounds is None else (min(bounds[0], least), max(bounds[1], most))
    return bounds


def _columns_to_read(file: pq.ParquetFile, only: Sequence[str] | None) -> list[str]:
    names = [name for name in TRACE_SCHEMA.names if name in file.schema_arrow.names]
    if COLUMN_NS in names and COLUMN_MS in names:
        names.remove(COLUMN_MS)  # nanoseconds win
    if only is None:
        return names
    needed = {*only, *REQUIRED_COLUMNS, COLUMN_NS, COLUMN_MS, "provided_session_id"}
    if "total_hashes" in only:
        needed.add("block_size")
    return [name for name in names if name in needed]


def _sessions(columns: dict[str, Any], rows: int) -> list[str | None]:
    if "provided_session_id" not in columns:
        return [None] * rows
    sessions: list[str | None] = columns["provided_session_id"].to_pylist()
    return sessions

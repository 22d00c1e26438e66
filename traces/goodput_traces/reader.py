"""Reading a trace: checked, streamed row group by row group, so memory does not grow with it.

Everything that can be wrong with a file ends in a `TraceError` of one sentence. Nothing here
changes a row except that zero output tokens become 1; what a replay does to rows is in
`goodput_traces.transforms`.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from goodput_core.units import NS_PER_MS
from goodput_traces.checks import OrderCheck, check_columns
from goodput_traces.columns import arrivals_ns, rows_from_columns
from goodput_traces.errors import NotATraceError, TraceError
from goodput_traces.schema import (
    COLUMN_MS,
    COLUMN_NS,
    REQUIRED_COLUMNS,
    TRACE_SCHEMA,
    TraceMetadata,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

    from goodput_traces.row import TraceRow

__all__ = ["Trace", "open_trace"]

_BATCH_ROWS: Final = 8192
_BATCH_BYTES: Final = 8 << 20
_MAX_ROW_GROUPS: Final = 1_000_000
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
            start_ns: skip arrivals before this; whole row groups are then not even read.
            end_ns: stop before this arrival.

        Raises:
            TraceError: a row that breaks a rule, or a damaged file; rows before it have come.
        """
        for columns, _ in self.batches(start_ns=start_ns, end_ns=end_ns):
            if start_ns is None and end_ns is None:
                yield from rows_from_columns(columns)
                continue
            low = 0 if start_ns is None else start_ns
            for row in rows_from_columns(columns):
                now = row.timestamp_start_unix_ns
                if now >= low and (end_ns is None or now < end_ns):
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
        order = OrderCheck(self.metadata.clock, self.path, _SORT_REMEDY)
        with _parquet(self.path) as file:
            names = _columns_to_read(file, only)
            first_row = 1
            for group in range(file.metadata.num_row_groups):
                meta = file.metadata.row_group(group)
                if _outside(file, group, start_ns, end_ns):
                    first_row += meta.num_rows
                    continue
                for batch in file.iter_batches(
                    batch_size=_batch_rows(meta), row_groups=[group], columns=names
                ):
                    columns = _typed(batch, self.path)
                    check_columns(columns, path=self.path, first_row=first_row)
                    arrivals = arrivals_ns(columns)
                    order.check(arrivals, _sessions(columns, len(arrivals)), first_row)
                    yield columns, arrivals
                    first_row += len(arrivals)


def open_trace(path: Path | str) -> Trace:
    """Open a trace and read what its footer says; rows are read, and checked, by `rows`.

    Raises:
        TraceError: the file is missing, empty, truncated, or lacks a column.
        NotATraceError: the file is something else.
    """
    path = Path(path)
    with _parquet(path) as file:
        if file.metadata.num_rows == 0:
            raise TraceError(path, "the trace has no rows; import it again from its source")
        _require_columns(file, path)
        pairs = file.metadata.metadata or {}
        names = file.schema_arrow.names
        try:
            metadata = TraceMetadata.from_key_values(pairs, has_ns=COLUMN_NS in names)
        except ValueError as error:
            raise TraceError(path, f"{error}; import the trace again") from error
        scale = 1 if COLUMN_NS in names else NS_PER_MS
        first, last = _span(file, path, COLUMN_NS if COLUMN_NS in names else COLUMN_MS)
        return Trace(
            path=path,
            metadata=metadata,
            num_rows=file.metadata.num_rows,
            first_ns=first * scale,
            last_ns=last * scale,
            floored_output_rows=metadata.floored_output_rows + _zero_outputs(file, path),
        )


@contextmanager
def _parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """A Parquet file whose every failure is a sentence."""
    try:
        with path.open("rb") as raw:
            head = raw.read(4)
    except FileNotFoundError as error:
        raise TraceError(path, "no such file; check the path") from error
    except OSError as error:
        raise TraceError(path, f"cannot be read ({error.strerror}); check the path") from error
    if not head:
        raise TraceError(path, "the file is empty; copy or import it again")
    if head != b"PAR1":
        raise NotATraceError(
            path,
            "this is not a Parquet file; turn it into a trace with `goodput trace import`",
        )
    try:
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            if file.metadata.num_row_groups > _MAX_ROW_GROUPS:
                raise TraceError(path, "more than a million row groups; write it in larger ones")
            yield file
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, pa.ArrowMemoryError):
            raise
        raise TraceError(
            path,
            f"the Parquet file is truncated or damaged ({_reason(error)}); copy or import it again",
        ) from error


def _reason(error: BaseException) -> str:
    first_line = next(iter(str(error).splitlines()), type(error).__name__)
    return first_line[:160].rstrip(" .")


def _require_columns(file: pq.ParquetFile, path: Path) -> None:
    names = set(file.schema_arrow.names)
    missing = [name for name in REQUIRED_COLUMNS if name not in names]
    if COLUMN_NS not in names and COLUMN_MS not in names:
        missing.append(COLUMN_NS)
    if missing == ["request_id"]:
        raise TraceError(
            path,
            "column request_id is missing; if this is a baseten_trace file, run "
            "`goodput trace import --format baseten`",
        )
    if missing:
        listed = ", ".join(missing)
        plural = "columns" if len(missing) > 1 else "column"
        raise NotATraceError(
            path,
            f"not a trace, {plural} {listed} {'are' if len(missing) > 1 else 'is'} missing; "
            "turn it into one with `goodput trace import`",
        )
    duplicates = {n for n in names if file.schema_arrow.names.count(n) > 1}
    if duplicates:
        raise TraceError(path, f"column {min(duplicates)} stands twice; keep one of them")
    for field in file.schema_arrow:
        if field.name in TRACE_SCHEMA.names and not _compatible(
            field.type, TRACE_SCHEMA.field(field.name).type
        ):
            expected = TRACE_SCHEMA.field(field.name).type
            raise TraceError(
                path,
                f"column {field.name} has type {field.type}, expected {expected}; "
                "convert the column",
            )


def _compatible(actual: pa.DataType, expected: pa.DataType) -> bool:
    types = pa.types
    if types.is_null(actual):
        return True
    if types.is_dictionary(actual):
        return _compatible(actual.value_type, expected)
    if types.is_list(expected):
        return (types.is_list(actual) or types.is_large_list(actual)) and _compatible(
            actual.value_type, expected.value_type
        )
    if types.is_integer(expected):
        return bool(types.is_integer(actual) or types.is_boolean(actual))
    if types.is_floating(expected):
        return bool(types.is_floating(actual) or types.is_integer(actual))
    return bool(
        types.is_string(actual) or types.is_large_string(actual) or types.is_string_view(actual)
    )


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


def _typed(batch: pa.RecordBatch, path: Path) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        expected = TRACE_SCHEMA.field(name).type
        if column.type != expected:
            try:
                column = column.cast(expected)  # noqa: PLW2901 - the same column, our type
            except pa.ArrowException as error:
                raise TraceError(
                    path, f"column {name} does not fit {expected} ({_reason(error)}); convert it"
                ) from error
        columns[name] = column
    return columns


def _sessions(columns: dict[str, Any], rows: int) -> list[str | None]:
    if "provided_session_id" not in columns:
        return [None] * rows
    sessions: list[str | None] = columns["provided_session_id"].to_pylist()
    return sessions


def _batch_rows(group: pq.RowGroupMetaData) -> int:
    """Rows per batch, fewer where rows are wide: prompts and hashes can be megabytes a row."""
    # Both, because the size on disk is that of dictionary indices, and values may be text.
    values = sum(group.column(leaf).num_values for leaf in range(group.num_columns))
    wide = max(group.total_byte_size, 8 * values) // max(1, group.num_rows)
    return int(max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, wide))))


def _statistics(file: pq.ParquetFile, group: int, column: str) -> Any:
    """Minimum and maximum of a column in a row group, or None where they were not written."""
    index = file.schema_arrow.names.index(column)
    # Leaves are numbered through nested columns, so the name is searched, not the position.
    meta = file.metadata.row_group(group)
    for leaf in range(index, meta.num_columns):
        chunk = meta.column(leaf)
        if chunk.path_in_schema == column:
            stats = chunk.statistics
            return stats if stats is not None and stats.has_min_max else None
    return None


def _outside(file: pq.ParquetFile, group: int, start_ns: int | None, end_ns: int | None) -> bool:
    if start_ns is None and end_ns is None:
        return False
    has_ns = COLUMN_NS in file.schema_arrow.names
    stats = _statistics(file, group, COLUMN_NS if has_ns else COLUMN_MS)
    if stats is None:
        return False
    scale = 1 if has_ns else NS_PER_MS
    before = start_ns is not None and stats.max * scale < start_ns
    return before or (end_ns is not None and stats.min * scale >= end_ns)


def _span(file: pq.ParquetFile, path: Path, column: str) -> tuple[int, int]:
    """The least and the greatest value, from statistics or one pass over that column."""
    groups = range(file.metadata.num_row_groups)
    stats = [_statistics(file, g, column) for g in groups if file.metadata.row_group(g).num_rows]
    if all(s is not None for s in stats):
        least, most = min(s.min for s in stats), max(s.max for s in stats)
        if isinstance(least, int) and isinstance(most, int):
            return least, most
    values = [
        (found["min"].as_py(), found["max"].as_py())
        for batch in file.iter_batches(columns=[column])
        for found in [pc.min_max(_typed(batch, path)[column])]
        if found["min"].as_py() is not None
    ]
    if not values:
        raise TraceError(path, f"column {column} is empty; every row needs its arrival")
    return min(v[0] for v in values), max(v[1] for v in values)


def _zero_outputs(file: pq.ParquetFile, path: Path) -> int:
    """Rows with zero output tokens still in the file; most traces answer from statistics."""
    column = "output_tokens"
    groups = [
        group
        for group in range(file.metadata.num_row_groups)
        if (stats := _statistics(file, group, column)) is None or stats.min <= 0
    ]
    if not groups:
        return 0
    return sum(
        int(pc.sum(pc.equal(_typed(batch, path)[column], 0)).as_py() or 0)
        for batch in file.iter_batches(row_groups=groups, columns=[column])
    )

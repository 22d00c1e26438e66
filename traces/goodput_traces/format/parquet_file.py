"""A Parquet file that somebody else may have written: opened, cast and read column by column.

Everything that Arrow can say about a damaged file becomes one `TraceError`. Statistics of
column chunks are never looked at: on a damaged footer pyarrow ends the whole process there
(seen with pyarrow 26), and reading one integer column costs little.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from goodput_traces.errors import NotATraceError, TraceError
from goodput_traces.format.columns import TRACE_SCHEMA
from goodput_traces.format.schema import COLUMN_MS, COLUMN_NS, REQUIRED_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

__all__ = [
    "batch_rows",
    "first_line",
    "open_parquet",
    "read_column",
    "require_columns",
    "typed_columns",
]

_MAX_ROW_GROUPS: Final = 1_000_000
_BATCH_ROWS: Final = 8192
_BATCH_BYTES: Final = 8 << 20


@contextmanager
def open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """A Parquet file whose every failure, also while it is read, is a sentence.

    Raises:
        TraceError: missing, empty, truncated or damaged.
        NotATraceError: not Parquet.
    """
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
            path, "this is not a Parquet file; turn it into a trace with `goodput trace import`"
        )
    try:
        with pq.ParquetFile(
            path, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True
        ) as file:
            if file.metadata.num_row_groups > _MAX_ROW_GROUPS:
                raise TraceError(path, "more than a million row groups; write it in larger ones")
            yield file
    except pa.ArrowMemoryError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise TraceError(
            path,
            f"the Parquet file is truncated or damaged ({first_line(error)}); "
            "copy or import it again",
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of what a library said, short enough to stand inside a sentence."""
    return next(iter(str(error).splitlines()), type(error).__name__)[:160].rstrip(" .")


def require_columns(file: pq.ParquetFile, path: Path) -> None:
    """Refuse a file that lacks a trace's columns, or has them in another type.

    Raises:
        TraceError: names the column.
        NotATraceError: several are missing.
    """
    names = file.schema_arrow.names
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
        plural, verb = ("columns", "are") if len(missing) > 1 else ("column", "is")
        raise NotATraceError(
            path,
            f"not a trace, {plural} {', '.join(missing)} {verb} missing; "
            "turn it into one with `goodput trace import`",
        )
    for field in file.schema_arrow:
        if field.name not in TRACE_SCHEMA.names:
            continue
        if names.count(field.name) > 1:
            raise TraceError(path, f"column {field.name} stands twice; keep one of them")
        expected = TRACE_SCHEMA.field(field.name).type
        if not _compatible(field.type, expected):
            raise TraceError(
                path,
                f"column {field.name} has type {field.type}, expected {expected}; "
                "convert the column",
            )


def typed_columns(batch: pa.RecordBatch, path: Path) -> dict[str, Any]:
    """The arrays of a batch by name, cast to the types of `TRACE_SCHEMA`.

    Raises:
        TraceError: a value does not fit.
    """
    columns: dict[str, Any] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        expected = TRACE_SCHEMA.field(name).type
        try:
            columns[name] = column if column.type == expected else column.cast(expected)
        except pa.ArrowException as error:
            raise TraceError(
                path, f"column {name} does not fit {expected} ({first_line(error)}); convert it"
            ) from error
    return columns


def read_column(
    file: pq.ParquetFile, path: Path, name: str, groups: Iterable[int]
) -> Iterator[Any]:
    """The batches of one column in some row groups.

    Raises:
        TraceError: a value does not fit its type.
    """
    for batch in file.iter_batches(row_groups=list(groups), columns=[name]):
        yield typed_columns(batch, path)[name]


def batch_rows(group: pq.RowGroupMetaData) -> int:
    """Rows per batch, fewer where rows are wide: prompts and hashes can be megabytes a row."""
    wide = group.total_byte_size // max(1, group.num_rows)
    return int(max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, wide))))


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

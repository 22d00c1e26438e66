"""Check, open and decode Parquet files of unknown origin, in batches of bounded size.

Every failure of Arrow becomes a `TraceError`. The statistics of column chunks are not used, because
some damaged statistics crash the process in pyarrow 26. Reading an integer column costs little.
"""

from __future__ import annotations

import base64
import binascii
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from goodput_traces.errors import NotATraceError, RowError, TooLargeError, TraceError
from goodput_traces.format.columns import TRACE_SCHEMA
from goodput_traces.format.integrity import DamagedError, FileLayout, check_file
from goodput_traces.format.schema import COLUMN_MS, COLUMN_NS, REQUIRED_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

__all__ = [
    "ParquetTrace",
    "first_line",
    "open_binary",
    "open_parquet",
    "require_columns",
    "typed_columns",
]

_BATCH_ROWS: Final = 8192
_BATCH_BYTES: Final = 8 << 20
# A column of equal values is small when encoded: a few kilobytes can decode to gigabytes.
_MIN_LIMIT_BYTES: Final = 256 << 20
_MAX_EXPANSION: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetTrace:
    """An open Parquet file with a checked layout.

    Args:
        path: the file, as the user named it.
        file: the open file.
        layout: decoded sizes of the row groups, checked when the file was opened.
        limit_bytes: largest decoded size; reading raises beyond it.
    """

    path: Path
    file: pq.ParquetFile
    layout: FileLayout
    limit_bytes: int

    @property
    def names(self) -> list[str]:
        """Names of all columns."""
        return list(self.file.schema_arrow.names)

    @property
    def key_values(self) -> dict[bytes, bytes]:
        """Key-value metadata of the file."""
        return dict(self.file.metadata.metadata or {})

    def group_rows(self, group: int) -> int:
        """Return the number of rows in a row group."""
        return int(self.file.metadata.row_group(group).num_rows)

    def batches(self, columns: Collection[str], groups: Iterable[int]) -> Iterator[pa.RecordBatch]:
        """Yield record batches of bounded size of some columns in some row groups.

        Raises:
            TraceError: the decoded size exceeds the limit.
        """
        decoded = 0
        for group in groups:
            rows = 0
            for batch in self.file.iter_batches(
                batch_size=self._batch_rows(group), row_groups=[group], columns=list(columns)
            ):
                rows += batch.num_rows
                for part in _split_batch(batch):
                    expanded = _expand_dictionaries(part)
                    decoded += expanded.nbytes
                    if decoded > self.limit_bytes:
                        raise TooLargeError(self.path, self.limit_bytes)
                    yield expanded
            if rows != self.group_rows(group):
                raise pa.ArrowInvalid("a row group does not have the declared number of rows")

    def column(self, name: str, groups: Iterable[int]) -> Iterator[Any]:
        """Yield the Arrow arrays of one column of a trace in some row groups.

        Raises:
            TraceError: a value does not fit the column's type, or the limit is exceeded.
        """
        for group in groups:
            first_row = 1 + sum(self.group_rows(earlier) for earlier in range(group))
            for batch in self.batches([name], [group]):
                yield typed_columns(batch, self.path, first_row)[name]
                first_row += batch.num_rows

    def _batch_rows(self, group: int) -> int:
        row_bytes = self.layout.group_bytes[group] // max(1, self.group_rows(group))
        return max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, row_bytes)))


@contextmanager
def open_parquet(
    path: Path,
    *,
    source: IO[bytes] | None = None,
    names: Collection[str] = TRACE_SCHEMA.names,
    layout: FileLayout | None = None,
    max_decoded_bytes: int | None = None,
) -> Iterator[ParquetTrace]:
    """Open a Parquet file; every failure inside the `with` block becomes a `TraceError`.

    Args:
        path: the file, as the user named it.
        source: the seekable file to read instead, if `path` is compressed.
        names: the columns that will be read; only their decoded sizes count.
        layout: result of an earlier check; None to check the file now.
        max_decoded_bytes: largest decoded size; None for 256 times the file's size, or 256 MiB if
            that is more.

    Raises:
        TraceError: missing, empty, truncated, damaged, or too large when decoded.
        NotATraceError: not Parquet.
    """
    with open_binary(path) if source is None else nullcontext(source) as raw:
        try:
            _check_magic(path, raw)
            if layout is None:
                layout = check_file(raw, names)
            limit = max_decoded_bytes
            if limit is None:
                limit = max(_MIN_LIMIT_BYTES, _MAX_EXPANSION * layout.file_bytes)
            if sum(layout.group_bytes) > limit:
                raise TooLargeError(path, limit)
            if source is not None:
                source.seek(0)
            with pq.ParquetFile(
                path if source is None else source,
                buffer_size=1 << 17,
                pre_buffer=False,
                page_checksum_verification=True,
                read_dictionary=list(layout.large_dictionaries),
            ) as file:
                _check_arrow_schema(file)
                yield ParquetTrace(path=path, file=file, layout=layout, limit_bytes=limit)
        except pa.ArrowMemoryError:
            raise
        except (pa.ArrowException, DamagedError, OSError, ValueError) as error:
            raise TraceError(
                path,
                f"the Parquet file is truncated or damaged ({first_line(error)}); "
                "copy or import it again",
            ) from error


def open_binary(path: Path) -> IO[bytes]:
    """Open a file for reading.

    Raises:
        TraceError: the file is missing or cannot be opened.
    """
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise TraceError(path, "no such file; check the path") from error
    except OSError as error:
        raise TraceError(path, f"cannot be read ({error.strerror}); check the path") from error


def _check_magic(path: Path, raw: IO[bytes]) -> None:
    raw.seek(0)
    head = raw.read(4)
    if not head:
        raise TraceError(path, "the file is empty; copy or import it again")
    if head != b"PAR1":
        raise NotATraceError(
            path, "this is not a Parquet file; convert it to a trace with `goodput trace import`"
        )


def first_line(error: BaseException) -> str:
    """Return the first line of a library's message, shortened for use in a sentence."""
    return next(iter(str(error).splitlines()), type(error).__name__)[:160].rstrip(" .")


def require_columns(trace: ParquetTrace) -> None:
    """Reject a file that lacks a column of the trace format or has one of another type.

    Raises:
        TraceError: names the column.
        NotATraceError: several columns are missing.
    """
    path, names = trace.path, trace.names
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
        raise NotATraceError(
            path,
            f"this is not a trace, because columns are missing: {', '.join(missing)}; "
            "convert it to a trace with `goodput trace import`",
        )
    for field in trace.file.schema_arrow:
        if field.name not in TRACE_SCHEMA.names:
            continue
        if names.count(field.name) > 1:
            raise TraceError(path, f"column {field.name} exists twice; keep one of them")
        expected = TRACE_SCHEMA.field(field.name).type
        if not _is_compatible(field.type, expected):
            raise TraceError(
                path,
                f"column {field.name} has type {field.type}, expected {expected}; "
                "convert the column",
            )


def typed_columns(batch: pa.RecordBatch, path: Path, first_row: int) -> dict[str, Any]:
    """Return the arrays of a batch by name, cast to the types of `TRACE_SCHEMA`.

    Args:
        batch: columns of a trace.
        path: the file, for errors.
        first_row: number of the batch's first row, from 1.

    Raises:
        RowError: a value does not fit its column's type, or is not UTF-8.
    """
    columns: dict[str, Any] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        expected = TRACE_SCHEMA.field(name).type

        def cast(part: Any, expected: pa.DataType = expected) -> Any:
            typed = part if part.type == expected else part.cast(expected)
            if pa.types.is_string(expected):
                typed.validate(full=True)
            return typed

        try:
            columns[name] = cast(column)
        except pa.ArrowException as error:
            raise RowError(
                path,
                first_row + _first_failure(column, cast),
                name,
                f"the value does not fit {expected} ({first_line(error)}); correct it",
            ) from error
    return columns


def _first_failure(column: Any, cast: Callable[[Any], Any]) -> int:
    """Return the position of the first value that cannot be cast."""
    for at in range(len(column)):
        try:
            cast(column.slice(at, 1))
        except pa.ArrowException:
            return at
    return 0


def _split_batch(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Split a batch so that the text of each part is bounded after dictionaries are expanded."""
    sizes = np.zeros(batch.num_rows, dtype=np.int64)
    for column in batch.columns:
        if pa.types.is_dictionary(column.type) and _is_text(column.type.value_type):
            lengths = pc.take(pc.binary_length(column.dictionary), column.indices)
            sizes += np.asarray(pc.fill_null(lengths, 0), dtype=np.int64)
    part_numbers = np.cumsum(sizes) // _BATCH_BYTES
    starts = [0, *(np.flatnonzero(np.diff(part_numbers)) + 1).tolist()]
    for start, end in zip(starts, [*starts[1:], batch.num_rows], strict=True):
        yield batch.slice(start, end - start)


def _expand_dictionaries(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch with plain columns instead of dictionaries."""
    return pa.RecordBatch.from_arrays(
        [
            column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
            for column in batch.columns
        ],
        names=batch.schema.names,
    )


def _check_arrow_schema(file: pq.ParquetFile) -> None:
    """Compare the Arrow schema that Arrow's writers store with the schema of the footer."""
    encoded = (file.metadata.metadata or {}).get(b"ARROW:schema")
    if encoded is None:
        return
    try:
        stored = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(encoded, validate=True)))
    except binascii.Error as error:
        raise DamagedError("the Arrow schema is not base64") from error
    columns = [(field.name, field.nullable) for field in stored]
    if columns != [(field.name, field.nullable) for field in file.schema_arrow]:
        raise DamagedError("the footer and the Arrow schema name different columns")


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_compatible(actual: pa.DataType, expected: pa.DataType) -> bool:
    types = pa.types
    if types.is_null(actual):
        return True
    if types.is_dictionary(actual):
        return _is_compatible(actual.value_type, expected)
    if types.is_list(expected):
        return (types.is_list(actual) or types.is_large_list(actual)) and _is_compatible(
            actual.value_type, expected.value_type
        )
    if types.is_integer(expected):
        return bool(types.is_integer(actual) or types.is_boolean(actual))
    if types.is_floating(expected):
        return bool(types.is_floating(actual) or types.is_integer(actual))
    return _is_text(actual)

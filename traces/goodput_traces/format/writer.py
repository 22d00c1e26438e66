"""Write a trace in a stream, check it, and rename it to its final name when it is complete."""

from __future__ import annotations

import errno
import os
import sqlite3
from contextlib import ExitStack, closing, contextmanager
from itertools import repeat
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from goodput_core.files import atomic_file
from goodput_traces.errors import RowError, TraceError
from goodput_traces.format.checks import OrderCheck, check_columns
from goodput_traces.format.columns import TRACE_SCHEMA, arrivals_ns, rows_to_batch
from goodput_traces.format.integrity import write_digest_block
from goodput_traces.format.schema import COLUMN_NS, Clock, TraceMetadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from goodput_traces.format.schema import TraceRow

__all__ = ["MAX_BATCH_ROWS", "create_file", "reject_existing", "sort_trace", "write_trace"]

MAX_BATCH_ROWS: Final = 8192
"""Most rows that are converted and checked together."""
_BATCH_BYTES: Final = 8 << 20
# Every reader keeps the index of all row groups in memory, 20 KiB for each. Row groups therefore
# grow with the trace: one is a part of the rows before it, within these limits.
_GROUP_SHARE: Final = 16
_MAX_GROUP_ROWS: Final = 1 << 16
_MAX_GROUP_BYTES: Final = 64 << 20
# A reader of a row group holds a page of each column.
_PAGE_BYTES: Final = 128 << 10
# A trace is sorted in parts of at most this many batches.
_PART_BATCHES: Final = 16
# One transaction, so that rows are written in pages. 16 MiB are kept in memory.
_SORT_TABLE: Final = """
    PRAGMA journal_mode = OFF;
    PRAGMA temp_store = FILE;
    PRAGMA cache_size = -16384;
    CREATE TABLE keys (session TEXT, arrival_ns INTEGER);
    BEGIN;
"""


def reject_existing(path: Path, *, overwrite: bool, sources: Iterable[Path] = ()) -> None:
    """Raise a `TraceError` if `path` is no file, a source, or exists and must not be replaced."""
    if path.is_dir():
        raise TraceError(path, "this is a folder; name a file to write")
    if path.exists() and not path.is_file():
        raise TraceError(path, "this is a pipe or a device; name a file to write")
    if path.exists() and any(source.exists() and source.samefile(path) for source in sources):
        raise TraceError(path, "this is also the file to read; name another file to write")
    if path.exists() and not overwrite:
        raise TraceError(path, "the file exists; name another, or add --force to replace it")


@contextmanager
def create_file(path: Path, *, overwrite: bool) -> Iterator[IO[bytes]]:
    """Open a file that appears under its name only if the `with` block ends without an exception.

    Raises:
        TraceError: the file exists already, or its folder cannot be written.
        OSError: the disk is full.
    """
    reject_existing(path, overwrite=overwrite)
    with ExitStack() as stack:
        try:
            file = stack.enter_context(atomic_file(path.resolve()))
        except OSError as error:
            raise TraceError(
                path, f"cannot be written ({error.strerror}); check the folder"
            ) from error
        yield file


def write_trace(
    path: Path | str,
    rows: Iterable[TraceRow],
    metadata: TraceMetadata | Callable[[], TraceMetadata],
    *,
    overwrite: bool = False,
    require_order: bool = True,
    sort_remedy: str = "sort them first",
    locate: Callable[[RowError], RowError] | None = None,
) -> int:
    """Write all rows in a stream; after an exception, no file is left behind.

    Args:
        path: the trace to write.
        rows: the rows, in the format's order.
        metadata: the file's metadata. A callable is called again after the last row, when the
            counts in the metadata are final.
        overwrite: replace an existing file.
        require_order: True to reject rows that are not in the format's order.
        sort_remedy: the way to sort the rows, for the error about unsorted rows.
        locate: converts an error that names a row of this trace to one that names its place in
            the file from which the row was imported.

    Returns:
        The number of rows written.

    Raises:
        TraceError: the file exists already, its folder cannot be written, a row breaks a rule
            of the format, or the order is wrong.
    """
    path = Path(path)

    def current_metadata() -> TraceMetadata:
        return metadata() if callable(metadata) else metadata

    order = OrderCheck(current_metadata().clock, path, sort_remedy) if require_order else None
    with _create_parquet(path, overwrite=overwrite) as writer:
        for batch_rows in _split_rows(rows):
            try:
                batch = _make_batch(batch_rows, path, writer.rows + 1, order)
            except RowError as error:
                raise (error if locate is None else locate(error)) from error
            writer.add(batch)
        writer.finish(current_metadata())
    return writer.rows


def _make_batch(
    rows: list[TraceRow], path: Path, first_row: int, order: OrderCheck | None
) -> pa.RecordBatch:
    batch = rows_to_batch(rows, path=path, first_row=first_row)
    columns: dict[str, Any] = dict(zip(batch.schema.names, batch.columns, strict=True))
    check_columns(columns, path=path, first_row=first_row)
    if order is not None:
        order.check(arrivals_ns(columns), columns["provided_session_id"].to_pylist(), first_row)
    return batch


def sort_trace(unsorted: Path, out: Path, *, overwrite: bool) -> None:
    """Write the rows of a trace in the format's order; rows with equal keys keep their order.

    Memory holds the rows of one part of the output. Each part reads the row groups that have its
    rows: one or two if the rows are almost sorted, as in a log that is ordered by the end of the
    requests.

    Args:
        unsorted: a file written by `write_trace`.
        out: the sorted trace to write.
        overwrite: replace an existing file.

    Raises:
        TraceError: the trace exists already, or a file cannot be written.
        OSError: the disk is full.
    """
    with pq.ParquetFile(unsorted) as file:
        metadata = TraceMetadata.from_key_values(file.metadata.metadata or {}, has_ns=True)
        by_session = metadata.clock is Clock.SESSION_RELATIVE
        with _create_parquet(out, overwrite=overwrite) as writer, _reported(out):
            for part in _sorted_parts(file, by_session=by_session):
                rows = max(1, min(MAX_BATCH_ROWS, _BATCH_BYTES * len(part) // max(1, part.nbytes)))
                for batch in part.combine_chunks().to_batches(max_chunksize=rows):
                    writer.add(batch)
            writer.finish(metadata)


def _sorted_parts(file: pq.ParquetFile, *, by_session: bool) -> Iterator[pa.Table]:
    """Yield the rows of a file in the format's order, in tables of bounded size.

    Args:
        file: the file.
        by_session: sort by session first, then by arrival.
    """
    groups = [file.metadata.row_group(group) for group in range(file.metadata.num_row_groups)]
    ends = np.cumsum([group.num_rows for group in groups])
    num_bytes = sum(group.total_byte_size for group in groups)
    most_rows = _PART_BATCHES * _BATCH_BYTES * file.metadata.num_rows // max(1, num_bytes)
    part_rows = max(1, min(_PART_BATCHES * MAX_BATCH_ROWS, most_rows))
    for wanted in _sorted_positions(file, by_session=by_session, most=part_rows):
        in_group = np.searchsorted(ends, wanted, side="right")
        pieces, positions = [], np.empty(len(wanted), dtype=np.int64)
        filled = 0
        for group in np.unique(in_group).tolist():
            chosen = np.flatnonzero(in_group == group)
            first = int(ends[group]) - groups[group].num_rows
            pieces.append(file.read_row_group(group).take(wanted[chosen] - first))
            positions[chosen] = np.arange(filled, filled + len(chosen))
            filled += len(chosen)
        yield pa.concat_tables(pieces).take(positions)


def _sorted_positions(
    file: pq.ParquetFile, *, by_session: bool, most: int
) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
    """Yield the positions of the rows in the format's order, at most `most` at a time.

    SQLite sorts them in temporary files, which it removes, also after a crash.
    """
    with closing(sqlite3.connect("", isolation_level=None)) as database:
        database.executescript(_SORT_TABLE)
        for group in range(file.metadata.num_row_groups):
            columns = [COLUMN_NS, "provided_session_id"] if by_session else [COLUMN_NS]
            table = file.read_row_group(group, columns=columns)
            sessions = table["provided_session_id"].to_pylist() if by_session else repeat(None)
            arrivals = table[COLUMN_NS].to_pylist()
            database.executemany(
                "INSERT INTO keys VALUES (?, ?)", zip(sessions, arrivals, strict=False)
            )
        found = database.execute(
            "SELECT rowid - 1 FROM keys ORDER BY session IS NULL, session, arrival_ns, rowid"
        )
        while positions := found.fetchmany(most):
            yield np.fromiter((position for (position,) in positions), np.int64, len(positions))


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    """Turn errors of SQLite's temporary files into those of `sort_trace`."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise TraceError(
            path, f"cannot be sorted in a temporary file ({error}); set TMPDIR to another folder"
        ) from error


class _GroupWriter:
    """Joins batches to row groups that grow with the trace.

    Args:
        writer: writer of the file.

    Attributes:
        rows: number of rows so far.
    """

    def __init__(self, writer: pq.ParquetWriter) -> None:
        self._writer = writer
        self._batches: list[pa.RecordBatch] = []
        self._group_rows = self._group_bytes = self._bytes = 0
        self.rows = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows to the current row group, and write it if it is large enough."""
        self._batches.append(batch)
        self.rows += batch.num_rows
        self._bytes += batch.nbytes
        self._group_rows += batch.num_rows
        self._group_bytes += batch.nbytes
        most_rows = min(max(MAX_BATCH_ROWS, self.rows // _GROUP_SHARE), _MAX_GROUP_ROWS)
        most_bytes = min(max(_BATCH_BYTES, self._bytes // _GROUP_SHARE), _MAX_GROUP_BYTES)
        if self._group_rows >= most_rows or self._group_bytes >= most_bytes:
            self._write()

    def finish(self, metadata: TraceMetadata) -> None:
        """Write the last row group and the file's metadata."""
        if self._batches:
            self._write()
        self._writer.add_key_value_metadata(metadata.to_key_values())

    def _write(self) -> None:
        table = pa.Table.from_batches(self._batches)
        self._writer.write_table(table, row_group_size=table.num_rows)
        self._batches = []
        self._group_rows = self._group_bytes = 0


@contextmanager
def _create_parquet(path: Path, *, overwrite: bool) -> Iterator[_GroupWriter]:
    with create_file(path, overwrite=overwrite) as sink:
        with pq.ParquetWriter(
            sink,
            TRACE_SCHEMA,
            compression="zstd",
            write_page_checksum=True,
            data_page_size=_PAGE_BYTES,
            dictionary_pagesize_limit=_PAGE_BYTES,
        ) as writer:
            yield _GroupWriter(writer)
        sink.flush()
        with Path(sink.name).open("r+b") as complete:
            write_digest_block(complete)


def _split_rows(rows: Iterable[TraceRow]) -> Iterator[list[TraceRow]]:
    """Yield the rows of batches with limits of rows and bytes; one prompt can take megabytes."""
    batch: list[TraceRow] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += 8 * len(row.total_hashes) + len(row.prompt or "") + len(row.output_text or "")
        if len(batch) >= MAX_BATCH_ROWS or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch

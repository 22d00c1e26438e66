"""Write a trace in a stream, check it, and rename it to its final name when it is complete."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
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

__all__ = ["MAX_GROUP_ROWS", "create_file", "reject_existing", "sort_trace", "write_trace"]

MAX_GROUP_ROWS: Final = 8192
"""Most rows of a row group."""
_GROUP_BYTES: Final = 8 << 20
# A trace is sorted in parts that have the rows of this many row groups.
_PART_GROUPS: Final = 16


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
    """Write all rows, one row group at a time; after an exception, no file is left behind.

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
    written = 0
    with _create_parquet(path, overwrite=overwrite) as writer:
        for group in _row_groups(rows):
            try:
                batch = _make_batch(group, path, written + 1, order)
            except RowError as error:
                raise (error if locate is None else locate(error)) from error
            writer.write_batch(batch)
            written += len(group)
        writer.add_key_value_metadata(current_metadata().to_key_values())
    return written


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

    Memory holds the keys of all rows, and the rows of one part of the output. Each part reads the
    row groups that have its rows: one or two if the rows are almost sorted, as in a log that is
    ordered by the end of the requests.

    Args:
        unsorted: a file written by `write_trace`.
        out: the sorted trace to write.
        overwrite: replace an existing file.
    """
    with pq.ParquetFile(unsorted) as file:
        metadata = TraceMetadata.from_key_values(file.metadata.metadata or {}, has_ns=True)
        keys = [(COLUMN_NS, "ascending")]
        if metadata.clock is Clock.SESSION_RELATIVE:
            keys.insert(0, ("provided_session_id", "ascending"))
        table = file.read(columns=[name for name, _ in keys])
        order = np.asarray(pc.sort_indices(table, sort_keys=keys), dtype=np.int64)  # stable
        with _create_parquet(out, overwrite=overwrite) as writer:
            for part in _split_order(file, order):
                rows = max(1, min(MAX_GROUP_ROWS, _GROUP_BYTES * len(part) // max(1, part.nbytes)))
                for start in range(0, len(part), rows):
                    writer.write_table(part.slice(start, rows))
            writer.add_key_value_metadata(metadata.to_key_values())


def _split_order(
    file: pq.ParquetFile, order: np.ndarray[Any, np.dtype[np.int64]]
) -> Iterator[pa.Table]:
    """Yield the rows of a file in an order, in tables of bounded size.

    Args:
        file: the file.
        order: positions of the rows, `[rows]`.
    """
    groups = [file.metadata.row_group(group) for group in range(file.metadata.num_row_groups)]
    ends = np.cumsum([group.num_rows for group in groups])
    part_rows = max(1, _PART_GROUPS * len(order) // max(1, len(groups)))
    for start in range(0, len(order), part_rows):
        wanted = order[start : start + part_rows]
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


@contextmanager
def _create_parquet(path: Path, *, overwrite: bool) -> Iterator[pq.ParquetWriter]:
    with create_file(path, overwrite=overwrite) as sink:
        with pq.ParquetWriter(
            sink, TRACE_SCHEMA, compression="zstd", write_page_checksum=True
        ) as writer:
            yield writer
        sink.flush()
        with Path(sink.name).open("r+b") as complete:
            write_digest_block(complete)


def _row_groups(rows: Iterable[TraceRow]) -> Iterator[list[TraceRow]]:
    """Yield row groups with limits for rows and bytes, as one prompt can take megabytes."""
    group: list[TraceRow] = []
    size = 0
    for row in rows:
        group.append(row)
        size += 8 * len(row.total_hashes) + len(row.prompt or "") + len(row.output_text or "")
        if len(group) >= MAX_GROUP_ROWS or size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group

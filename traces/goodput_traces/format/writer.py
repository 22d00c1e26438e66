"""Writing a trace: streamed, checked, and under its final name only when it is whole."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from goodput_traces.errors import TraceError
from goodput_traces.format.checks import OrderCheck, check_columns
from goodput_traces.format.columns import TRACE_SCHEMA, arrivals_ns, rows_to_batch
from goodput_traces.format.schema import COLUMN_NS, Clock, TraceMetadata
from goodput_traces.output import whole_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from goodput_traces.format.schema import TraceRow

__all__ = ["sort_trace", "write_trace"]

_SORT_REMEDY: Final = "sort them first"
_GROUP_ROWS: Final = 8192
_GROUP_BYTES: Final = 8 << 20


def write_trace(
    path: Path | str,
    rows: Iterable[TraceRow],
    metadata: TraceMetadata | Callable[[], TraceMetadata],
    *,
    overwrite: bool = False,
    ordered: bool = True,
    described_as: Path | None = None,
) -> int:
    """Write all rows, a row group at a time; when anything raises no file is left behind.

    Args:
        path: the trace to write.
        rows: in the format's order.
        metadata: what the file says about itself; a callable is asked again when the last row
            has been written, for counts that are known only then.
        overwrite: replace an existing file.
        ordered: refuse rows that are not in the format's order.
        described_as: the file that errors name, when the rows come from another one.

    Returns:
        How many rows were written.

    Raises:
        TraceError: the file exists already, its folder cannot be written, a row breaks a rule
            of the format, or the order is wrong.
    """
    path = Path(path)
    named = described_as or path

    def now() -> TraceMetadata:
        return metadata() if callable(metadata) else metadata

    order = OrderCheck(now().clock, named, _SORT_REMEDY) if ordered else None
    written = 0
    with (
        whole_file(path, overwrite=overwrite) as sink,
        pq.ParquetWriter(
            sink, TRACE_SCHEMA, compression="zstd", write_page_checksum=True
        ) as writer,
    ):
        for group in _groups(rows):
            try:
                batch = rows_to_batch(group)
            except (pa.ArrowException, OverflowError) as error:
                raise TraceError(named, f"a value does not fit its column ({error})") from error
            columns: dict[str, Any] = dict(zip(batch.schema.names, batch.columns, strict=True))
            check_columns(columns, path=named, first_row=written + 1)
            if order is not None:
                sessions = columns["provided_session_id"].to_pylist()
                order.check(arrivals_ns(columns), sessions, written + 1)
            writer.write_batch(batch)
            written += len(group)
        writer.add_key_value_metadata(now().to_key_values())
    return written


def _groups(rows: Iterable[TraceRow]) -> Iterator[list[TraceRow]]:
    """Row groups, bounded in rows and in bytes: prompts and hashes can be megabytes a row."""
    group: list[TraceRow] = []
    size = 0
    for row in rows:
        group.append(row)
        size += 8 * len(row.total_hashes) + len(row.prompt or "") + len(row.output_text or "")
        if len(group) >= _GROUP_ROWS or size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def sort_trace(unsorted: Path, out: Path, *, overwrite: bool) -> None:
    """Write the rows of a trace in the format's order; rows that tie keep theirs.

    Args:
        unsorted: a trace that `TraceWriter` wrote.
        out: where the sorted one goes.
        overwrite: replace it when it exists.
    """
    with pq.ParquetFile(unsorted) as file:
        metadata = TraceMetadata.from_key_values(file.metadata.metadata or {}, has_ns=True)
        table = file.read()
    keys = [(COLUMN_NS, "ascending")]
    if metadata.clock is Clock.SESSION_RELATIVE:
        keys.insert(0, ("provided_session_id", "ascending"))
    order = pc.sort_indices(table, sort_keys=keys)  # stable
    rows_per_group = max(1, min(8192, _GROUP_BYTES * len(order) // max(1, table.nbytes)))
    with (
        whole_file(out, overwrite=overwrite) as sink,
        pq.ParquetWriter(
            sink, table.schema, compression="zstd", write_page_checksum=True
        ) as writer,
    ):
        for start in range(0, len(order), rows_per_group):
            writer.write_table(table.take(order[start : start + rows_per_group]))
        writer.add_key_value_metadata(metadata.to_key_values())

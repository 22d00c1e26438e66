"""Writing a trace: streamed, checked, and under its final name only when it is whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import pyarrow as pa
import pyarrow.parquet as pq

from goodput_traces.checks import OrderCheck, check_columns
from goodput_traces.columns import arrivals_ns, rows_to_batch
from goodput_traces.errors import TraceError
from goodput_traces.schema import TRACE_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from goodput_traces.row import TraceRow
    from goodput_traces.schema import TraceMetadata

__all__ = ["TraceWriter", "refuse_existing", "write_trace"]

_SORT_REMEDY: Final = "sort the file, or add --sort"
_GROUP_ROWS: Final = 8192
_GROUP_BYTES: Final = 16 << 20


class TraceWriter:
    """Writes rows in order; `close` gives the file its name, an error leaves nothing behind.

    Args:
        path: the trace to write.
        metadata: what the file says about itself; a callable is asked when the last row has
            been written, for counts that are known only then.
        overwrite: replace an existing file.
        ordered: refuse rows that are not in the format's order.
        described_as: the file that errors name, when the rows come from another one.

    Raises:
        TraceError: the file exists already, or its folder cannot be written.
    """

    def __init__(
        self,
        path: Path | str,
        metadata: TraceMetadata | Callable[[], TraceMetadata],
        *,
        overwrite: bool = False,
        ordered: bool = True,
        described_as: Path | None = None,
    ) -> None:
        self.path = Path(path)
        self._named = described_as or self.path
        self.num_rows = 0
        self._metadata = metadata
        self._buffer: list[TraceRow] = []
        self._buffered_bytes = 0
        refuse_existing(self.path, overwrite=overwrite)
        first = metadata() if callable(metadata) else metadata
        self._order = OrderCheck(first.clock, self._named, _SORT_REMEDY) if ordered else None
        self._part = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        try:
            self._sink = self._part.open("wb")
        except OSError as error:
            raise TraceError(self.path, f"cannot be written ({error.strerror})") from error
        self._writer = pq.ParquetWriter(
            self._sink, TRACE_SCHEMA, compression="zstd", write_statistics=True
        )

    def write(self, row: TraceRow) -> None:
        """Append one row.

        Raises:
            TraceError: a row of this batch breaks a rule of the format.
        """
        self._buffer.append(row)
        self._buffered_bytes += (
            8 * len(row.total_hashes) + len(row.prompt or "") + len(row.output_text or "")
        )
        if len(self._buffer) >= _GROUP_ROWS or self._buffered_bytes >= _GROUP_BYTES:
            self._flush()

    def close(self) -> None:
        """Write the rest and the metadata, make it durable, and give the file its name."""
        self._flush()
        metadata = self._metadata() if callable(self._metadata) else self._metadata
        self._writer.add_key_value_metadata(metadata.to_key_values())
        self._writer.close()
        self._sink.flush()
        os.fsync(self._sink.fileno())
        self._sink.close()
        self._part.replace(self.path)

    def abandon(self) -> None:
        """Remove what was written; the final name is left as it was."""
        self._sink.close()
        self._part.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abandon()
            return
        try:
            self.close()
        except BaseException:
            self.abandon()
            raise

    def _flush(self) -> None:
        if not self._buffer:
            return
        try:
            batch = rows_to_batch(self._buffer)
        except (pa.ArrowException, OverflowError) as error:
            raise TraceError(self._named, f"a value does not fit its column ({error})") from error
        columns: dict[str, Any] = dict(zip(batch.schema.names, batch.columns, strict=True))
        first_row = self.num_rows + 1
        check_columns(columns, path=self._named, first_row=first_row)
        if self._order is not None:
            sessions = columns["provided_session_id"].to_pylist()
            self._order.check(arrivals_ns(columns), sessions, first_row)
        self._writer.write_batch(batch)
        self.num_rows += len(self._buffer)
        self._buffer.clear()
        self._buffered_bytes = 0


def write_trace(
    path: Path | str, rows: Iterable[TraceRow], metadata: TraceMetadata, *, overwrite: bool = False
) -> int:
    """Write all rows and return how many there were.

    Raises:
        TraceError: as `TraceWriter`.
    """
    with TraceWriter(path, metadata, overwrite=overwrite) as writer:
        for row in rows:
            writer.write(row)
    return writer.num_rows


def refuse_existing(path: Path, *, overwrite: bool) -> None:
    """Raise a `TraceError` when a file would be replaced without having been asked to."""
    if path.is_dir():
        raise TraceError(path, "this is a folder; name a file to write")
    if path.exists() and not overwrite:
        raise TraceError(path, "the file exists; name another, or add --force to replace it")

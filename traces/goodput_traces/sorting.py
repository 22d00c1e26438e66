"""Putting a trace in order: by arrival, or by session and then arrival.

The trace is held as Arrow columns while it is sorted, a fraction of what rows would take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow.compute as pc
import pyarrow.parquet as pq

from goodput_traces.output import whole_file
from goodput_traces.schema import COLUMN_NS, Clock, TraceMetadata

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["sort_trace"]

_GROUP_BYTES = 8 << 20


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

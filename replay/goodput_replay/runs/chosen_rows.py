"""Some rows of a run's records, of which only one row group at a time is in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from goodput_replay.runs.record_rows import decode_rows
from goodput_replay.runs.records import open_records, read_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from goodput_replay.runs.records import JudgedRecord

__all__ = ["read_chosen", "read_rows"]


def read_chosen(folder: Path, choose: Callable[[Any], Any]) -> Iterator[tuple[int, JudgedRecord]]:
    """Yield some rows of a run without their gaps, each with its index in the file.

    Args:
        folder: the run's folder.
        choose: returns the mask of the rows of a batch, an Arrow array.

    Raises:
        InputError: see `open_records`.
    """
    first = 0
    with open_records(folder) as opened:
        names = [n for n in opened.schema_arrow.names if n != "gaps_us"]
        for batch in read_batches(opened, names):
            mask = choose(batch)
            indices = first + np.flatnonzero(mask.to_numpy(zero_copy_only=False))
            yield from zip(indices.tolist(), decode_rows(batch.filter(mask)), strict=True)
            first += batch.num_rows


def read_rows(folder: Path, rows: Sequence[int], columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return some columns of a few rows, one row group at a time.

    Args:
        folder: the run's folder.
        rows: indices in the file, in any order.
        columns: names of the columns.

    Raises:
        InputError: see `open_records`.
    """
    found: dict[int, dict[str, Any]] = {}
    first = 0
    with open_records(folder) as opened:
        for group in range(opened.num_row_groups):
            size = opened.metadata.row_group(group).num_rows
            here = [row for row in rows if first <= row < first + size]
            if here:
                table = opened.read_row_group(group, columns=list(columns), use_threads=False)
                picked = table.take(pa.array([row - first for row in here])).to_pylist()
                found.update(zip(here, picked, strict=True))
            first += size
    return [found[row] for row in rows]

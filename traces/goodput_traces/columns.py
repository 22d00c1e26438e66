"""Rows to Arrow columns and back: the one place that knows both sides.

Reading a row costs a few microseconds, because a replay in virtual time reads hundreds of
thousands of them a second: columns become Python lists in bulk, absent ones are skipped.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from goodput_core.units import NS_PER_MS
from goodput_traces.row import TraceRow
from goodput_traces.schema import COLUMN_MS, COLUMN_NS, TRACE_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["arrivals_ns", "rows_from_columns", "rows_to_batch"]

_ROW_FIELDS: Final = tuple(field.name for field in fields(TraceRow))


def arrivals_ns(columns: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Arrivals of a batch in nanoseconds, `[rows]`; the nanosecond column wins."""
    if COLUMN_NS in columns:
        return np.asarray(columns[COLUMN_NS].to_numpy(zero_copy_only=False), dtype=np.int64)
    ms = np.asarray(columns[COLUMN_MS].to_numpy(zero_copy_only=False), dtype=np.int64)
    return ms * NS_PER_MS


def rows_from_columns(columns: Mapping[str, Any]) -> Iterator[TraceRow]:
    """The rows of one checked batch; zero output tokens become 1.

    Args:
        columns: Arrow arrays by column name, as `check_columns` passed them.
    """
    values: dict[str, list[Any]] = {
        name: _python_values(columns[name], name)
        for name in _ROW_FIELDS
        if name in columns and columns[name].null_count < len(columns[name])
    }
    values[COLUMN_NS] = arrivals_ns(columns).tolist()
    values["output_tokens"] = [tokens or 1 for tokens in values["output_tokens"]]
    names = tuple(values)
    for row in zip(*values.values(), strict=True):
        yield TraceRow(**dict(zip(names, row, strict=True)))


def _python_values(column: Any, name: str) -> list[Any]:
    if name == "total_hashes":
        return _hash_tuples(column)
    if name == "request_canceled":
        return [None if value is None else value == 1 for value in column.to_pylist()]
    if column.null_count == 0 and (
        pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    ):
        column = column.to_numpy(zero_copy_only=False)
        return list(column.tolist())
    return list(column.to_pylist())


def _hash_tuples(column: Any) -> list[tuple[int, ...]]:
    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    # `flatten` skips what nulls hide, so offsets are rebuilt from the lengths.
    flat: list[int] = column.flatten().to_numpy(zero_copy_only=False).tolist()
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    starts = [0, *ends[:-1]]
    return [tuple(flat[start:end]) for start, end in zip(starts, ends, strict=True)]


def rows_to_batch(rows: Sequence[TraceRow]) -> pa.RecordBatch:
    """One Arrow batch of `TRACE_SCHEMA`.

    Raises:
        pyarrow.ArrowInvalid: a value does not fit its column's type.
    """
    arrays = []
    for field in TRACE_SCHEMA:
        values: list[Any]
        if field.name == COLUMN_MS:
            values = [row.timestamp_start_unix_ns // NS_PER_MS for row in rows]
        elif field.name == "total_hashes":
            values = [row.total_hashes or None for row in rows]
        elif field.name == "request_canceled":
            flags = [row.request_canceled for row in rows]
            values = [None if flag is None else int(flag) for flag in flags]
        else:
            values = [getattr(row, field.name) for row in rows]
        arrays.append(pa.array(values, type=field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=TRACE_SCHEMA)

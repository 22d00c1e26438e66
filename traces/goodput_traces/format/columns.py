"""The Arrow schema of a trace, and the conversion of rows to Arrow columns and back.

Reading a row must cost only a few microseconds, because a replay in virtual time reads hundreds
of thousands of rows per second: columns become Python lists in bulk, absent ones are skipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from goodput_core.units import NS_PER_MS
from goodput_traces.format.schema import COLUMN_MS, COLUMN_NS, ROW_FIELDS, TraceRow

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["TRACE_SCHEMA", "arrivals_ns", "rows_from_columns", "rows_to_batch"]

TRACE_SCHEMA: Final[pa.Schema] = pa.schema(
    [
        pa.field("request_id", pa.string(), nullable=False),
        pa.field(COLUMN_MS, pa.int64(), nullable=False),
        pa.field(COLUMN_NS, pa.int64(), nullable=False),
        pa.field("input_tokens", pa.int64(), nullable=False),
        pa.field("output_tokens", pa.int64(), nullable=False),
        pa.field("max_output_tokens", pa.int64()),
        pa.field("prompt", pa.string()),
        pa.field("total_hashes", pa.list_(pa.int64())),
        pa.field("block_size", pa.int32()),
        pa.field("provided_session_id", pa.string()),
        pa.field("poor_man_session_id", pa.int64()),
        pa.field("turn", pa.int32()),
        pa.field("parent_request_id", pa.string()),
        pa.field("delay_ms", pa.float64()),
        pa.field("slo_class", pa.string()),
        pa.field("ttft_target_ms", pa.float64()),
        pa.field("tpot_target_ms", pa.float64()),
        pa.field("e2e_target_ms", pa.float64()),
        pa.field("priority", pa.int32()),
        pa.field("request_canceled", pa.int8()),
        pa.field("cancel_after_ms", pa.float64()),
        pa.field("duration_ttft_ms", pa.int64()),
        pa.field("duration_e2e_ms", pa.int64()),
        pa.field("model_name", pa.string()),
        pa.field("org_id", pa.string()),
        pa.field("request_type", pa.string()),
        pa.field("output_text", pa.string()),
    ]
)


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
        for name in ROW_FIELDS
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

"""The Arrow schema of a trace, and the conversion of rows to Arrow columns and back.

A row must be read in a few microseconds, because a replay in virtual time reads hundreds of
thousands of rows per second. Columns are therefore converted to Python lists at once, and absent
columns are skipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from goodput_core.units import NS_PER_MS
from goodput_traces.errors import RowError
from goodput_traces.format.schema import COLUMN_MS, COLUMN_NS, ROW_FIELDS, TraceRow

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

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
_CONVERSION_ERRORS: Final = (pa.ArrowException, OverflowError, UnicodeError)


def arrivals_ns(columns: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return arrivals in nanoseconds, `[rows]`; the nanosecond column is used if there is one."""
    if COLUMN_NS in columns:
        return np.asarray(columns[COLUMN_NS].to_numpy(zero_copy_only=False), dtype=np.int64)
    ms = np.asarray(columns[COLUMN_MS].to_numpy(zero_copy_only=False), dtype=np.int64)
    return ms * NS_PER_MS


def rows_from_columns(columns: Mapping[str, Any]) -> Iterator[TraceRow]:
    """Yield the rows of one batch; zero output tokens become 1.

    Args:
        columns: Arrow arrays by column name, checked by `check_columns`.
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
    # `flatten` skips the values of null lists, so the offsets are computed from the lengths.
    flat: list[int] = column.flatten().to_numpy(zero_copy_only=False).tolist()
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    starts = [0, *ends[:-1]]
    return [tuple(flat[start:end]) for start, end in zip(starts, ends, strict=True)]


def rows_to_batch(rows: Sequence[TraceRow], *, path: Path | str, first_row: int) -> pa.RecordBatch:
    """Convert rows to an Arrow batch of `TRACE_SCHEMA`.

    Args:
        rows: the rows, at least one.
        path: the file that is written, for errors.
        first_row: number of the first row, from 1.

    Raises:
        RowError: a value does not fit its column's type.
    """
    arrays = []
    for field in TRACE_SCHEMA:
        values = _column_values(rows, field.name)
        try:
            arrays.append(pa.array(values, type=field.type))
        except _CONVERSION_ERRORS as error:
            at = next((at for at, value in enumerate(values) if not _fits(value, field.type)), 0)
            raise RowError(
                path,
                first_row + at,
                field.name,
                f"the value does not fit {field.type}; correct it",
            ) from error
    return pa.RecordBatch.from_arrays(arrays, schema=TRACE_SCHEMA)


def _column_values(rows: Sequence[TraceRow], name: str) -> list[Any]:
    if name == COLUMN_MS:
        return [row.timestamp_start_unix_ns // NS_PER_MS for row in rows]
    if name == "total_hashes":
        return [row.total_hashes or None for row in rows]
    if name == "request_canceled":
        flags = [row.request_canceled for row in rows]
        return [None if flag is None else int(flag) for flag in flags]
    return [getattr(row, name) for row in rows]


def _fits(value: Any, expected: pa.DataType) -> bool:
    try:
        pa.array([value], type=expected)
    except _CONVERSION_ERRORS:
        return False
    return True

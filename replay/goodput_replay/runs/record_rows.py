"""The rows of `records.parquet` as records and judgements, whole columns at a time."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from goodput_core.slo.conformance import Deviation
from goodput_core.slo.judging import Judgement, JudgementKind, MissReason
from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.slo.targets import Targets
from goodput_replay.runs.records import (
    ADDED_COLUMNS,
    TARGET_COLUMNS,
    JudgedRecord,
    open_records,
    read_batches,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

__all__ = ["decode_rows", "read_judged", "read_records"]

_NO_TARGETS: Final = Targets()
_NO_BOUNDS: Final = (None,) * len(TARGET_COLUMNS)


def read_records(folder: Path, *, gaps: bool = True) -> Iterator[RequestRecord]:
    """Yield the requests of a run without warm-up rows, in the order they ended.

    Args:
        folder: the run's folder.
        gaps: if False, leave `gaps_us` empty and set `tbt_p99_us` instead. This is several times
            faster and gives the same judgements.

    Raises:
        InputError: see `open_records`.
    """
    return (row.record for row in read_judged(folder, gaps=gaps) if not row.warmup)


def read_judged(folder: Path, *, gaps: bool = True) -> Iterator[JudgedRecord]:
    """Yield every row of a run with its judgement, including warm-up rows; see `read_records`."""
    with open_records(folder) as opened:
        names = [n for n in opened.schema_arrow.names if gaps or n != "gaps_us"]
        for batch in read_batches(opened, names):
            yield from decode_rows(batch)


def decode_rows(batch: Any) -> Iterator[JudgedRecord]:
    """Yield the rows of a batch, in which columns of later versions and the gaps may be missing."""
    columns: dict[str, Any] = {
        name: _values(column)
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }
    for name, value in {**ADDED_COLUMNS, "gaps_us": ()}.items():
        columns.setdefault(name, [value] * batch.num_rows)
    del columns["attained"], columns["warmup"]
    judgements = zip(columns.pop("judgement"), columns.pop("miss_reasons"), strict=True)
    # Whole columns are converted, because files have many rows.
    columns["outcome"] = map(Outcome, columns["outcome"])
    columns["deviations"] = [
        tuple(map(Deviation, row)) if row else () for row in columns["deviations"]
    ]
    columns["gaps_us"] = list(map(tuple, columns["gaps_us"]))
    # Computed from the gaps if there are any.
    columns["tbt_p99_us"] = [
        None if gaps else p99_us
        for gaps, p99_us in zip(columns["gaps_us"], columns["tbt_p99_us"], strict=True)
    ]
    bounds = zip(*map(columns.pop, TARGET_COLUMNS), strict=True)
    columns["targets"] = [_NO_TARGETS if row == _NO_BOUNDS else _own_targets(row) for row in bounds]
    names = tuple(columns)
    for (kind, reasons), values in zip(
        judgements, zip(*columns.values(), strict=True), strict=True
    ):
        record = RequestRecord(**dict(zip(names, values, strict=True)))
        yield JudgedRecord(record, None if kind is None else _judgement(kind, tuple(reasons)))


def _values(column: Any) -> list[Any]:
    """Return the values of a column, several times faster than its `to_pylist` where possible."""
    if column.null_count == len(column):
        return [None] * len(column)
    if column.null_count:
        values: list[Any] = column.to_pylist()
    elif pa.types.is_dictionary(column.type):
        labels = column.dictionary.to_pylist()
        values = [labels[index] for index in column.indices.to_numpy().tolist()]
    elif pa.types.is_integer(column.type):
        values = column.to_numpy().tolist()
    elif pa.types.is_list(column.type):
        parts = _values(column.flatten())
        ends = (column.offsets.to_numpy() - column.offsets[0].as_py()).tolist()
        values = [parts[start:end] for start, end in pairwise(ends)]
    else:
        values = column.to_pylist()
    return values


def _own_targets(bounds: Iterable[int | None]) -> Targets:
    """Return the targets of a row from its columns, in the order of `TARGET_COLUMNS`."""
    return Targets(**dict(zip(TARGET_COLUMNS.values(), bounds, strict=True)))


@cache
def _judgement(kind: str, reasons: tuple[str, ...]) -> Judgement:
    return Judgement(kind=JudgementKind(kind), reasons=tuple(map(MissReason, reasons)))

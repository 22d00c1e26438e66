"""Fixtures of the traces' tests: `goodput trace`, rows, and Parquet files of other tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from goodput_core.dispatch import run_command
from goodput_traces.format.columns import TRACE_SCHEMA
from goodput_traces.format.schema import TraceRow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


class CommandResult(NamedTuple):
    code: int
    out: str
    err: str


RunTrace: TypeAlias = "Callable[..., CommandResult]"
MakeRows: TypeAlias = "Callable[..., list[TraceRow]]"
WriteColumns: TypeAlias = "Callable[..., Path]"


@pytest.fixture
def run_trace(capsys: pytest.CaptureFixture[str]) -> RunTrace:
    """Run `goodput trace …` through the dispatcher, as the shell would."""

    def run(*argv: str | Path) -> CommandResult:
        capsys.readouterr()
        code = run_command(["trace", *map(str, argv)])
        captured = capsys.readouterr()
        return CommandResult(int(code), captured.out, captured.err)

    return run


@pytest.fixture
def make_rows() -> MakeRows:
    """Make rows with arrivals every 100 ms, or at `arrivals_ns`."""

    def make(count: int = 3, arrivals_ns: Sequence[int] | None = None) -> list[TraceRow]:
        times = arrivals_ns or [1_000_000_000 + at * 100_000_000 for at in range(count)]
        return [
            TraceRow(
                request_id=f"r{at}",
                timestamp_start_unix_ns=time,
                input_tokens=100 + at,
                output_tokens=10 + at,
            )
            for at, time in enumerate(times)
        ]

    return make


@pytest.fixture
def write_columns(tmp_path: Path) -> WriteColumns:
    """Write a Parquet file with any columns, unchecked, as another tool might."""

    def write(
        columns: dict[str, Sequence[object]],
        *,
        types: dict[str, pa.DataType] | None = None,
        metadata: dict[str, str] | None = None,
        row_group_size: int | None = None,
    ) -> Path:
        arrays = {
            name: pa.array(
                list(values),
                type=(types or {}).get(
                    name, TRACE_SCHEMA.field(name).type if name in TRACE_SCHEMA.names else None
                ),
            )
            for name, values in columns.items()
        }
        path = tmp_path / "foreign.parquet"
        table = pa.table(arrays).replace_schema_metadata(metadata)
        pq.write_table(table, path, row_group_size=row_group_size)
        return path

    return write

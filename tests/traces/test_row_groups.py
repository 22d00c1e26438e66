"""The index of a trace's row groups: their number, and the memory of the check of the footer."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
from tests.builders.traces import steady_rows, write_rows

import goodput_traces.format.writer as writer_module
from goodput_traces.format.columns import TRACE_SCHEMA
from goodput_traces.format.integrity import check_file
from goodput_traces.format.reader import open_trace

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_row_groups_grow_with_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "MAX_BATCH_ROWS", 4)
    monkeypatch.setattr(writer_module, "_MAX_GROUP_ROWS", 32)
    rows = list(steady_rows(1_003))
    path = write_rows(tmp_path / "t.parquet", rows)
    metadata = pq.read_metadata(path)
    sizes = [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
    assert sizes[0] == 4
    assert max(sizes) == 32
    assert sizes[:-1] == sorted(sizes[:-1]), "the last one has the rest"
    assert [row.request_id for row in open_trace(path).rows()] == [row.request_id for row in rows]


def test_a_row_group_is_small_if_its_rows_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_BATCH_BYTES", 1000)
    monkeypatch.setattr(writer_module, "_MAX_GROUP_BYTES", 2000)
    path = write_rows(tmp_path / "t.parquet", steady_rows(40, prompt="x" * 900))
    metadata = pq.read_metadata(path)
    assert {metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)} == {2}


def test_the_check_of_the_footer_holds_one_row_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "MAX_BATCH_ROWS", 1)
    monkeypatch.setattr(writer_module, "_MAX_GROUP_ROWS", 1)
    peaks = {}
    for groups in (20, 70):
        path = write_rows(tmp_path / f"{groups}.parquet", steady_rows(groups))
        with path.open("rb") as file:
            tracemalloc.start()
            layout = check_file(file, TRACE_SCHEMA.names)
            peaks[groups] = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert len(layout.group_bytes) == groups
    added = (peaks[70] - peaks[20]) / 50
    assert added < 10_000, "the footer has 3 kB for each, and its decoded form takes 50 kB"

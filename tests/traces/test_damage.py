"""A damaged Parquet file gives one sentence or exactly the original rows; never a traceback.

GOODPUT_FUZZ_CASES sets the number of mutations per kind of file.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from goodput_traces.errors import TraceError
from goodput_traces.format.reader import open_trace
from goodput_traces.format.schema import TraceMetadata, TraceRow
from goodput_traces.format.writer import write_trace
from goodput_traces.importers.run import import_trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CASES = int(os.environ.get("GOODPUT_FUZZ_CASES", "150"))
ROWS = [
    TraceRow(
        request_id=f"r{at}",
        timestamp_start_unix_ns=10**9 + at * 10**8,
        input_tokens=100 + at,
        output_tokens=at % 7 + 1,
        total_hashes=tuple(range(at % 5)),
        block_size=16 if at % 5 else None,
        slo_class=("batch", "chat", None)[at % 3],
        ttft_target_ms=None if at % 4 else 250.5,
    )
    for at in range(400)
]


def by_our_writer(path: Path) -> None:
    write_trace(path, ROWS, TraceMetadata(source="a test"))


def by_pyarrow(path: Path) -> None:
    by_our_writer(path)
    table = pq.read_table(path).replace_schema_metadata(None)
    pq.write_table(table, path, write_page_checksum=True)


def by_pyarrow_in_groups(path: Path) -> None:
    by_our_writer(path)
    table = pq.read_table(path).drop_columns(["timestamp_start_unix_ms"])
    pq.write_table(
        table,
        path,
        compression="none",
        row_group_size=100,
        data_page_version="2.0",
        write_page_checksum=True,
    )


def by_pyarrow_without_checksums(path: Path) -> None:
    by_our_writer(path)
    pq.write_table(pq.read_table(path).replace_schema_metadata(None), path, compression="none")


def mutated(content: bytes, seed: int) -> bytes:
    """Flip bits, overwrite, remove or repeat a part; half of the time in the footer."""
    rng = random.Random(seed)
    data = bytearray(content)
    footer_start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")

    def place() -> int:
        return rng.randrange(footer_start if rng.random() < 0.5 else 0, len(data))

    kind = rng.choice(["flip", "flip", "byte", "truncate", "remove", "repeat", "zero"])
    at, length = place(), rng.randrange(1, 64)
    if kind == "flip":
        for _ in range(rng.choice([1, 1, 2, 4])):
            data[place()] ^= 1 << rng.randrange(8)
    elif kind == "byte":
        data[at] = rng.randrange(256)
    elif kind == "truncate":
        del data[at:]
    elif kind == "remove":
        del data[at : at + length]
    elif kind == "repeat":
        data[at:at] = data[at : at + length]
    else:
        end = min(len(data), at + length)
        data[at:end] = bytes(end - at)
    return bytes(data)


def read(path: Path) -> list[TraceRow]:
    return list(open_trace(path).rows())


def imported(path: Path) -> list[TraceRow]:
    out = path.with_suffix(".imported")
    import_trace((path,), out, form="baseten", overwrite=True)
    return read(out)


def outcome(load: Callable[[Path], list[TraceRow]], path: Path) -> list[TraceRow] | None:
    """Return the rows, or None if the file is rejected with one sentence."""
    try:
        return load(path)
    except TraceError as error:
        sentence = str(error)
    assert sentence.startswith(f"{path}: ")
    assert sentence.isprintable()
    assert len(sentence) < 500 + len(str(path))
    return None


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "write", [by_our_writer, by_pyarrow, by_pyarrow_in_groups], ids=lambda write: write.__name__
)
@pytest.mark.parametrize("load", [read, imported], ids=lambda load: load.__name__)
def test_a_mutated_file_is_rejected_or_unchanged(
    load: Callable[[Path], list[TraceRow]], write: Callable[[Path], None], tmp_path: Path
) -> None:
    original, path = tmp_path / "original.parquet", tmp_path / "mutated.parquet"
    write(original)
    assert outcome(load, original) == ROWS
    content = original.read_bytes()
    changed = []
    for seed in range(CASES):
        path.write_bytes(mutated(content, seed))
        rows = outcome(load, path)
        if rows is not None and rows != ROWS:
            changed.append(seed)
    assert changed == []


@pytest.mark.timeout(600)
def test_a_mutated_file_without_checksums_never_ends_in_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "mutated.parquet"
    by_pyarrow_without_checksums(path)
    content = path.read_bytes()
    for seed in range(CASES):
        path.write_bytes(mutated(content, seed))
        rows = outcome(read, path)
        assert rows is None or len(rows) == len(ROWS)


def parquet_footer(footer: bytes) -> bytes:
    """Return a Parquet file without data."""
    return b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"


@pytest.mark.parametrize(
    "footer",
    [
        # Field 2: the schema, a list of a struct without children; field 3: no rows;
        # field 4: row groups, a list of one number.
        b"\x29\x1c\x55\x00\x00\x16\x00\x19\x15\x00\x00",
        b"\x29\x15\x00\x16\x00\x19\x0c\x00",  # the schema is a list of one number
        b"\x29\x0c\x16\x00\x19\x0c\x00",  # the schema is empty
    ],
    ids=["row group", "schema element", "no schema"],
)
def test_a_footer_with_values_in_place_of_structs_is_rejected(
    footer: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(parquet_footer(footer))
    with pytest.raises(TraceError, match="the footer or a page header lacks a field"):
        open_trace(path)


def test_every_single_damaged_byte_of_a_trace_is_found(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_trace(path, ROWS[:3], TraceMetadata())
    content = path.read_bytes()
    rng = random.Random(0)
    for at in rng.sample(range(4, len(content)), 200):
        data = bytearray(content)
        data[at] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        with pytest.raises(TraceError):
            open_trace(path)


def test_a_trace_rewritten_by_another_tool_has_no_digest_and_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    by_our_writer(path)
    assert b"GPdigest" in path.read_bytes()
    pq.write_table(pq.read_table(path), path)
    assert b"GPdigest" not in path.read_bytes()
    assert read(path) == ROWS

"""Small files with a large decoded size are rejected in bounded memory."""

from __future__ import annotations

import bz2
import gzip
import lzma
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from goodput_core.dispatch import run_command
from goodput_traces.errors import TooLargeError
from goodput_traces.format.reader import open_trace
from goodput_traces.importers import source as source_module

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.traces.conftest import RunTrace


MIB = 1 << 20
MOON = b'{"timestamp": 0, "input_length": 600, "output_length": 1}\n'


def columns(rows: int) -> dict[str, Any]:
    return {
        "request_id": pa.array(["r"] * rows).dictionary_encode(),
        "timestamp_start_unix_ns": pa.array([0] * rows, pa.int64()),
        "input_tokens": pa.array([1] * rows, pa.int64()),
        "output_tokens": pa.array([1] * rows, pa.int64()),
    }


def repeated_text(path: Path) -> None:
    """Write one text of 256 KiB 8,192 times: 2 GiB."""
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 8192, pa.int32()), ["x" * (256 << 10)])
    pq.write_table(pa.table(columns(8192) | {"prompt": text}), path, compression="zstd")


def one_long_list(path: Path) -> None:
    """Write one row of eight million equal hashes: 64 MiB."""
    equal = pa.repeat(pa.scalar(7, pa.int64()), 8 * MIB)
    hashes = pa.ListArray.from_arrays([0, 8 * MIB], equal)
    sizes = pa.array([16], pa.int32())
    table = pa.table(columns(1) | {"total_hashes": hashes, "block_size": sizes})
    pq.write_table(table, path, compression="zstd")


def many_equal_rows(path: Path, rows: int = 3_000_000) -> None:
    """Write three million equal rows: 68 MiB of numbers."""
    number = pa.repeat(pa.scalar(1, pa.int64()), rows)
    names = ("timestamp_start_unix_ns", "input_tokens", "output_tokens")
    ids = pa.repeat(pa.scalar("r"), rows)
    table = pa.table({"request_id": ids, **dict.fromkeys(names, number)})
    pq.write_table(table, path, compression="zstd")


def one_large_page(path: Path) -> None:
    """Write a text of 64 MiB, in one page."""
    table = pa.table(columns(1) | {"prompt": pa.array(["x" * (64 * MIB)])})
    pq.write_table(table, path, compression="zstd", use_dictionary=False)


def peak_mib(*argv: str | Path) -> tuple[int, str, int]:
    """Return exit code, stderr and peak memory of `goodput trace ARGV` in a child process."""
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from goodput_core.dispatch import run_command\n"
        "code = run_command(['trace', *sys.argv[1:]])\n"
        "status = Path('/proc/self/status').read_text()\n"
        "print(status.partition('VmHWM:')[2].split()[0])\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *argv], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr, int(done.stdout) // 1024


@pytest.mark.parametrize(
    "write",
    [repeated_text, one_long_list, many_equal_rows, one_large_page],
    ids=lambda write: write.__name__,
)
@pytest.mark.parametrize("command", ["export", "import"])
def test_a_parquet_file_that_decodes_to_much_is_rejected_in_bounded_memory(
    command: str, write: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "small.parquet"
    write(path)
    assert path.stat().st_size < 64 << 10
    form = "mooncake" if command == "export" else "baseten"
    argv = (command, path, "-o", tmp_path / "out", "--format", form)
    code, stderr, mib = peak_mib(*argv, "--max-decoded-size", "32MiB")
    assert (code, stderr.count("\n")) == (64, 1)
    assert "the file decodes to more than the limit of 32 MiB" in stderr
    assert "--max-decoded-size" in stderr
    assert mib < 256


def test_a_file_of_three_kilobytes_is_rejected_at_256_mib(tmp_path: Path) -> None:
    path = tmp_path / "small.parquet"
    repeated_text(path)
    assert path.stat().st_size < 4096
    code, stderr, mib = peak_mib("export", path, "-o", tmp_path / "out", "--format", "mooncake")
    assert (code, "the file decodes to more than the limit of 256 MiB" in stderr) == (64, True)
    assert mib < 256


def test_the_limit_can_be_raised_and_lowered(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    repeated_text(path)
    trace = open_trace(path, max_decoded_bytes=3 << 30)
    first = next(trace.rows())
    assert len(first.prompt or "") == 256 << 10
    with pytest.raises(TooLargeError, match="more than the limit of 1 MiB"):
        list(open_trace(path, max_decoded_bytes=MIB).rows())


def test_the_limit_is_an_option(
    tmp_path: Path, run_trace: RunTrace, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.parquet"
    many_equal_rows(path)
    outcome = run_trace("describe", path, "--max-decoded-size", "64MiB")
    assert (outcome.code, "more than the limit of 64 MiB" in outcome.err) == (64, True)
    assert run_trace("describe", path, "--max-decoded-size", "1GiB").code == 0
    replayed = run_command(
        ["replay", "--dry-run", "--trace", str(path), "--max-decoded-size", "64MiB"]
    )
    assert (replayed, "more than the limit of 64 MiB" in capsys.readouterr().err) == (64, True)
    wrong = run_trace("describe", path, "--max-decoded-size", "much")
    assert (wrong.code, "write for example 512MiB" in wrong.err) == (64, True)


@pytest.mark.parametrize(
    "compress",
    [
        gzip.compress,
        lzma.compress,
        bz2.compress,
        lambda data: pa.compress(data, "zstd", asbytes=True),
    ],
    ids=["gzip", "xz", "bzip2", "zstd"],
)
def test_a_compressed_source_that_expands_is_rejected(
    compress: Callable[[bytes], bytes], tmp_path: Path, run_trace: RunTrace
) -> None:
    path = tmp_path / "source"
    path.write_bytes(compress(MOON * 100_000))
    outcome = run_trace("import", path, "--out", tmp_path / "out", "--max-decoded-size", "2MiB")
    assert outcome.code == 64
    assert f"{path}: the file decodes to more than the limit of 2 MiB" in outcome.err
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def test_a_compressed_parquet_source_that_expands_is_rejected(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    inner = tmp_path / "inner.parquet"
    repeated_text(inner)
    path = tmp_path / "source"
    path.write_bytes(gzip.compress(inner.read_bytes()))
    outcome = run_trace("import", path, "--out", tmp_path / "out")
    assert outcome.code == 64
    assert "the file decodes to more than the limit of 1,024 MiB" in outcome.err


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            b'timestamp,input_length,output_length\n0,1,"' + b"x,\n" * 800_000,
            "line 2 is longer than 2 MiB or 1,000,000 lines; check that every quote is closed",
        ),
        (
            b'timestamp,input_length,output_length\n0,1,"' + b"\n" * 1_100_000,
            "the record that starts on line 2 is longer than",
        ),
        (MOON + b"\n" * 1_100_000, "line 1000002 ends more than 1,000,000 blank lines in a row"),
        (
            b"timestamp,input_length,output_length\n" + b"\n" * 1_100_000,
            "ends more than 1,000,000 blank lines in a row",
        ),
        (b"\n" * 5_000, "the file starts with 4 KiB of blank lines"),
    ],
    ids=["long record", "many lines", "blank JSON lines", "blank CSV lines", "blank start"],
)
def test_a_source_with_an_endless_record_or_blank_lines_is_rejected(
    content: bytes,
    sentence: str,
    tmp_path: Path,
    run_trace: RunTrace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source_module, "MAX_LINE_BYTES", 2 * MIB)
    path = tmp_path / "source"
    path.write_bytes(content)
    outcome = run_trace("import", path, "--out", tmp_path / "out")
    assert (outcome.code, sentence in outcome.err) == (64, True), outcome.err


def test_a_quoted_text_keeps_its_lines(tmp_path: Path, run_trace: RunTrace) -> None:
    path = tmp_path / "source"
    path.write_bytes(
        b"timestamp_start_unix_ms,input_tokens,output_tokens,prompt\n"
        b'1,1,1,"two\nlines"\n2,1,1,"one\r\nmore"\n3,1,1,x\n'
    )
    assert run_trace("import", path, "--out", tmp_path / "out.parquet").code == 0
    prompts = [row.prompt for row in open_trace(tmp_path / "out.parquet").rows()]
    assert prompts == ["two\nlines", "one\nmore", "x"]

"""Records out of a file: CSV, JSON lines or Parquet, compressed or not, told by their bytes.

Names and suffixes lie, so both the compression and the container are recognised from the first
bytes. Everything is streamed and bounded: a line, a value and the nesting of JSON have limits,
and a truncated file ends in one sentence. What the records mean is the importers' business.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import lzma
import shutil
import tempfile
import zlib
from contextlib import contextmanager
from enum import StrEnum
from typing import IO, TYPE_CHECKING, Any, Final, cast

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from goodput_traces.errors import TraceError
from goodput_traces.format.parquet_file import batch_rows, first_line
from goodput_traces.importers.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["MAX_LINE_BYTES", "Container", "parquet_metadata", "read_records", "recognise"]

MAX_LINE_BYTES: Final = 64 << 20
_CHUNK: Final = 1 << 20
_MAGIC: Final = {
    b"\x1f\x8b": "gzip",
    b"\xfd7zXZ\x00": "xz",
    b"(\xb5/\xfd": "zstd",
    b"BZh": "bzip2",
}


class Container(StrEnum):
    """How a source lays out its records."""

    CSV = "CSV"
    JSONL = "JSON lines"
    PARQUET = "Parquet"


def recognise(path: Path) -> Container:
    """Which container a file is, by its first bytes after decompression.

    Raises:
        TraceError: the file cannot be read, or is empty.
    """
    with _decompressed(path) as stream:
        head = stream.read(4096)
    if not head.strip(b"\xef\xbb\xbf \t\r\n"):
        raise TraceError(path, "the file is empty; there is nothing to import")
    if head[:4] == b"PAR1":
        return Container.PARQUET
    return Container.JSONL if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in b"{[" else Container.CSV


def read_records(
    path: Path, container: Container, on_bytes: Callable[[int], None] | None = None
) -> Iterator[Record]:
    """The records in the file's order.

    Args:
        path: the file, as the user named it.
        container: from `recognise`.
        on_bytes: told how far into the (compressed) file reading has come.

    Raises:
        TraceError: a damaged file, or a line that is no record; names the line.
    """
    if container is Container.PARQUET:
        yield from _parquet_records(path)
        return
    with _decompressed(path, on_bytes) as stream:
        lines = _lines(stream, path)
        if container is Container.JSONL:
            yield from _json_records(lines, path)
        else:
            yield from _csv_records(lines, path)


def parquet_metadata(path: Path) -> dict[bytes, bytes]:
    """The key-value metadata of a Parquet source.

    Raises:
        TraceError: the file is damaged.
    """
    with _parquet_file(path) as file:
        return dict(file.metadata.metadata or {})


@contextmanager
def _decompressed(path: Path, on_bytes: Callable[[int], None] | None = None) -> Iterator[IO[bytes]]:
    try:
        raw = path.open("rb")
    except FileNotFoundError as error:
        raise TraceError(path, "no such file; check the path") from error
    except OSError as error:
        raise TraceError(path, f"cannot be read ({error.strerror}); check the path") from error
    with raw:
        head = raw.read(8)
        raw.seek(0)
        kind = next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)
        watched = cast("IO[bytes]", _Watched(raw, on_bytes)) if on_bytes else raw
        try:
            yield _opened(watched, kind)
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, pa.ArrowException) as error:
            raise _damaged(path, kind, error) from error
        except OSError as error:
            # bz2 and pyarrow's zstd report broken data as OSError without an errno.
            if error.errno is not None:
                raise
            raise _damaged(path, kind, error) from error


def _opened(raw: IO[bytes], kind: str | None) -> IO[bytes]:
    if kind == "gzip":
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
    if kind == "xz":
        return lzma.LZMAFile(raw)
    if kind == "bzip2":
        return bz2.BZ2File(raw)
    if kind == "zstd":
        return cast("IO[bytes]", pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd"))
    return raw


def _damaged(path: Path, kind: str | None, error: BaseException) -> TraceError:
    return TraceError(
        path,
        f"the {kind or 'file'} data is truncated or damaged ({first_line(error)}); copy it again",
    )


class _Watched:
    """A binary file that tells how far it has been read; only what decompressors call."""

    def __init__(self, raw: IO[bytes], on_bytes: Callable[[int], None]) -> None:
        self._raw = raw
        self._on_bytes = on_bytes
        self.closed = False

    def read(self, size: int = -1) -> bytes:
        data = self._raw.read(size)
        self._on_bytes(self._raw.tell())
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._raw.seek(offset, whence)

    def tell(self) -> int:
        return self._raw.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


def _lines(stream: IO[bytes], path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines without their ends; none longer than the limit is ever held."""
    pending = bytearray()
    number = 0
    while True:
        chunk = stream.read(_CHUNK)
        if not chunk:
            break
        *whole, rest = chunk.split(b"\n")
        for piece in whole:
            number += 1
            yield number, _text(bytes(pending + piece), number, path)
            pending.clear()
        pending += rest
        if len(pending) > MAX_LINE_BYTES:
            raise TraceError(
                path,
                f"line {number + 1} is longer than {MAX_LINE_BYTES >> 20} MiB; "
                "this is not a file of one record per line",
            )
    if pending:
        yield number + 1, _text(bytes(pending), number + 1, path)


def _text(line: bytes, number: int, path: Path) -> str:
    if number == 1:
        line = line.removeprefix(b"\xef\xbb\xbf")
    try:
        return line.removesuffix(b"\r").decode()
    except UnicodeDecodeError as error:
        raise TraceError(path, f"line {number} is not UTF-8 text; convert the file") from error


def _json_records(lines: Iterator[tuple[int, str]], path: Path) -> Iterator[Record]:
    decode = msgspec.json.Decoder().decode
    for number, line in lines:
        if not line.strip():
            continue
        try:
            values = decode(line)
        except (msgspec.DecodeError, RecursionError, UnicodeError, ValueError) as error:
            reason = str(error).replace("malformed (", "(")[:160]
            raise TraceError(
                path, f"line {number} is not valid JSON: {reason}; correct or remove the line"
            ) from error
        if not isinstance(values, dict):
            raise TraceError(
                path,
                f"line {number} is not a JSON object; write one object per line (JSON lines)",
            )
        yield Record(path=path, number=number, unit="line", values=values)


def _csv_records(lines: Iterator[tuple[int, str]], path: Path) -> Iterator[Record]:
    # The module's own limit of 128 KiB is too small for a column of prompts.
    csv.field_size_limit(MAX_LINE_BYTES)
    reader = csv.reader((line for _, line in lines), strict=True)
    header: list[str] | None = None
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise TraceError(
                path, f"line {reader.line_num} is not valid CSV ({error}); correct the line"
            ) from error
        if cells is None:
            return
        if not cells:
            continue
        if header is None:
            header = [name.strip() for name in cells]
            if len(set(header)) < len(header):
                raise TraceError(path, "the CSV header names a column twice; rename one")
            continue
        if len(cells) != len(header):
            raise TraceError(
                path,
                f"line {reader.line_num} has {len(cells)} cells, the header has {len(header)}; "
                "correct or remove the line",
            )
        values: dict[str, Any] = {
            name: cell if cell.strip() else None for name, cell in zip(header, cells, strict=True)
        }
        yield Record(path=path, number=reader.line_num, unit="line", values=values)


def _parquet_records(path: Path) -> Iterator[Record]:
    with _parquet_file(path) as file:
        number = 0
        for group in range(file.metadata.num_row_groups):
            rows = batch_rows(file.metadata.row_group(group))
            for batch in file.iter_batches(batch_size=rows, row_groups=[group]):
                for values in batch.to_pylist():
                    number += 1
                    yield Record(path=path, number=number, unit="row", values=values)


@contextmanager
def _parquet_file(path: Path) -> Iterator[pq.ParquetFile]:
    with _decompressed(path) as stream, tempfile.TemporaryFile() as spool:
        seekable: IO[bytes] = stream
        if isinstance(stream, gzip.GzipFile | lzma.LZMAFile | bz2.BZ2File | pa.NativeFile):
            shutil.copyfileobj(stream, spool, _CHUNK)  # Parquet is read from its end
            spool.seek(0)
            seekable = spool
        try:
            with pq.ParquetFile(seekable, buffer_size=_CHUNK, pre_buffer=False) as file:
                yield file
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _damaged(path, "Parquet", error) from error

"""Records of a source file: CSV, JSON lines, Parquet or lines of a log, compressed or not.

Names and suffixes can be wrong, so compression and container are recognised from the first bytes.
Everything is streamed, and every size has a limit: a line, a record, blank lines in a row, and the
size after decompression. The importers interpret the records.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import shutil
import tempfile
import zlib
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, cast

import msgspec
import pyarrow as pa

from goodput_traces.errors import TooLargeError, TraceError
from goodput_traces.format.parquet_file import first_line, open_binary, open_parquet
from goodput_traces.importers.line_format import LineFormat
from goodput_traces.importers.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from goodput_traces.format.parquet_file import ParquetTrace

__all__ = ["MAX_LINE_BYTES", "Container", "Source", "recognise"]

MAX_LINE_BYTES: Final = 64 << 20
_MAX_RECORD_LINES: Final = 1_000_000
_MAX_BLANK_LINES: Final = 1_000_000
_CHUNK: Final = 1 << 20
# Compressed JSON lines with many equal hashes expand 350 times.
_MIN_LIMIT_BYTES: Final = 1 << 30
_MAX_EXPANSION: Final = 1024
_HEAD_BYTES: Final = 4096
_OTHER_DELIMITERS: Final = "\t;|"
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_WHITE: Final = _BYTE_ORDER_MARK + b" \t\r\n"
_MAGIC: Final = {
    b"\x1f\x8b": "gzip",
    b"\xfd7zXZ\x00": "xz",
    b"(\xb5/\xfd": "zstd",
    b"BZh": "bzip2",
}


class Container(StrEnum):
    """Layout of the records in a source."""

    CSV = "CSV"
    JSONL = "JSON lines"
    PARQUET = "Parquet"
    LINES = "lines"
    """Lines whose format a map of columns gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file to import, with its compression and container; it can be read any number of times.

    Args:
        path: the file, as the user named it.
        compression: name of the compression; None if the file is not compressed.
        container: from `recognise`.
        max_decoded_bytes: largest size after decompression; a larger file is rejected. None for
            the default.
        line_format: format of the lines of a log; None for other containers.
    """

    path: Path
    compression: str | None
    container: Container
    max_decoded_bytes: int | None = None
    line_format: LineFormat | None = None

    def records(
        self, columns: Collection[str], on_bytes: Callable[[int], None] | None = None
    ) -> Iterator[Record]:
        """Yield the records in the file's order.

        Args:
            columns: columns of a Parquet file to read; every record has None for the others.
            on_bytes: called with the number of (compressed) bytes read so far.

        Raises:
            TraceError: a damaged or too large file, or a line that is not a record; names the
                line.
        """
        if self.container is Container.PARQUET:
            yield from self._parquet_records(columns)
            return
        with _open_decompressed(
            self.path, self.compression, self.max_decoded_bytes, on_bytes
        ) as stream:
            lines = _lines(stream, self.path)
            if self.line_format is not None:
                yield from _log_records(lines, self.path, self.line_format)
            elif self.container is Container.JSONL:
                yield from _json_records(lines, self.path)
            else:
                yield from _csv_records(lines, self.path)

    def key_values(self) -> dict[bytes, bytes]:
        """Return the key-value metadata of a Parquet source.

        Raises:
            TraceError: the file is damaged.
        """
        with self._parquet() as file:
            return file.key_values

    def columns(self, first: Record) -> Collection[str] | None:
        """Return all columns, given the first record; None if later records can have others."""
        if self.line_format is not None:
            return self.line_format.names
        return None if self.container is Container.JSONL else first.values

    def columns_line(self) -> int | None:
        """Return the number of the line that names the columns; None for a Parquet source.

        Raises:
            TraceError: the file is damaged.
        """
        if self.container is Container.PARQUET:
            return None
        with _open_decompressed(self.path, self.compression, self.max_decoded_bytes) as stream:
            return next(number for number, line in _lines(stream, self.path) if line.strip())

    def _parquet_records(self, columns: Collection[str]) -> Iterator[Record]:
        with self._parquet(columns) as file:
            names = [name for name in file.names if name in columns]
            other_values = dict.fromkeys(name for name in file.names if name not in columns)
            number = 0
            for batch in file.batches(names, range(len(file.layout.group_bytes))):
                for row in _convert_rows(batch, self.path, number + 1):
                    number += 1
                    values = {**row, **other_values}
                    yield Record(path=self.path, number=number, unit="row", values=values)

    @contextmanager
    def _parquet(self, columns: Collection[str] = ()) -> Iterator[ParquetTrace]:
        limit = self.max_decoded_bytes
        if self.compression is None:
            with open_parquet(self.path, names=columns, max_decoded_bytes=limit) as file:
                yield file
            return
        with tempfile.TemporaryFile() as spool:  # a Parquet footer is at the end
            with _open_decompressed(self.path, self.compression, limit) as stream:
                shutil.copyfileobj(stream, spool, _CHUNK)
            limit = _limit_bytes(self.path, limit)
            with open_parquet(
                self.path, source=spool, names=columns, max_decoded_bytes=limit
            ) as file:
                yield file


def recognise(
    path: Path, max_decoded_bytes: int | None = None, line_format: LineFormat | None = None
) -> Source:
    """Recognise a file's compression and container by its first bytes.

    Args:
        path: the file.
        max_decoded_bytes: largest size after decompression; None for the default.
        line_format: format of the lines of a log; None if the container is to be recognised.

    Raises:
        TraceError: the file cannot be read, is a pipe, or is empty.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise TraceError(
            path,
            "this is a pipe or a device, but an import reads its source several times; write the "
            "data to a file first",
        )
    with open_binary(path) as file:
        magic = file.read(8)
    compression = next((name for start, name in _MAGIC.items() if magic.startswith(start)), None)
    with _open_decompressed(path, compression, max_decoded_bytes) as stream:
        head = stream.read(_HEAD_BYTES)
    text = head.lstrip(_WHITE)
    if not text:
        if len(head) < _HEAD_BYTES:
            raise TraceError(path, "the file is empty; there is nothing to import")
        raise TraceError(path, "the file starts with 4 KiB of blank lines; remove them")
    if line_format is not None:
        container = Container.LINES
    elif head[:4] == b"PAR1":
        container = Container.PARQUET
    else:
        container = Container.JSONL if text[:1] in b"{[" else Container.CSV
    return Source(
        path=path,
        compression=compression,
        container=container,
        max_decoded_bytes=max_decoded_bytes,
        line_format=line_format,
    )


@contextmanager
def _open_decompressed(
    path: Path,
    compression: str | None,
    max_decoded_bytes: int | None,
    on_bytes: Callable[[int], None] | None = None,
) -> Iterator[io.BufferedReader]:
    """Open a file for reading; a failure of its decompression becomes a `TraceError`."""
    limit = None if compression is None else _limit_bytes(path, max_decoded_bytes)
    with open_binary(path) as file:
        try:
            bounded = _BoundedStream(file, _decompressor(file, compression), path, limit, on_bytes)
            yield io.BufferedReader(bounded, _CHUNK)
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, pa.ArrowException) as error:
            raise _damaged_error(path, compression, error) from error
        except OSError as error:
            # bz2 and pyarrow's zstd report broken data as OSError without an errno.
            if error.errno is not None:
                raise
            raise _damaged_error(path, compression, error) from error


def _limit_bytes(path: Path, max_decoded_bytes: int | None) -> int:
    if max_decoded_bytes is not None:
        return max_decoded_bytes
    return max(_MIN_LIMIT_BYTES, _MAX_EXPANSION * path.stat().st_size)


def _decompressor(file: IO[bytes], compression: str | None) -> IO[bytes]:
    match compression:
        case "gzip":
            return cast("IO[bytes]", gzip.GzipFile(fileobj=file))
        case "xz":
            return lzma.LZMAFile(file)
        case "bzip2":
            return bz2.BZ2File(file)
        case "zstd":
            return cast("IO[bytes]", pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd"))
        case _:
            return file


def _damaged_error(path: Path, compression: str | None, error: BaseException) -> TraceError:
    return TraceError(
        path,
        f"the {compression or 'file'} data is truncated or damaged ({first_line(error)}); "
        "copy it again",
    )


class _BoundedStream(io.RawIOBase):
    """A decompressed stream that raises `TooLargeError` beyond a limit and reports its progress.

    Args:
        file: the compressed file, whose position is reported.
        stream: the file's content after decompression.
        path: the file, for errors.
        limit_bytes: largest size after decompression; None for no limit.
        on_bytes: called with the file's position after each read.
    """

    def __init__(
        self,
        file: IO[bytes],
        stream: IO[bytes],
        path: Path,
        limit_bytes: int | None,
        on_bytes: Callable[[int], None] | None,
    ) -> None:
        self._file = file
        self._stream = stream
        self._path = path
        self._limit_bytes = limit_bytes
        self._on_bytes = on_bytes
        self._decoded_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        self._decoded_bytes += len(data)
        if self._limit_bytes is not None and self._decoded_bytes > self._limit_bytes:
            raise TooLargeError(self._path, self._limit_bytes)
        if self._on_bytes is not None:
            self._on_bytes(self._file.tell())
        buffer[: len(data)] = data
        return len(data)


def _lines(stream: io.BufferedReader, path: Path) -> Iterator[tuple[int, str]]:
    """Yield numbered lines without line ends; reject long lines and many blank lines."""
    blank = 0
    read_line = partial(stream.readline, MAX_LINE_BYTES + 1)
    for number, line in enumerate(iter(read_line, b""), start=1):
        if len(line) > MAX_LINE_BYTES:
            raise TraceError(
                path,
                f"line {number} is longer than {MAX_LINE_BYTES >> 20} MiB; "
                "write one record per line",
            )
        blank = blank + 1 if line in {b"\n", b"\r\n"} else 0
        if blank > _MAX_BLANK_LINES:
            raise TraceError(
                path,
                f"line {number} ends more than {_MAX_BLANK_LINES:,} blank lines in a row; "
                "remove them",
            )
        text = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
        try:
            yield number, text.removesuffix(b"\n").removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            raise TraceError(
                path, f"line {number} is not UTF-8 text (byte {error.start}); convert the file"
            ) from error


def _log_records(
    lines: Iterator[tuple[int, str]], path: Path, line_format: LineFormat
) -> Iterator[Record]:
    """Yield a record for each line; it has no values if the line does not match."""
    for number, line in lines:
        if not line.strip():
            continue
        try:
            values: dict[str, Any] = dict(line_format.match(line))
        except ValueError as error:
            if not line_format.skip_unmatched:
                raise TraceError(
                    path,
                    f"line {number} does not match the line format: {error}; correct the format, "
                    "or skip such lines with `unmatched: skip`",
                ) from error
            values = {}
        yield Record(path=path, number=number, unit="line", values=values)


def _json_records(lines: Iterator[tuple[int, str]], path: Path) -> Iterator[Record]:
    decode = msgspec.json.Decoder().decode
    for number, line in lines:
        if not line.strip():
            continue
        try:
            values = decode(line)
        except (msgspec.DecodeError, RecursionError, UnicodeError, ValueError) as error:
            reason = str(error).replace("malformed (", "(")[:160]
            if isinstance(error, msgspec.DecodeError) and "(byte " not in reason:
                reason += f" (byte {len(line.encode())})"  # the line ends too early
            raise TraceError(
                path, f"line {number} is not valid JSON: {reason}; correct or remove the line"
            ) from error
        if not isinstance(values, dict):
            raise TraceError(
                path,
                f"line {number} is not a JSON object; write one object per line (JSON lines)",
            )
        yield Record(path=path, number=number, unit="line", values=values)


class _CsvLines:
    """Lines for the CSV reader, with a limit on the lines and bytes of one record.

    Attributes:
        number: number of the last line that was read.
    """

    def __init__(self, lines: Iterator[tuple[int, str]], path: Path) -> None:
        self._lines = lines
        self._path = path
        self.number = 0
        self.end_record()

    def end_record(self) -> None:
        """Start to count the next record."""
        self._start = self.number + 1
        self._bytes = 0

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        self.number, line = next(self._lines)
        self._bytes += len(line) + 1
        too_many_lines = self.number - self._start >= _MAX_RECORD_LINES
        if too_many_lines or self._bytes > MAX_LINE_BYTES:
            raise TraceError(
                self._path,
                f"the record that starts on line {self._start} is longer than "
                f"{MAX_LINE_BYTES >> 20} MiB or {_MAX_RECORD_LINES:,} lines; "
                "check that every quote is closed",
            )
        return line + "\n"


def _csv_records(lines: Iterator[tuple[int, str]], path: Path) -> Iterator[Record]:
    # The module's own limit of 128 KiB is too small for a column of prompts.
    csv.field_size_limit(MAX_LINE_BYTES)
    header_line = next((line for line in lines if line[1].strip()), (0, ""))
    if "\r" in header_line[1].rstrip("\r\n"):
        raise TraceError(path, "its lines end with CR; convert them to lines that end with LF")
    limited = _CsvLines(chain((header_line,), lines), path)
    reader = csv.reader(limited, strict=True, delimiter=_find_delimiter(header_line[1]))
    header: list[str] | None = None
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise TraceError(
                path, f"line {limited.number} is not valid CSV ({error}); correct the line"
            ) from error
        limited.end_record()
        if cells is None:
            return
        if not cells:
            continue
        if header is None:
            header = [name.strip() for name in cells]
            repeated, times = Counter(header).most_common(1)[0]
            if times > 1:
                first = header.index(repeated)
                second = header.index(repeated, first + 1)
                raise TraceError(
                    path,
                    f"line {limited.number}: the CSV header names a column twice ({repeated}, "
                    f"in the cells {first + 1} and {second + 1}); rename one",
                )
            continue
        if len(cells) != len(header):
            if len(cells) < len(header):
                surplus = f"the first missing one is of column {header[len(cells)]}"
            else:
                surplus = f"cell {len(header) + 1} has no column"
            raise TraceError(
                path,
                f"line {limited.number} has {len(cells)} cells, but the header has {len(header)} "
                f"({surplus}); correct or remove the line",
            )
        values: dict[str, Any] = {
            name: cell if cell.strip() else None for name, cell in zip(header, cells, strict=True)
        }
        yield Record(path=path, number=limited.number, unit="line", values=values)


def _find_delimiter(header: str) -> str:
    """Return the character between the cells: a comma, or the first other one if there is none."""
    others = (character for character in _OTHER_DELIMITERS if character in header)
    return "," if "," in header else next(others, ",")


def _convert_rows(batch: pa.RecordBatch, path: Path, first_row: int) -> Iterator[dict[str, Any]]:
    batch = _integer_times(batch)
    try:
        yield from batch.to_pylist()
    except ValueError as error:  # text that is not UTF-8, times that Python cannot hold
        for at in range(batch.num_rows):
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                try:
                    column[at].as_py()
                except ValueError as cell_error:
                    Record(path=path, number=first_row + at, unit="row", values={}).reject(
                        name, f"the value cannot be read ({first_line(cell_error)}); correct it"
                    )
        raise TraceError(
            path, f"the rows from {first_row} on cannot be read; correct them"
        ) from error


def _integer_times(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch with numbers instead of times in nanoseconds, which no `datetime` holds."""
    columns = [
        column.cast(pa.int64()) if _has_nanoseconds(column.type) else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _has_nanoseconds(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) and kind.unit == "ns")

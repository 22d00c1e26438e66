"""Checks on the bytes of a Parquet file before Arrow decodes any of them.

There are two independent checks.

- **Digest block.** Goodput's writer inserts this block between the data and the footer, where other
  readers skip it. The block contains a digest of the rest of the file, so any damage is found,
  unless the damage destroys both markers of the block.
- **Declared values.** In files of any writer, the offsets, sizes and counts of the footer and the
  page headers are compared with each other and with the file. Arrow trusts some of these values,
  and a file of a few kilobytes can declare gigabytes.

Source: the Thrift definitions of Apache Parquet 2.11, github.com/apache/parquet-format.
"""

from __future__ import annotations

import os
import struct
from array import array
from dataclasses import dataclass
from hashlib import blake2b
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

__all__ = ["DamagedError", "FileLayout", "check_file", "write_digest_block"]

_START: Final = b"GPdigest"
_END: Final = b"GPdigEnd"
_DIGEST_BYTES: Final = 16
_BLOCK_BYTES: Final = len(_START) + _DIGEST_BYTES + len(_END)
_MAGIC: Final = b"PAR1"
_TAIL_BYTES: Final = 8  # the footer's length and the magic
_CHUNK: Final = 1 << 20
_MAX_FOOTER_BYTES: Final = 64 << 20
_MAX_HEADER_BYTES: Final = 64 << 10
_SMALL_DICTIONARY_BYTES: Final = 8 << 10
_MAX_ROW_GROUPS: Final = 1_000_000
_MAX_DEPTH: Final = 16
_ROW_GROUPS: Final = 4  # field of the footer
_LIST, _SET, _STRUCT = 9, 10, 12  # kinds of Thrift's compact protocol
_DATA_PAGE, _INDEX_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2 = range(4)
_WIDTHS: Final = {0: 1, 1: 4, 2: 8, 3: 12, 4: 4, 5: 8}  # physical type → bytes per value
_BYTE_ARRAY: Final = 6
_REPEATED: Final = 2


class DamagedError(ValueError):
    """A damaged Parquet file: its digest or its declared values do not match its content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """Checked sizes of a file.

    Args:
        file_bytes: size of the file.
        group_bytes: decoded size of the checked columns in each row group. Each dictionary value of
            a text column outside lists counts once.
        large_dictionaries: text columns outside lists that have a large dictionary page. They are
            read as dictionaries, because a batch with the value of every row could be too large.
    """

    file_bytes: int
    group_bytes: tuple[int, ...]
    large_dictionaries: tuple[str, ...]


def write_digest_block(file: IO[bytes]) -> None:
    """Insert the digest block into a complete Parquet file, open for reading and writing."""
    size = file.seek(0, os.SEEK_END)
    file.seek(size - _TAIL_BYTES)
    footer_start = size - _TAIL_BYTES - int.from_bytes(file.read(4), "little")
    file.seek(footer_start)
    footer = file.read()
    digest = _digest(file, footer_start, footer)
    file.seek(footer_start)
    file.write(_START + digest + _END + footer)
    file.truncate()


def check_file(file: IO[bytes], names: Collection[str]) -> FileLayout:
    """Check the digest, if the file has one, and the declared values of the footer and of pages.

    Args:
        file: the file, open for reading.
        names: top-level columns whose page headers are checked.

    Raises:
        DamagedError: the digest or a declared value does not match.
    """
    size = file.seek(0, os.SEEK_END)
    if size < len(_MAGIC) + _TAIL_BYTES:
        raise DamagedError("the file is too short")
    file.seek(size - _TAIL_BYTES)
    tail = file.read(_TAIL_BYTES)
    length = int.from_bytes(tail[:4], "little")
    footer_start = size - _TAIL_BYTES - length
    if tail[4:] != _MAGIC or footer_start < len(_MAGIC):
        raise DamagedError("the footer is missing")
    if length > _MAX_FOOTER_BYTES:
        raise DamagedError(f"the footer is larger than {_MAX_FOOTER_BYTES >> 20} MiB")
    file.seek(footer_start)
    footer = file.read(length)
    _check_digest(file, footer_start, footer + tail)
    return _Checker(file, footer_start, footer, size).check(names)


def _check_digest(file: IO[bytes], footer_start: int, footer: bytes) -> None:
    block_start = max(0, footer_start - _BLOCK_BYTES)
    file.seek(block_start)
    block = file.read(footer_start - block_start)
    has_start, has_end = block.startswith(_START), block.endswith(_END)
    if not (has_start or has_end):
        return  # another writer's file
    digest = block[len(_START) : len(_START) + _DIGEST_BYTES]
    if not (has_start and has_end) or digest != _digest(file, block_start, footer):
        raise DamagedError("the digest does not match the content")


def _digest(file: IO[bytes], data_end: int, footer: bytes) -> bytes:
    digest = blake2b(digest_size=_DIGEST_BYTES)
    file.seek(0)
    remaining = data_end
    while remaining and (chunk := file.read(min(_CHUNK, remaining))):
        digest.update(chunk)
        remaining -= len(chunk)
    digest.update(footer)
    return digest.digest()


class _Checker:
    """Checks the declared values of one file.

    Args:
        file: the file, open for reading.
        data_end: end of the data; no page may extend beyond it.
        footer: the footer, a Thrift message.
        size: size of the file in bytes.
    """

    def __init__(self, file: IO[bytes], data_end: int, footer: bytes, size: int) -> None:
        self._file = file
        self._data_end = data_end
        self._size = size
        # Row groups are decoded one at a time: as dictionaries, they take twenty times their size.
        self._groups = _ListPlace()
        reader = _ThriftReader(footer, skipped={_ROW_GROUPS: self._groups})
        self._message = reader.struct()
        if reader.at != len(footer):
            raise DamagedError("the footer is longer than its content")
        self._footer = footer
        self._checksums: set[bool] = set()

    def check(self, names: Collection[str]) -> FileLayout:
        leaves = list(_leaf_columns(_get(self._message, 2, list)))
        _get(self._message, _ROW_GROUPS, _ListPlace)
        if self._groups.length > _MAX_ROW_GROUPS:
            raise DamagedError("the file has more than a million row groups; write larger ones")
        starts, ends = array("q"), array("q")
        group_bytes: list[int] = []
        large: dict[str, None] = {}
        rows = 0
        for group in self._groups.structs(self._footer):
            rows += _count(group, 3)
            messages = _get(group, 1, list)
            if len(messages) != len(leaves):
                raise DamagedError("a row group lacks a column or has too many")
            group_bytes.append(0)
            for message, leaf in zip(messages, leaves, strict=True):
                is_read = leaf.path[0] in names
                chunk = self._check_chunk(group, message, leaf, walk=is_read)
                starts.append(chunk.start)
                ends.append(chunk.end)
                if is_read:
                    group_bytes[-1] += chunk.decoded_bytes
                if chunk.dictionary_bytes > _SMALL_DICTIONARY_BYTES and leaf.is_flat_text:
                    large[leaf.path[0]] = None
        if len(self._checksums) > 1:
            raise DamagedError("some pages have checksums and others do not")
        if rows != _count(self._message, 3):
            raise DamagedError("the rows of the row groups do not add up to those of the file")
        order = np.argsort(starts, kind="stable")
        if np.any(np.asarray(starts)[order[1:]] < np.asarray(ends)[order[:-1]]):
            raise DamagedError("two column chunks overlap")
        return FileLayout(
            file_bytes=self._size,
            group_bytes=tuple(group_bytes),
            large_dictionaries=tuple(large),
        )

    def _check_chunk(
        self, group: dict[int, Any], chunk: dict[int, Any], leaf: _Leaf, *, walk: bool
    ) -> _ColumnChunk:
        meta = _get(chunk, 3, dict)
        if 1 in chunk or _get(meta, 3, list) != leaf.encoded_path:
            raise DamagedError(f"a chunk of column {leaf.name} belongs to another column or file")
        if _get(meta, 1, int) != leaf.kind:
            raise DamagedError(
                f"a chunk of column {leaf.name} does not have the type of the column"
            )
        num_values, size = _count(meta, 5), _count(meta, 7)
        if not leaf.repeated and num_values != _count(group, 3):
            raise DamagedError(f"a chunk of column {leaf.name} does not have one value per row")
        if num_values == 0:
            return _ColumnChunk(start=0, end=0, decoded_bytes=0, dictionary_bytes=0)
        start = data_start = _count(meta, 9)
        if 11 in meta and 0 < _count(meta, 11) < data_start:
            start = _count(meta, 11)
        if not len(_MAGIC) <= start <= start + size <= self._data_end:
            raise DamagedError(f"a chunk of column {leaf.name} lies outside the data")
        dictionary_bytes = 0
        decoded_bytes = _count(meta, 6)
        if walk:
            pages = _Pages(self._file, start, start + size, leaf.name)
            pages.walk(num_values, None if leaf.repeated else _count(group, 3), data_start)
            self._checksums |= pages.checksums
            dictionary_bytes, decoded_bytes = pages.dictionary_bytes, pages.uncompressed_bytes
            if _count(meta, 6) < decoded_bytes:
                raise DamagedError(f"a chunk of column {leaf.name} is larger than declared")
        # Arrow may copy a dictionary value for every value of a nested column.
        nested_text = leaf.kind == _BYTE_ARRAY and not leaf.is_flat_text
        value_bytes = _WIDTHS.get(leaf.kind, dictionary_bytes if nested_text else 0)
        return _ColumnChunk(
            start=start,
            end=start + size,
            decoded_bytes=max(decoded_bytes, num_values * value_bytes),
            dictionary_bytes=dictionary_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ColumnChunk:
    """A checked column chunk: its range in the file and its sizes after decompression."""

    start: int
    end: int
    decoded_bytes: int
    dictionary_bytes: int


class _Pages:
    """Reader of the page headers of one column chunk; skips the pages' content."""

    def __init__(self, file: IO[bytes], start: int, end: int, column: str) -> None:
        self._file = file
        self._start = start
        self._end = end
        self._column = column
        self.uncompressed_bytes = 0
        self.dictionary_bytes = 0
        self.checksums: set[bool] = set()

    def walk(self, num_values: int, num_rows: int | None, data_start: int) -> None:
        """Check every page.

        Args:
            num_values: number of values that all data pages together must contain.
            num_rows: largest number of rows of all data pages of version 2 together; None if
                unknown.
            data_start: declared offset of the first data page.
        """
        at, values, rows, first_data = self._start, 0, 0, -1
        while values < num_values:
            header, length = self._header(at)
            kind, size = _get(header, 1, int), _count(header, 3)
            uncompressed = _count(header, 2)
            if at + length + size > self._end:
                raise self._damaged("is longer than its chunk")
            self.checksums.add(4 in header)
            self.uncompressed_bytes += length + uncompressed
            if kind in {_DATA_PAGE, _DATA_PAGE_V2} and first_data < 0:
                first_data = at
            if kind == _DICTIONARY_PAGE:
                if at != self._start:
                    raise self._damaged("is a dictionary after the data")
                _count(_get(header, 7, dict), 1)
                self.dictionary_bytes = uncompressed
            elif kind == _DATA_PAGE:
                values += _count(_get(header, 5, dict), 1)
            elif kind == _DATA_PAGE_V2:
                data = _get(header, 8, dict)
                values += _count(data, 1)
                rows += _count(data, 3)
                if _count(data, 2) > _count(data, 1):
                    raise self._damaged("has more nulls than values")
                if _count(data, 5) + _count(data, 6) > min(uncompressed, size):
                    raise self._damaged("has levels longer than the page")
                if num_rows is not None and rows > num_rows:
                    raise self._damaged("has more rows than its row group")
            elif kind != _INDEX_PAGE:
                raise self._damaged("has an unknown type")
            at += length + size
        if values != num_values or first_data != data_start:
            raise self._damaged("does not match its chunk's description")

    def _header(self, at: int) -> tuple[dict[int, Any], int]:
        if at >= self._end:
            raise self._damaged("is missing")
        self._file.seek(at)
        reader = _ThriftReader(self._file.read(min(_MAX_HEADER_BYTES, self._end - at)))
        return reader.struct(), reader.at

    def _damaged(self, problem: str) -> DamagedError:
        return DamagedError(f"a page of column {self._column} {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaf:
    """Leaf column of the schema; `repeated` is True if it lies inside a list."""

    path: tuple[str, ...]
    encoded_path: list[bytes]
    kind: int
    repeated: bool

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def is_flat_text(self) -> bool:
        return self.kind == _BYTE_ARRAY and not self.repeated and len(self.path) == 1


def _leaf_columns(schema: list[Any]) -> Iterator[_Leaf]:
    elements = iter(schema)

    def leaves_below(
        path: tuple[bytes, ...], children: int, depth: int, *, nested: bool
    ) -> Iterator[_Leaf]:
        if depth > _MAX_DEPTH:
            raise DamagedError("the schema is nested too deeply")
        for _ in range(children):
            element: Any = next(elements, None)
            element_path = (*path, _get(element, 4, bytes))
            in_list = nested or element.get(3) == _REPEATED
            if 5 in element and _count(element, 5):
                yield from leaves_below(element_path, _count(element, 5), depth + 1, nested=in_list)
                continue
            yield _Leaf(
                path=tuple(part.decode("utf-8", "replace") for part in element_path),
                encoded_path=list(element_path),
                kind=_get(element, 1, int),
                repeated=in_list,
            )

    yield from leaves_below((), _count(next(elements, None), 5), 0, nested=False)
    if next(elements, None) is not None:
        raise DamagedError("the schema has columns outside its root")


def _get(message: Any, field: int, kind: type[Any]) -> Any:
    """Return a field of a Thrift struct.

    Raises:
        DamagedError: the message is not a struct, or the field is absent or of another type.
    """
    value = message.get(field) if isinstance(message, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise DamagedError("the footer or a page header lacks a field")
    return value


def _count(message: Any, field: int) -> int:
    value: int = _get(message, field, int)
    if value < 0:
        raise DamagedError("the footer or a page header has a negative count")
    return value


@dataclass(slots=True)
class _ListPlace:
    """Place of a list of structs in a message, whose structs are decoded one at a time.

    Attributes:
        start: offset of the first struct.
        length: number of structs.
    """

    start: int = 0
    length: int = 0

    def structs(self, data: bytes) -> Iterator[dict[int, Any]]:
        """Yield the structs of the list in the message `data`."""
        reader = _ThriftReader(data, at=self.start)
        for _ in range(self.length):
            yield reader.struct(2)


class _ThriftReader:
    """Reader of Thrift's compact protocol; converts a struct to a dict by field id.

    Every element takes at least one byte, so the length of the input limits time and memory.

    Args:
        data: the message.
        at: offset of the first byte to read.
        skipped: lists of structs to skip, by their field id in the outermost struct. Their places
            are the values of the fields.
    """

    def __init__(
        self, data: bytes, *, at: int = 0, skipped: Mapping[int, _ListPlace] | None = None
    ) -> None:
        self._data = data
        self._skipped = {} if skipped is None else skipped
        self.at = at

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Read one struct.

        Raises:
            DamagedError: the bytes are not a struct.
        """
        fields: dict[int, Any] = {}
        field = 0
        while True:
            head = self._byte()
            if head == 0:
                return fields
            field = field + (head >> 4) if head >> 4 else self._signed()
            if field in fields:
                raise DamagedError("a message has a field twice")
            kind = head & 15
            if kind == _LIST and depth == 0 and field in self._skipped:
                fields[field] = self._skip_structs(self._skipped[field])
            else:
                fields[field] = kind == 1 if kind in {1, 2} else self._value(kind, depth + 1)

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise DamagedError("a message is nested too deeply")
        if kind in {4, 5, 6}:
            return self._signed()
        if kind == 8:
            return self._take(self._unsigned())
        if kind == _STRUCT:
            return self.struct(depth)
        if kind in {_LIST, _SET}:
            return self._list(depth)
        if kind in {1, 2}:  # inside a list
            return self._byte() == 1
        if kind == 3:
            return self._byte()
        if kind == 7:
            return struct.unpack("<d", self._take(8))[0]
        raise DamagedError("a message has a field of an unknown type")

    def _list(self, depth: int) -> list[Any]:
        kind, length = self._list_header()
        return [self._value(kind, depth + 1) for _ in range(length)]

    def _skip_structs(self, place: _ListPlace) -> _ListPlace:
        kind, place.length = self._list_header()
        if place.length and kind != _STRUCT:
            raise DamagedError("the footer or a page header lacks a field")
        place.start = self.at
        for _ in range(place.length):
            self.struct(2)
        return place

    def _list_header(self) -> tuple[int, int]:
        """Return the kind of a list's elements, and their number."""
        head = self._byte()
        length = head >> 4 if head >> 4 < 15 else self._unsigned()
        if length > len(self._data) - self.at:
            raise DamagedError("a list is longer than the message")
        return head & 15, length

    def _byte(self) -> int:
        if self.at >= len(self._data):
            raise DamagedError("a message ends early")
        self.at += 1
        return self._data[self.at - 1]

    def _unsigned(self) -> int:
        number = shift = 0
        while True:
            byte = self._byte()
            number |= (byte & 127) << shift
            if byte < 128:
                return number
            shift += 7
            if shift > 63:
                raise DamagedError("a number is too long")

    def _signed(self) -> int:
        number = self._unsigned()
        return (number >> 1) ^ -(number & 1)

    def _take(self, length: int) -> bytes:
        if length > len(self._data) - self.at:
            raise DamagedError("a binary field is longer than the message")
        self.at += length
        return self._data[self.at - length : self.at]

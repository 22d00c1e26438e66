"""Import source files into one trace."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Final

from goodput_traces.duplicates import DuplicateIds
from goodput_traces.errors import NotATraceError, RowError, TraceError
from goodput_traces.format.schema import COLUMN_NS
from goodput_traces.format.writer import (
    MAX_BATCH_ROWS,
    reject_existing,
    sort_trace,
    write_trace,
)
from goodput_traces.importers import READ_COLUMNS, find_importer
from goodput_traces.importers.base import Importer, ImportOptions
from goodput_traces.importers.column_map import ColumnMap, nested_value
from goodput_traces.importers.preview import PREVIEW_ROWS, ImportPreview
from goodput_traces.importers.record import Record
from goodput_traces.importers.source import Container, Source, recognise

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from pathlib import Path

    from goodput_traces.format.schema import TraceRow
    from goodput_traces.importers.column_map import RowFilter

__all__ = ["ImportResult", "import_trace", "preview_import"]

# A place is the index of a file, shifted by these bits, plus the number of a line.
_LINE_BITS: Final = 40
_MAX_SKIPPED: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """Result of an import: format, number of rows, and notes for the user."""

    format: str
    container: Container
    num_rows: int
    notes: tuple[str, ...]


def import_trace(
    paths: Sequence[Path],
    out: Path,
    *,
    form: str | None = None,
    options: ImportOptions | None = None,
    sort: bool = False,
    overwrite: bool = False,
    max_decoded_bytes: int | None = None,
    on_bytes: Callable[[int], None] | None = None,
    on_preview: Callable[[ImportPreview], None] | None = None,
) -> ImportResult:
    """Read the sources, check every record and write the trace.

    Args:
        paths: the files to read; more than one only for formats with a clock per session.
        out: the trace to write.
        form: a name of `FORMATS`; None to recognise the format from the columns.
        options: properties of the source that the file does not contain.
        sort: sort the rows instead of rejecting unsorted ones.
        overwrite: replace an existing trace.
        max_decoded_bytes: largest size of a source after decompression; None for the default.
        on_bytes: called with the number of bytes of the sources read so far.
        on_preview: called once with the first rows, before the others are read.

    Raises:
        TraceError: a source or the output is invalid; no trace is left behind.
        UsageError: the options do not fit the format.
    """
    reject_existing(out, overwrite=overwrite, sources=paths)
    opened = _open_import(paths, form, options or ImportOptions(), max_decoded_bytes, on_bytes)
    importer = opened.importer
    sort = sort or importer.sorts
    target = out
    if sort:
        target = target.with_name(f".{target.name}.{os.getpid()}.unsorted")
    try:
        with closing(DuplicateIds()) as ids:
            checked = _Rows(importer, opened.sources, ids)
            rows = checked.check_rows(opened.records)
            if on_preview is not None:
                head = tuple(islice(rows, PREVIEW_ROWS))
                on_preview(opened.preview(head))
                rows = chain(head, rows)
            num_rows = write_trace(
                target,
                rows,
                importer.metadata,
                overwrite=overwrite,
                require_order=not sort,
                sort_remedy="sort the file, or add --sort",
                locate=checked.locate,
            )
        if sort:
            sort_trace(target, out, overwrite=overwrite)
    finally:
        if sort:
            target.unlink(missing_ok=True)
    notes = importer.notes()
    if len(opened.sources) > 1:
        notes.append("session ids begin with the name of their file")
    if importer.sorts:
        notes.append("the source is not ordered by arrival; its rows were sorted")
    return ImportResult(
        format=importer.name,
        container=opened.sources[0].container,
        num_rows=num_rows,
        notes=tuple(notes),
    )


def preview_import(
    path: Path,
    *,
    form: str | None = None,
    options: ImportOptions | None = None,
    max_decoded_bytes: int | None = None,
) -> ImportPreview:
    """Read the first rows of a source, without writing a trace.

    Raises:
        TraceError: the first records of the source are invalid.
        UsageError: the options do not fit the format.
    """
    opened = _open_import((path,), form, options or ImportOptions(), max_decoded_bytes, None)
    rows = (row for _, row in opened.importer.rows(opened.records))
    return opened.preview(tuple(islice(rows, PREVIEW_ROWS)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenImport:
    """Sources whose format is known, and their records."""

    sources: list[Source]
    importer: Importer
    records: Iterator[Record]

    def preview(self, rows: tuple[TraceRow, ...]) -> ImportPreview:
        source = self.sources[0]
        return ImportPreview(
            source=f"{source.path}: {source.container} in the format {self.importer.name}",
            uses=tuple(self.importer.column_uses()),
            rows=rows,
            clock=self.importer.metadata().clock,
        )


def _open_import(
    paths: Sequence[Path],
    form: str | None,
    options: ImportOptions,
    max_decoded_bytes: int | None,
    on_bytes: Callable[[int], None] | None,
) -> _OpenImport:
    column_map = options.column_map
    labelled = _label_files(paths)
    sources = [recognise(path, max_decoded_bytes, column_map.line) for _, path in labelled]
    first_source = sources[0]
    columns = READ_COLUMNS | column_map.column_names()
    first, records = _read_first_record(first_source, columns, on_bytes, column_map.only)
    has_map = column_map != ColumnMap()
    kind = find_importer(form, first, first_source.columns_line, has_map=has_map)
    importer = kind(options)
    if first_source.container is Container.PARQUET:
        try:
            importer.keep_metadata(first_source.key_values())
        except ValueError as error:
            raise TraceError(first_source.path, f"{error}; correct the metadata") from error
    importer.begin(first, first_source.columns(first))
    if len(sources) > 1:
        if not kind.several_files:
            raise TraceError(
                sources[1].path,
                f"files of the format {kind.name} are imported one at a time; only formats with a "
                "clock per session allow several files",
            )
        labels = [label for label, _ in labelled]
        records = _join_records(zip(labels, sources, strict=True), kind, on_bytes)
    return _OpenImport(sources=sources, importer=importer, records=records)


class _Rows:
    """The rows of an import, and the place of each row in its source."""

    def __init__(self, importer: Importer, sources: Sequence[Source], ids: DuplicateIds) -> None:
        self._importer = importer
        self._paths = [source.path for source in sources]
        self._ids = ids
        self._unit = "row"
        # An error concerns a row of the group that is being written.
        self._places: deque[int] = deque(maxlen=MAX_BATCH_ROWS)
        self._num_rows = 0

    def check_rows(self, records: Iterable[Record]) -> Iterator[TraceRow]:
        """Yield the rows; after the last one, reject a request id that occurs twice."""
        for record, row in self._importer.rows(records):
            place = (self._paths.index(record.path) << _LINE_BITS) + record.number
            self._unit = record.unit
            self._places.append(place)
            self._num_rows += 1
            self._ids.add(row.request_id, place)
            yield row
        pair = self._ids.find_first()
        if pair is not None:
            (_, earlier_line), (path, line) = map(self._split, pair)
            raise RowError(
                path,
                line,
                self._importer.id_column,
                f"{self._unit} {earlier_line} has the same request id; give every request its own",
                unit=self._unit,
            )

    def locate(self, error: RowError) -> RowError:
        """Convert an error that names a row of the trace to one that names a place in a source."""
        path, line = self._split(self._places[error.row - 1 - self._num_rows])
        column = self._importer.ordered_by if error.column == COLUMN_NS else error.column
        return RowError(path, line, column, error.reason, unit=self._unit)

    def _split(self, place: int) -> tuple[Path, int]:
        return self._paths[place >> _LINE_BITS], place & ((1 << _LINE_BITS) - 1)


def _read_first_record(
    source: Source,
    columns: Collection[str],
    on_bytes: Callable[[int], None] | None,
    only: Sequence[RowFilter] = (),
) -> tuple[Record, Iterator[Record]]:
    """Return a record with the columns of a request, and all records.

    Records that the conditions exclude, such as health checks, can lack these columns. The first
    record that they keep is returned, or the first of all if none is among the first thousand.
    """
    records = source.records(columns, on_bytes)
    head = list(islice(records, 1))
    if not head:
        raise TraceError(source.path, "the file has no records; nothing was imported")
    first = head[0]
    while only and len(head) <= _MAX_SKIPPED:
        if all(one.matches(nested_value(head[-1].values, one.column)) for one in only):
            first = head[-1]
            break
        following = next(records, None)
        if following is None:
            break
        head.append(following)
    return first, chain(head, records)


def _join_records(
    labelled: Iterable[tuple[str, Source]],
    kind: type[Importer],
    on_bytes: Callable[[int], None] | None,
) -> Iterator[Record]:
    """Yield the records of all files, each with its file's label as namespace."""
    finished_bytes = 0

    def report(position: int) -> None:
        if on_bytes is not None:
            on_bytes(finished_bytes + position)

    for label, source in labelled:
        first, records = _read_first_record(source, READ_COLUMNS, report)
        if not kind.required_columns.issubset(first.values):
            raise NotATraceError(
                source.path,
                f"the first file has the format {kind.name}, but this file does not; import it "
                "alone",
            )
        for record in records:
            yield replace(record, namespace=label)
        finished_bytes += source.path.stat().st_size


def _label_files(paths: Sequence[Path]) -> list[tuple[str, Path]]:
    """Return the files with distinct labels, in the order of their session ids."""
    labelled: dict[str, Path] = {}
    for path in paths:
        name = path.name.partition(".")[0] or path.name
        label, number = name, 2
        while label in labelled:
            label, number = f"{name}-{number}", number + 1
        labelled[label] = path
    return sorted(labelled.items(), key=lambda item: f"{item[0]}/")

"""One import, from a source file to a trace under its final name."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from goodput_traces.errors import TraceError
from goodput_traces.format.writer import sort_trace, write_trace
from goodput_traces.importers import FORMATS, detect_format, require_columns
from goodput_traces.importers.base import ImportOptions
from goodput_traces.importers.baseten import BasetenImporter
from goodput_traces.importers.source import Container, parquet_metadata, read_records, recognise
from goodput_traces.output import refuse_existing

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ImportRequest", "ImportResult", "import_trace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportRequest:
    """What to import.

    Args:
        source: the file to read.
        out: the trace to write.
        format: a name of `FORMATS`; None: recognised from the columns.
        options: what the user knows about the source.
        sort: sort the rows instead of refusing unsorted ones.
        overwrite: replace an existing trace.
    """

    source: Path
    out: Path
    format: str | None = None
    options: ImportOptions = field(default_factory=ImportOptions)
    sort: bool = False
    overwrite: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """What an import did: the format, the rows written, and notes for a person."""

    format: str
    container: Container
    num_rows: int
    notes: tuple[str, ...]


def import_trace(
    request: ImportRequest, on_bytes: Callable[[int], None] | None = None
) -> ImportResult:
    """Read the source, check every record, write the trace.

    Args:
        request: what to import.
        on_bytes: told how many bytes of the source have been read.

    Raises:
        TraceError: anything wrong with the source or the output; no trace is left behind.
    """
    refuse_existing(request.out, overwrite=request.overwrite)
    container = recognise(request.source)
    records = read_records(request.source, container, on_bytes)
    first = next(records, None)
    if first is None:
        raise TraceError(request.source, "there are no records in it; nothing was imported")
    columns = first.values
    if request.format is None:
        kind = detect_format(columns, request.source)
    else:
        kind = FORMATS[request.format]
        require_columns(kind, columns, request.source)
    importer = kind(request.options)
    if isinstance(importer, BasetenImporter) and container is Container.PARQUET:
        _keep_metadata(importer, request.source)
    target = request.out
    if request.sort:
        target = target.with_name(f".{target.name}.{os.getpid()}.unsorted")
    try:
        num_rows = write_trace(
            target,
            importer.rows(chain((first,), records), ordered=not request.sort),
            importer.metadata,
            overwrite=request.overwrite,
            ordered=not request.sort,
            described_as=request.source,
        )
        if request.sort:
            sort_trace(target, request.out, overwrite=request.overwrite)
    finally:
        if request.sort:
            target.unlink(missing_ok=True)
    return ImportResult(
        format=kind.name,
        container=container,
        num_rows=num_rows,
        notes=tuple(importer.notes()),
    )


def _keep_metadata(importer: BasetenImporter, source: Path) -> None:
    try:
        importer.keep_metadata(parquet_metadata(source))
    except ValueError as error:
        raise TraceError(source, f"{error}; correct the metadata") from error

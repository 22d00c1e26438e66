"""Export a trace to another tool's file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from goodput_traces.errors import TraceError
from goodput_traces.exporters import EXPORTS
from goodput_traces.exporters.baseten import BasetenExport
from goodput_traces.format.reader import open_trace
from goodput_traces.format.schema import Clock
from goodput_traces.format.writer import create_file, reject_existing, write_trace

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from typing import Any

__all__ = ["ExportResult", "export_trace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """Number of rows written, and notes for the user about lost or changed values."""

    num_rows: int
    notes: tuple[str, ...]


def export_trace(
    source: Path,
    out: Path,
    form: str,
    *,
    overwrite: bool = False,
    max_decoded_bytes: int | None = None,
) -> ExportResult:
    """Write a trace in another tool's format.

    Args:
        source: the trace.
        out: the file to write.
        form: a name of `EXPORTS`.
        overwrite: replace an existing file.
        max_decoded_bytes: largest decoded size of the trace; None for the default of
            `open_trace`.

    Raises:
        TraceError: the trace or the output is invalid; no file is left behind.
    """
    reject_existing(out, overwrite=overwrite, sources=(source,))
    trace = open_trace(source, max_decoded_bytes=max_decoded_bytes)
    if trace.metadata.clock is Clock.SESSION_RELATIVE:
        raise TraceError(
            source,
            "the sessions share no clock, and other tools would start all of them at once; "
            "only a trace with one clock can be exported",
        )
    export = EXPORTS[form](trace)
    if isinstance(export, BasetenExport):
        num_rows = write_trace(out, export.rows(), trace.metadata, overwrite=overwrite)
    else:
        num_rows = _write_json_lines(out, export.lines(), overwrite=overwrite)
    return ExportResult(num_rows=num_rows, notes=tuple(export.notes()))


def _write_json_lines(out: Path, lines: Iterable[dict[str, Any]], *, overwrite: bool) -> int:
    encode = msgspec.json.Encoder().encode
    written = 0
    with create_file(out, overwrite=overwrite) as sink:
        for line in lines:
            sink.write(encode(line) + b"\n")
            written += 1
    return written

"""One export, from a trace to another tool's file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from goodput_traces.errors import TraceError
from goodput_traces.exporters.baseten import BasetenExport
from goodput_traces.exporters.mooncake import MooncakeExport
from goodput_traces.output import refuse_existing
from goodput_traces.reader import open_trace
from goodput_traces.schema import Clock

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["EXPORTS", "ExportResult", "export_trace"]

EXPORTS: Final[Mapping[str, type[MooncakeExport | BasetenExport]]] = {
    export.name: export for export in (MooncakeExport, BasetenExport)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """How many rows were written, and notes for a person on what was lost."""

    num_rows: int
    notes: tuple[str, ...]


def export_trace(source: Path, out: Path, form: str, *, overwrite: bool = False) -> ExportResult:
    """Write a trace in another tool's format.

    Args:
        source: the trace.
        out: the file to write.
        form: a name of `EXPORTS`.
        overwrite: replace an existing file.

    Raises:
        TraceError: the trace or the output is wrong; no file is left behind.
    """
    refuse_existing(out, overwrite=overwrite)
    trace = open_trace(source)
    if trace.metadata.clock is Clock.SESSION_RELATIVE:
        raise TraceError(
            source,
            "its sessions share no clock and other tools would start them all at once; "
            "export is for traces with one clock",
        )
    export = EXPORTS[form](trace)
    num_rows = export.write(out, overwrite=overwrite)
    return ExportResult(num_rows=num_rows, notes=tuple(export.notes()))

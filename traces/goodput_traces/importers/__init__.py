"""Importers of other tools' trace formats, one module each, and the recognition of formats.

The importers' modules do not import pyarrow, because the argument parser lists the formats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from goodput_core.errors import UsageError
from goodput_traces.errors import NotATraceError
from goodput_traces.importers.azure import AzureImporter
from goodput_traces.importers.bailian import BailianImporter
from goodput_traces.importers.baseten import BasetenImporter
from goodput_traces.importers.burstgpt import BurstGPTImporter
from goodput_traces.importers.log import LogImporter
from goodput_traces.importers.mooncake import MooncakeImporter
from goodput_traces.importers.otel import OtelImporter
from goodput_traces.importers.timed_trace import TimedTraceImporter
from goodput_traces.importers.weka import WekaImporter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from goodput_traces.importers.base import Importer
    from goodput_traces.importers.record import Record

__all__ = ["FORMATS", "READ_COLUMNS", "find_importer"]

FORMATS: Final[Mapping[str, type[Importer]]] = {
    importer.name: importer
    for importer in (
        AzureImporter,
        BailianImporter,
        MooncakeImporter,
        WekaImporter,
        BasetenImporter,
        BurstGPTImporter,
        TimedTraceImporter,
        OtelImporter,
        LogImporter,
    )
}
"""Importers by format, in the order in which a source is compared with them."""
READ_COLUMNS: Final = frozenset[str]().union(*(kind.read_columns for kind in FORMATS.values()))
"""Columns read by at least one importer."""


def find_importer(
    name: str | None,
    first: Record,
    columns_line: Callable[[], int | None],
    *,
    has_map: bool = False,
) -> type[Importer]:
    """Return the importer of a format.

    Args:
        name: a name of `FORMATS`; None for the first format that recognises the source.
        first: the source's first record.
        columns_line: returns the number of the line that names the columns, for errors; None if the
            file has no lines.
        has_map: True if a map names the source's columns.

    Raises:
        NotATraceError: a column of the named format is missing, or no format matches.
        UsageError: the format has columns that cannot be mapped.
    """
    if name is None and has_map:
        recognised = next((k for k in FORMATS.values() if k.recognises(first.values)), LogImporter)
        return recognised if recognised.maps_columns else LogImporter
    if name is not None:
        importer = FORMATS[name]
        if has_map and not importer.maps_columns:
            raise UsageError(
                f"the columns of the format {name} are fixed; remove --map and --only, or name "
                f"--format {LogImporter.name}"
            )
        missing = sorted(importer.required_columns.difference(first.values))
        if missing:
            raise NotATraceError(
                first.path,
                f"{_place(columns_line())}this is not a file of the format {name}, because "
                f"columns are missing: {', '.join(missing)}; name another --format, or omit "
                "--format to have the format recognised",
            )
        return importer
    for importer in FORMATS.values():
        if importer.recognises(first.values):
            return importer
    shown = ", ".join(sorted(map(str, first.values))[:8])
    raise NotATraceError(
        first.path,
        f"{_place(columns_line())}the format is not recognised from its columns ({shown[:200]}); "
        "name the columns, for example --map arrival=time,input_tokens=prompt,output_tokens=reply "
        "(dots join nested names, as in usage.prompt), or name the format with --format "
        f"({', '.join(FORMATS)})",
    )


def _place(line: int | None) -> str:
    return "" if line is None else f"line {line}: "

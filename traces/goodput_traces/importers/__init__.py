"""Importers of other tools' trace formats, one module each, and the recognition of formats.

The importers' modules do not import pyarrow, because the argument parser lists the formats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from goodput_traces.errors import NotATraceError
from goodput_traces.importers.azure import AzureImporter
from goodput_traces.importers.baseten import BasetenImporter
from goodput_traces.importers.mooncake import MooncakeImporter
from goodput_traces.importers.weka import WekaImporter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from goodput_traces.importers.base import Importer

__all__ = ["FORMATS", "READ_COLUMNS", "find_importer"]

FORMATS: Final[Mapping[str, type[Importer]]] = {
    importer.name: importer
    for importer in (AzureImporter, MooncakeImporter, WekaImporter, BasetenImporter)
}
READ_COLUMNS: Final = frozenset[str]().union(*(kind.read_columns for kind in FORMATS.values()))
"""Columns read by at least one importer."""


def find_importer(
    name: str | None, columns: Collection[str], path: Path, columns_line: Callable[[], int | None]
) -> type[Importer]:
    """Return the importer of a format.

    Args:
        name: a name of `FORMATS`; None for the first format whose required columns the file has.
        columns: columns of the file.
        path: the file, for errors.
        columns_line: returns the number of the line that names the columns, for errors; None if the
            file has no lines.

    Raises:
        NotATraceError: a column of the named format is missing, or no format matches.
    """
    if name is not None:
        importer = FORMATS[name]
        missing = sorted(importer.required_columns.difference(columns))
        if missing:
            raise NotATraceError(
                path,
                f"{_place(columns_line())}this is not a file of the format {name}, because "
                f"columns are missing: {', '.join(missing)}; name another --format, or omit "
                "--format to have the format recognised",
            )
        return importer
    for importer in FORMATS.values():
        if importer.required_columns.issubset(columns):
            return importer
    shown = ", ".join(sorted(map(str, columns))[:8])
    formats = ", ".join(FORMATS)
    raise NotATraceError(
        path,
        f"{_place(columns_line())}the format is not recognised from its columns ({shown[:200]}); "
        f"name it with --format ({formats}) or rename the columns",
    )


def _place(line: int | None) -> str:
    return "" if line is None else f"line {line}: "

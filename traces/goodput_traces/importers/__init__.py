"""Importers of other tools' trace formats, one module each, and the detection of a format.

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
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from goodput_traces.importers.base import Importer

__all__ = ["FORMATS", "KNOWN_COLUMNS", "find_importer"]

FORMATS: Final[Mapping[str, type[Importer]]] = {
    importer.name: importer
    for importer in (AzureImporter, MooncakeImporter, WekaImporter, BasetenImporter)
}
KNOWN_COLUMNS: Final = frozenset[str]().union(*(kind.known for kind in FORMATS.values()))
"""Columns read by at least one importer."""


def find_importer(name: str | None, columns: Collection[str], path: Path) -> type[Importer]:
    """Return the importer of a format.

    Args:
        name: a name of `FORMATS`; None for the first format of which the file has every required
            column.
        columns: columns of the file.
        path: the file, for errors.

    Raises:
        NotATraceError: a column of the named format is missing, or no format matches.
    """
    if name is not None:
        importer = FORMATS[name]
        missing = sorted(importer.fingerprint.difference(columns))
        if missing:
            raise NotATraceError(
                path,
                f"not a file of the format {name}, columns are missing: {', '.join(missing)}; "
                "name another --format, or leave it out to have it recognised",
            )
        return importer
    for importer in FORMATS.values():
        if importer.fingerprint.issubset(columns):
            return importer
    shown = ", ".join(sorted(map(str, columns))[:8])
    formats = ", ".join(FORMATS)
    raise NotATraceError(
        path,
        f"the format is not recognised from its columns ({shown[:200]}); "
        f"name it with --format ({formats}) or rename the columns",
    )

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

__all__ = ["FORMATS", "KNOWN_COLUMNS", "detect_format", "require_columns"]

FORMATS: Final[Mapping[str, type[Importer]]] = {
    importer.name: importer
    for importer in (AzureImporter, MooncakeImporter, WekaImporter, BasetenImporter)
}
KNOWN_COLUMNS: Final = frozenset[str]().union(*(kind.known for kind in FORMATS.values()))
"""Columns read by at least one importer."""


def detect_format(columns: Collection[str], path: Path) -> type[Importer]:
    """Return the importer of the first format of which the file has every required column.

    Raises:
        NotATraceError: no format matches; names the columns and the formats.
    """
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


def require_columns(importer: type[Importer], columns: Collection[str], path: Path) -> None:
    """Reject a file that lacks a column of the requested format.

    Raises:
        NotATraceError: names the missing columns.
    """
    missing = sorted(importer.fingerprint.difference(columns))
    if missing:
        plural = "columns" if len(missing) > 1 else "column"
        verb = "are" if len(missing) > 1 else "is"
        raise NotATraceError(
            path,
            f"not a file of the format {importer.name}, {plural} {', '.join(missing)} {verb} "
            "missing; name another --format, or leave it out to have it recognised",
        )

"""Exporters to other tools' trace formats, one module each. An export reports the values it drops.

The exporters' modules do not import pyarrow, because the argument parser lists the formats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from goodput_traces.exporters.baseten import BasetenExport
from goodput_traces.exporters.mooncake import MooncakeExport

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["EXPORTS"]

EXPORTS: Final[Mapping[str, type[MooncakeExport | BasetenExport]]] = {
    export.name: export for export in (MooncakeExport, BasetenExport)
}

"""Show the first rows of an import, the columns from which they come, and the assumptions made."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table
from rich.text import Text

from goodput_core.text import printable
from goodput_core.units import NS_PER_S
from goodput_traces.format.schema import COLUMN_NS, ROW_FIELDS, Clock, TraceRow
from goodput_traces.importers.base import ColumnUse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console


__all__ = ["PREVIEW_ROWS", "ImportPreview", "print_preview"]

PREVIEW_ROWS: Final = 4
_MAX_CELL: Final = 36
_ROWS_TITLE: Final = "first rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportPreview:
    """The start of an import.

    Args:
        source: name, container and format of the source, for the title.
        uses: sources of the trace's columns; empty if the format determines them.
        rows: the first rows.
        clock: origin of the rows' arrivals.
    """

    source: str
    uses: tuple[ColumnUse, ...]
    rows: tuple[TraceRow, ...]
    clock: Clock


def print_preview(console: Console, preview: ImportPreview) -> None:
    """Print the columns that have a value in the first rows, and the rows, side by side."""
    filled = [
        name
        for name in ROW_FIELDS
        if any(getattr(row, name) not in (None, ()) for row in preview.rows)
    ]
    console.print(Text(printable(preview.source)), soft_wrap=True)
    if preview.uses:
        columns = Table(box=None, padding=(0, 1))
        for title in ("column", "from", ""):
            columns.add_column(title, overflow="fold")
        for use in preview.uses:
            cells = (use.target, use.source, use.remark)
            columns.add_row(*(Text(printable(cell)) for cell in cells))
        console.print(columns)
    lines = [
        ["arrival", *_format_arrivals(preview)]
        if name == COLUMN_NS
        else [name, *(_format(name, getattr(row, name)) for row in preview.rows)]
        for name in filled
    ]
    console.print(_make_rows(lines, console), crop=False)


def _make_rows(lines: list[list[str]], console: Console) -> Table:
    """Return a table of the rows side by side: as many as fit on a terminal, else all."""
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    widths[0] = max(widths[0], len(_ROWS_TITLE))
    shown = len(widths)
    while console.is_terminal and shown > 2 and sum(widths[:shown]) + 2 * shown > console.width:
        shown -= 1
    table = Table(box=None, padding=(0, 1))
    for title, width in zip((_ROWS_TITLE, *[""] * (shown - 1)), widths, strict=False):
        table.add_column(title, no_wrap=True, min_width=width)
    for cells in lines:
        table.add_row(*map(Text, cells[:shown]))
    return table


def _format(name: str, value: Any) -> str:
    if value is None or value == ():
        return "-"
    if name == "total_hashes":
        return f"{len(value):,} hashes"
    if isinstance(value, int) and not isinstance(value, bool) and name.endswith("_tokens"):
        return f"{value:,}"
    return printable(str(value)[:_MAX_CELL])


def _format_arrivals(preview: ImportPreview) -> Iterator[str]:
    """Yield the first arrival, and the times from it to the others."""
    first_ns = preview.rows[0].timestamp_start_unix_ns
    if preview.clock is Clock.ABSOLUTE:
        moment = datetime.fromtimestamp(first_ns // NS_PER_S, UTC)
        fraction = f".{first_ns % NS_PER_S:09d}".rstrip("0").rstrip(".")
        yield f"{moment:%Y-%m-%d %H:%M:%S}{fraction}Z"
    else:
        yield f"{Decimal(first_ns) / NS_PER_S:f} s"
    for row in preview.rows[1:]:
        yield f"{Decimal(row.timestamp_start_unix_ns - first_ns) / NS_PER_S:+f} s"

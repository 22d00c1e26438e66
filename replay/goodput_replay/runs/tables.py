"""Tables that fit a terminal: of several forms of a table, the first one that fits is printed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.measure import Measurement

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

__all__ = ["choose_table", "open_console"]

_UNBOUNDED: Final = 10_000


def open_console() -> Console:
    """Return a console on stdout for tables.

    It has the width of the terminal, or `COLUMNS` if set. Into a pipe or a file, the width is
    unlimited, so that programs and pagers get every column.
    """
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=_UNBOUNDED)


def choose_table(forms: Iterable[Table], console: Console) -> Table:
    """Return the first form that fits the console without wrapping, otherwise the last one.

    Args:
        forms: at least one table, the preferred first.
        console: output.
    """
    # With the width of the console, rich would return the width after cropping.
    unbounded = console.options.update(width=_UNBOUNDED)
    for form in forms:
        if Measurement.get(console, unbounded, form).maximum <= console.width:
            break
    return form

"""Errors of traces and of files that should become traces.

GoodputError
└── InputError              64
    └── TraceError              an invalid file: names it, the problem and the remedy
        ├── NotATraceError      another format, or columns of the trace format are missing
        ├── RowError            an invalid value: names the file, the row (from 1) and the column
        └── TooLargeError       a file that decodes to more bytes than the limit

The parsers of the transforms' options raise `ValueError`, which argparse converts to a
`UsageError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_core.errors import InputError
from goodput_core.text import printable

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["NotATraceError", "RowError", "TooLargeError", "TraceError"]


class TraceError(InputError):
    """A trace, or a source of an import, that cannot be used.

    Problems quote the file's content, so characters that are not printable are escaped.

    Args:
        path: the file, as the user named it.
        problem: what is wrong and what to do, without the path.
    """

    def __init__(self, path: Path | str, problem: str) -> None:
        self.path = str(path)
        self.problem = problem
        super().__init__(printable(f"{path}: {problem}"))


class NotATraceError(TraceError):
    """A readable file that is not a trace."""


class RowError(TraceError):
    """A value of a trace that breaks a rule.

    Args:
        path: the file, as the user named it.
        row: number of the row, from 1.
        column: the column, or the source's name for it.
        problem: what is wrong and what to do.
        unit: `row`, or `line` for a text source.
    """

    def __init__(
        self, path: Path | str, row: int, column: str, problem: str, *, unit: str = "row"
    ) -> None:
        self.row = row
        self.column = column
        self.reason = problem
        super().__init__(path, f"{unit} {row}, column {column}: {problem}")


class TooLargeError(TraceError):
    """A file that decodes to more bytes than the limit.

    Args:
        path: the file, as the user named it.
        limit_bytes: the limit.
    """

    def __init__(self, path: Path | str, limit_bytes: int) -> None:
        super().__init__(
            path,
            f"the file decodes to more than the limit of {limit_bytes / (1 << 20):,.0f} MiB; "
            "if you trust the file, raise the limit with --max-decoded-size",
        )

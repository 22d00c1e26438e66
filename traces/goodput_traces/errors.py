"""What can be wrong with a trace or with a file that should become one.

GoodputError
└── InputError              64
    └── TraceError              a file: names it, says what is wrong and what to do
        ├── NotATraceError      not a trace at all: another format, no column of a trace
        └── RowError            one value: names the file, the row (from 1) and the column

Options of transforms are text on a command line: their parsers raise `ValueError`, which
argparse turns into a `UsageError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_core.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["NotATraceError", "RowError", "TraceError"]


class TraceError(InputError):
    """A trace file, or a source of one, that cannot be used.

    Args:
        path: the file, as the user named it.
        problem: what is wrong and what to do, without the path.
    """

    def __init__(self, path: Path | str, problem: str) -> None:
        self.path = str(path)
        self.problem = problem
        super().__init__(f"{path}: {problem}")


class NotATraceError(TraceError):
    """A readable file that holds something else."""


class RowError(TraceError):
    """A value of a trace that breaks a rule.

    Args:
        path: the file, as the user named it.
        row: the row's number, the first is 1.
        column: the column, or the source's name for it.
        problem: what is wrong and what to do.
        unit: what the number counts: a `row`, or a `line` of a text source.
    """

    def __init__(
        self, path: Path | str, row: int, column: str, problem: str, *, unit: str = "row"
    ) -> None:
        self.row = row
        self.column = column
        super().__init__(path, f"{unit} {row}, column {column}: {problem}")

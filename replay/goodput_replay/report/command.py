"""`replay report DIR`: rebuild the report of a run, for example after an upgrade."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from goodput_core.cli import CommandParser
from goodput_core.errors import ExitCode, InputError
from goodput_core.files import is_disk_full
from goodput_core.text import printable
from goodput_replay.runs.named_outputs import require_output

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main", "make_parser"]


def main(argv: Sequence[str]) -> int:
    """Rebuild the HTML from `records.parquet` and `summary.json`.

    Args:
        argv: the arguments after `replay report`.

    Raises:
        UsageError: an argument is invalid, or the output is another file of a run.
        InputError: the folder has no readable run, or the file cannot be written.
    """
    given = make_parser().parse_args(argv)
    from goodput_replay.report.run_report import write_report  # noqa: PLC0415 - loads numpy

    out: Path | None = given.out
    if out is not None:
        require_output("--out", out, is_report=True)
    try:
        written = write_report(given.folder, out)
    except OSError as error:
        if is_disk_full(error):
            raise
        where = out if out is not None else given.folder
        why = error.strerror or type(error).__name__
        raise InputError(f"{where}: the report cannot be written ({why}); give --out") from error
    if written.is_file():  # a pipe may be the standard output, which then has only the page
        sys.stdout.write(f"{printable(str(written))}\n")
    return ExitCode.PASS


def make_parser() -> CommandParser:
    """Build the parser of `replay report`."""
    parser = CommandParser(
        "replay report",
        summary="Rebuild the HTML report of a run from its records and its summary.",
        examples=(
            "replay report runs/20260304T050607Z-sample-chat",
            "replay report runs/candidate --out candidate.html",
        ),
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="the run's folder")
    parser.add_argument(
        "-o", "--out", metavar="FILE", type=Path, help="file to write (default: DIR/report.html)"
    )
    return parser

"""Output files that options name: pages, tables, JUnit XML and Markdown.

An output replaces an earlier one of its name, but never the files that it is made from.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Final

from goodput_core.errors import UsageError
from goodput_replay.runs.files import RECORDS_FILE, REPORT_FILE, RUN_FILES, SERVICE_LOG_FILE

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["require_output"]

_NAMES: Final = {*RUN_FILES, SERVICE_LOG_FILE}


def require_output(option: str, path: Path, *, is_report: bool = False) -> None:
    """Reject an output that would replace a file of a run, a trace or the standard output.

    Args:
        option: the option that names the output.
        path: the output.
        is_report: True if the output is the report of a run, which may be in its folder.

    Raises:
        UsageError: the output is a file of a run, may be a trace, or is the standard output.
    """
    found = path.resolve()
    is_taken = found.name in _NAMES and not (is_report and found.name == REPORT_FILE)
    if is_taken and (found.parent / RECORDS_FILE).exists():
        raise UsageError(f"{option} {path}: is a file of a run; name another file")
    if found.suffix == ".parquet" and found.exists():
        raise UsageError(f"{option} {path}: may be a trace; name another file")
    if _is_standard_output(path):
        raise UsageError(f"{option} {path}: is the standard output, too; name another file")


def _is_standard_output(path: Path) -> bool:
    """Return True if the shell redirected the standard output into this file."""
    try:
        found, printed = path.stat(), os.fstat(1)
    except OSError:
        return False
    return stat.S_ISREG(printed.st_mode) and os.path.samestat(found, printed)

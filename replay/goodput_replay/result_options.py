"""Options of `replay` and its subcommands about the place of their results.

A pod reports its result in a file that Kubernetes reads when the container ends, and its run folder
outlives the pod in object storage.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from goodput_core.cli import argument_type
from goodput_core.errors import GoodputError, InputError, UnreachableError
from goodput_core.files import is_disk_full
from goodput_core.replay_job import (
    MAX_MESSAGE_BYTES,
    REASON_ERROR,
    REASON_UNREACHABLE,
    ABResult,
    ReplayResult,
    encode_message,
)
from goodput_replay.runs.files import DiskFullError
from goodput_replay.storage import parse_uri

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from goodput_replay.runs.summary import Summary

__all__ = [
    "add_result_file",
    "add_upload",
    "reporting_errors",
    "write_comparison",
    "write_result",
]


def add_upload(parser: argparse._ActionsContainer, folder: str) -> None:
    """Add the option `--upload`.

    Args:
        parser: parser or group of options.
        folder: the uploaded folder, for the help.
    """
    parser.add_argument(
        "--upload",
        metavar="URI",
        type=argument_type(parse_uri, "URI"),
        help=f"copy {folder} to object storage at the end, such as s3://BUCKET/PATH; credentials "
        "come from the environment",
    )


def add_result_file(parser: argparse._ActionsContainer) -> None:
    """Add the option `--result-file`."""
    parser.add_argument(
        "--result-file",
        metavar="FILE",
        type=Path,
        help="write the verdict, or the error, as JSON of at most 4096 bytes; in a pod, "
        "/dev/termination-log makes it the termination message",
    )


def write_result(file: Path | None, summary: Summary) -> None:
    """Write the verdict of a run to the file of `--result-file`, if there is one.

    Raises:
        InputError: the file cannot be written.
        DiskFullError: its disk is full.
    """
    overall, verdict = summary.overall, summary.verdict
    result = ReplayResult(
        verdict=verdict.kind,
        reason=verdict.reason.value,
        message=verdict.sentence,
        valid=summary.validity.valid,
        requests=overall.requests,
        good=overall.good,
        total=overall.total,
    )
    _write(file, result)


def write_comparison(file: Path | None, result: ABResult) -> None:
    """Write the result of a comparison to the file of `--result-file`, if there is one.

    Raises:
        InputError: the file cannot be written.
        DiskFullError: its disk is full.
    """
    _write(file, result)


@contextmanager
def reporting_errors(
    file: Path | None, result: type[ReplayResult | ABResult] = ReplayResult
) -> Iterator[None]:
    """Write an error that ends the block to the file of `--result-file`, and raise it again.

    The file is emptied first, so that a command that is killed does not leave the result of an
    earlier one.

    Args:
        file: the file; None for none.
        result: kind of the written result.

    Raises:
        InputError: the file cannot be written, which is found before the block begins.
        DiskFullError: its disk is full.
    """
    if file is not None:
        with _explained(file):
            _empty(file)
    try:
        yield
    except GoodputError as error:
        is_unreachable = isinstance(error, UnreachableError)
        reason = REASON_UNREACHABLE if is_unreachable else REASON_ERROR
        try:
            _write(file, result(reason=reason, message=str(error)))
        except GoodputError as unwritten:
            if str(unwritten) != str(error):
                sys.stderr.write(f"warning: {unwritten}\n")
        raise


def _empty(file: Path) -> None:
    """Empty the file, or create it, and check that a result fits on its disk."""
    if file.exists() and not file.is_file() and not file.is_dir():
        # A pipe or a device: an opened pipe would wait for its reader.
        if not os.access(file, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return
    with file.open("wb") as opened:
        opened.write(bytes(MAX_MESSAGE_BYTES))
        opened.flush()
        opened.truncate(0)


def _write(file: Path | None, result: ReplayResult | ABResult) -> None:
    if file is None:
        return
    with _explained(file):
        # Kubernetes mounts its file into the container, so it cannot be replaced by another one.
        file.write_text(encode_message(result), encoding="utf-8")


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise DiskFullError(
                f"--result-file {file}: the disk is full; free some space and run again"
            ) from error
        raise InputError(
            f"--result-file {file}: cannot be written ({error.strerror}); name a file in an "
            "existing folder"
        ) from error

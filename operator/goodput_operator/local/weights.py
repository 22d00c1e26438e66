"""Fetches the weights of a real model before the replicas start, which are ready sooner then."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Final

from goodput_core.errors import ExitCode, InputError, InternalError, Interrupted

if TYPE_CHECKING:
    from goodput_operator.local.commands import Command
    from goodput_operator.local.reporter import Reporter

__all__ = ["fetch_weights"]

_ERROR: Final = "error: "


def fetch_weights(command: Command, reporter: Reporter, *, exit_with_parent: bool) -> None:
    """Run `goodput engine fetch` and report its progress.

    Args:
        command: the command, which ends when its stdin is closed.
        reporter: gets the progress.
        exit_with_parent: True if the end of this process's stdin stops it too.

    Raises:
        InputError: the weights are not available.
        InternalError: the command failed for another reason.
        Interrupted: the command was stopped.
    """
    error = ""
    with subprocess.Popen(
        command.argv,
        stdin=None if exit_with_parent else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(command.env),
    ) as process:
        try:
            assert process.stderr is not None
            for raw in process.stderr:
                line = raw.decode(errors="replace").rstrip()
                if line.startswith(_ERROR):
                    error = line.removeprefix(_ERROR)
                else:
                    reporter.report_fetching(line)
            assert process.stdout is not None
            folder = process.stdout.read()
        except BaseException:
            process.kill()
            raise
    if error:
        kind = InputError if process.returncode == ExitCode.USAGE else InternalError
        raise kind(error)
    if process.returncode == ExitCode.INTERRUPTED or (not process.returncode and not folder):
        raise Interrupted("stopped while the weights were fetched")
    if process.returncode:
        raise InternalError(f"goodput engine fetch ended with code {process.returncode}")

"""The errors that a user can see, and the exit code of each.

GoodputError                one sentence: the problem, its place and the remedy
├── UsageError         64   the command line or a combination of options
├── InputError         64   a file, a trace, a manifest: names the file and the place
│   └── SpecError           a field of a manifest: names its path
│       └── UnsupportedError  a valid field that this version does not implement
├── UnreachableError   64   a target that did not respond before the first request was sent
├── AbortedRun          3   a run ended by `--abort-on`
├── InternalError      70   a bug, a full disk, a child process that died without a user error
└── Interrupted       130   Ctrl-C, SIGTERM or a closed terminal

Only verdicts use the codes 0 to 3, except for `--abort-on`. A command whose output is closed
early, as by `| head`, ends with 141, as a shell reports a program that SIGPIPE ended. The errors of
a component's own `errors.py` derive from these.
"""

from __future__ import annotations

import difflib
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "AbortedRun",
    "ExitCode",
    "GoodputError",
    "InputError",
    "InternalError",
    "Interrupted",
    "SpecError",
    "UnreachableError",
    "UnsupportedError",
    "UsageError",
    "did_you_mean",
    "install_hint",
    "root_of",
]

_MAX_WORD: Final = 60


class ExitCode(IntEnum):
    """The exit codes of all commands."""

    PASS = 0
    FAIL = 1
    INCONCLUSIVE = 2
    INVALID = 3
    USAGE = 64
    INTERNAL = 70
    INTERRUPTED = 130
    CLOSED_OUTPUT = 141


def root_of(error: BaseException) -> BaseException:
    """Return the first error within nested exception groups, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean …?` with the known word closest to `word`, else an empty text."""
    if len(word) > _MAX_WORD:
        return ""
    # Wrong case is the most frequent mistake: sloclass, auto, TTFTMs.
    by_case = {name.casefold(): name for name in known}
    close = difflib.get_close_matches(word.casefold(), by_case, n=1, cutoff=0.6)
    return f"; did you mean {by_case[close[0]]}?" if close else ""


def install_hint(extra: str) -> str:
    """Return the part of a sentence that says how to install an extra.

    The package is on no index, so the command needs a clone.
    """
    return f"run pip install '.[{extra}]' in a clone of Goodput"


class GoodputError(Exception):
    """An error that is shown to the user as one sentence, without a traceback."""

    exit_code: ClassVar[ExitCode] = ExitCode.INTERNAL


class UsageError(GoodputError):
    """An invalid command line."""

    exit_code = ExitCode.USAGE


class InputError(GoodputError):
    """An invalid file."""

    exit_code = ExitCode.USAGE


class SpecError(InputError):
    """An invalid field of a manifest.

    Args:
        path: the field's path as the API server writes it: `spec.slo.classes[0].ttftMs`.
        problem: the problem and the remedy, without the path.
        source: the file's name; None if the manifest was not read from a file.
    """

    def __init__(self, path: str, problem: str, source: str | None = None) -> None:
        self.path = path
        self.problem = problem
        self.source = source
        where = f"{source}: {path}" if source else path
        super().__init__(f"{where}: {problem}")

    def at(self, source: str) -> SpecError:
        """Return the same error with the name of the file."""
        return type(self)(self.path, self.problem, source)


class UnsupportedError(SpecError):
    """A valid field that this version does not implement."""


class UnreachableError(GoodputError):
    """A target that could not be reached before the first request was sent."""

    exit_code = ExitCode.USAGE


class AbortedRun(GoodputError):
    """A run that `--abort-on` ended early; its records are kept."""

    exit_code = ExitCode.INVALID


class InternalError(GoodputError):
    """A bug, a full disk, or a child process that died."""

    exit_code = ExitCode.INTERNAL


class Interrupted(GoodputError):
    """A command stopped by a signal; its records are kept."""

    exit_code = ExitCode.INTERRUPTED

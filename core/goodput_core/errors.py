"""Every error a user can meet, and the exit code each one ends with.

GoodputError                what went wrong in one sentence: what, where, and what to do
├── UsageError         64   the command line or a combination of options
├── InputError         64   a file, a trace, a manifest: names the file and the place
│   ├── SpecError           a field of a manifest: names its path
│   └── NotBuiltError       a manifest asks for something this version does not have
├── UnreachableError   64   a target that did not answer before the first request was sent
├── AbortedRun          3   a run that `--abort-on` ended
├── InternalError      70   a bug, a full disk, a child that died for no reason of the user's
└── Interrupted       130   Ctrl-C, SIGTERM or a closed terminal

Verdicts alone own the codes 0 to 3; a component's own `errors.py` derives from these.
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar

__all__ = [
    "AbortedRun",
    "ExitCode",
    "GoodputError",
    "InputError",
    "InternalError",
    "Interrupted",
    "NotBuiltError",
    "SpecError",
    "UnreachableError",
    "UsageError",
    "root_of",
]


class ExitCode(IntEnum):
    """What a Goodput command tells the shell."""

    PASS = 0
    FAIL = 1
    INCONCLUSIVE = 2
    INVALID = 3
    USAGE = 64
    INTERNAL = 70
    INTERRUPTED = 130


def root_of(error: BaseException) -> BaseException:
    """What a group of tasks ended by: the first error of a group, and of groups within it.

    Any other error is its own root.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class GoodputError(Exception):
    """One sentence for a person; never shown with a traceback."""

    exit_code: ClassVar[ExitCode] = ExitCode.INTERNAL


class UsageError(GoodputError):
    """The command line asks for something that cannot be."""

    exit_code = ExitCode.USAGE


class InputError(GoodputError):
    """A file that cannot be used as it is."""

    exit_code = ExitCode.USAGE


class SpecError(InputError):
    """A field of a manifest that breaks a rule.

    Args:
        path: where the field stands, as the API server writes it: `spec.slo.classes[0].ttftMs`.
        problem: what is wrong and what would be right, without the path.
        source: the file it came from, when there is one.
    """

    def __init__(self, path: str, problem: str, source: str | None = None) -> None:
        self.path = path
        self.problem = problem
        self.source = source
        where = f"{source}: {path}" if source else path
        super().__init__(f"{where}: {problem}")

    def at(self, source: str) -> SpecError:
        """The same error, naming the file it came from."""
        return type(self)(self.path, self.problem, source)


class NotBuiltError(SpecError):
    """A valid manifest asks for what this version does not have yet: refused, never substituted."""


class UnreachableError(GoodputError):
    """A target that could not be reached before anything was sent."""

    exit_code = ExitCode.USAGE


class AbortedRun(GoodputError):
    """A run that ended early because `--abort-on` said so; what was recorded is kept."""

    exit_code = ExitCode.INVALID


class InternalError(GoodputError):
    """A bug, a full disk, or a child process that died."""

    exit_code = ExitCode.INTERNAL


class Interrupted(GoodputError):
    """A person or the system asked to stop; what was recorded is kept."""

    exit_code = ExitCode.INTERRUPTED

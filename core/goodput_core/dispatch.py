"""The `goodput` and `replay` commands: find a component's entry point by name, load only that.

The dispatcher is the one place where an exception becomes a sentence and an exit code, so a
traceback can reach a user only when they ask for it (`GOODPUT_DEBUG=1`).
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, NamedTuple

from goodput_core.cli import installed_version
from goodput_core.contract import DISTRIBUTION, ENV_DEBUG
from goodput_core.errors import ExitCode, GoodputError
from goodput_core.signals import interrupt_by_signals

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["main", "replay", "run_command"]

_GROUP = "goodput.commands"


class _Command(NamedTuple):
    summary: str
    extra: str


_COMMANDS = {
    "up": _Command("run an LLMService on this machine: replicas and a router", "up"),
    "operator": _Command("look after the LLMServices of a Kubernetes cluster", "operator"),
    "replay": _Command("fire a trace at a service and judge every request", "replay"),
    "trace": _Command("import, describe, export and synthesize traces", "replay"),
    "engine": _Command("run one serving replica", "engine"),
    "router": _Command("run the router in front of replicas", "engine"),
    "policies": _Command("compare policies, budgets and replicas on a trace", "replay"),
    "device": _Command("list, show and fit device profiles", "engine"),
}

_USAGE = """\
usage: goodput COMMAND [ARGUMENT ...]

Serve LLMs, replay production traces, and see which requests kept their promise.

commands:
{commands}

examples:
  goodput up -f examples/chat.yaml
  goodput replay --trace prod.parquet -f examples/chat.yaml
  goodput trace describe prod.parquet
  goodput COMMAND --help
"""


def main() -> None:
    """Entry point of `goodput`."""
    interrupt_by_signals()
    sys.exit(run_command(sys.argv[1:]))


def replay() -> None:
    """Entry point of `replay`: the same command as `goodput replay`."""
    interrupt_by_signals()
    sys.exit(run_command(["replay", *sys.argv[1:]]))


def run_command(argv: list[str]) -> int:
    """Run one command and return its exit code; every error becomes one sentence on stderr."""
    try:
        code = _run(argv)
    except BrokenPipeError:
        # The reader of a command's output went away before its end. That is nobody's mistake,
        # but a gate piped into `head` must not look as if it had passed.
        code = ExitCode.INTERNAL
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # Point stdout at nothing so that the interpreter's own flush at exit does not raise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in {"-h", "--help", "help"}:
        sys.stdout.write(_usage())
        return ExitCode.PASS if argv else ExitCode.USAGE
    if argv[0] == "--version":
        sys.stdout.write(f"goodput {installed_version()}\n")
        return ExitCode.PASS
    return _guarded(argv[0], argv[1:])


def _guarded(name: str, argv: list[str]) -> int:
    try:
        command = _load(name)
        if command is None:
            known = ", ".join(_COMMANDS)
            return _fail(f"goodput: no command {name!r}; commands are {known}", ExitCode.USAGE)
        return int(command(argv))
    except GoodputError as error:
        _trace_when_asked()
        return _fail(f"{error}", error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", ExitCode.INTERRUPTED)
    except SystemExit as stop:
        # argparse ends so after `--help`, and rich, with 1, when a pipe breaks: a library's own
        # exit must not look like a verdict.
        return ExitCode.INTERNAL if stop.code else ExitCode.PASS
    except BrokenPipeError:
        raise
    except MemoryError:
        return _fail("out of memory; use --window or --limit to take less", ExitCode.INTERNAL)
    except OSError as error:
        _trace_when_asked()
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            where = f" at {error.filename}" if error.filename else ""
            return _fail(f"the disk is full{where}; free some space and run again", 70)
        return _fail(_internal(error), ExitCode.INTERNAL)
    except Exception as error:  # noqa: BLE001 - the last stop before a user would see a traceback
        _trace_when_asked()
        return _fail(_internal(error), ExitCode.INTERNAL)


def _load(name: str) -> Callable[[list[str]], int] | None:
    found = list(entry_points(group=_GROUP, name=name))
    if not found:
        return None
    try:
        loaded: Callable[[list[str]], int] = found[0].load()
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("goodput_"):
            raise
        extra = _COMMANDS[name].extra if name in _COMMANDS else "all"
        raise MissingExtraError(name, extra, error.name or str(error)) from error
    return loaded


class MissingExtraError(GoodputError):
    """A command whose component was not installed."""

    exit_code = ExitCode.USAGE

    def __init__(self, command: str, extra: str, module: str) -> None:
        super().__init__(
            f"`goodput {command}` needs the package {module!r}: "
            f"pip install '{DISTRIBUTION}[{extra}]'"
        )


def _usage() -> str:
    width = max(map(len, _COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {c.summary}" for name, c in _COMMANDS.items())
    return _USAGE.format(commands=rows)


def _internal(error: BaseException) -> str:
    return (
        f"internal error: {type(error).__name__}: {error}; "
        f"run again with {ENV_DEBUG}=1 for the traceback and report it"
    )


def _trace_when_asked() -> None:
    if os.environ.get(ENV_DEBUG):
        traceback.print_exc()


def _fail(sentence: str, code: int) -> int:
    sys.stderr.write(f"error: {sentence}\n")
    return code

"""The `goodput` and `replay` commands: load the entry point of the command typed, and no other.

Only this module turns an exception into a sentence and an exit code, so that a user sees a
traceback only on request (`GOODPUT_DEBUG=1`).
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final, NamedTuple

from goodput_core.cli import installed_version
from goodput_core.contract import ENV_DEBUG
from goodput_core.errors import ExitCode, GoodputError, did_you_mean, install_hint
from goodput_core.signals import interrupt_by_signals
from goodput_core.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["COMMANDS", "kubectl_goodput", "main", "replay", "run_command"]

_GROUP: Final = "goodput.commands"


class _CommandInfo(NamedTuple):
    """One command: its line in the usage, and the extra that installs what it imports."""

    summary: str
    extra: str


COMMANDS: Final = {
    "up": _CommandInfo("run an LLMService on this machine: replicas and a router", "up"),
    "operator": _CommandInfo("run the Kubernetes operator for LLMServices", "operator"),
    "wait": _CommandInfo("wait for the verdict of a TraceReplay in a cluster", "operator"),
    "kubectl": _CommandInfo("show services of a cluster; also as `kubectl goodput`", "operator"),
    "replay": _CommandInfo("replay a trace against a service and judge every request", "replay"),
    "trace": _CommandInfo("import, describe, export, synthesize and anonymize traces", "replay"),
    "policies": _CommandInfo("compare policies, budgets and replica counts on a trace", "replay"),
    "engine": _CommandInfo("run one serving replica", "engine"),
    "router": _CommandInfo("run the router in front of replicas", "engine"),
    "tenants": _CommandInfo("manage the API keys and weights of a router's tenants", ""),
    "device": _CommandInfo("list, show, fit and calibrate device profiles", "engine"),
    "schema": _CommandInfo("print the JSON Schema of an LLMService manifest", ""),
    "completion": _CommandInfo("print a completion script for bash, zsh or tcsh", "completion"),
}

_SUBCOMMAND_EXTRAS: Final = {"device calibrate": "replay"}
"""Extras of subcommands that are in another package than their command."""

_USAGE: Final = """\
usage: goodput COMMAND [ARGUMENT ...]

Serve LLMs, replay production traces, and see which requests met their latency objectives.

commands:
{commands}

options:
  -h, --help  show this help and exit; `goodput help COMMAND` shows a command's
  --version   show the version and exit

examples:
  goodput up -f examples/chat.yaml
  goodput replay --trace sample -f examples/chat.yaml
  goodput trace describe sample
  goodput help trace import
"""


def main() -> None:
    """Run `goodput`."""
    _open_closed_outputs()
    interrupt_by_signals()
    sys.exit(run_command(sys.argv[1:]))


def replay() -> None:
    """Run `replay`, the same command as `goodput replay`."""
    _open_closed_outputs()
    interrupt_by_signals()
    sys.exit(run_command(["replay", *sys.argv[1:]]))


def kubectl_goodput() -> None:
    """Run `kubectl-goodput`, which kubectl runs as `kubectl goodput`."""
    _open_closed_outputs()
    interrupt_by_signals()
    sys.exit(run_command(["kubectl", *sys.argv[1:]]))


def _open_closed_outputs() -> None:
    """Discard output to a standard stream that the caller closed, as a shell does with `>&-`."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123


def run_command(argv: list[str]) -> int:
    """Run one command and return its exit code; every error becomes one sentence on stderr."""
    try:
        code = _run(argv)
    except BrokenPipeError:
        # The reader closed stdout early. The exit code must not be that of a verdict: a gate piped
        # into `head` has not passed.
        code = ExitCode.CLOSED_OUTPUT
    except OSError as error:  # of --version and --help
        code = _fail(_explain_os_error(error), ExitCode.INTERNAL)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
    except OSError as error:
        if code != ExitCode.INTERNAL:  # else the error was reported
            code = _fail(_explain_os_error(error), ExitCode.INTERNAL)
        _discard_output()
    return code


def _discard_output() -> None:
    """Redirect stdout so that the interpreter's own flush at exit does not raise."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: list[str]) -> int:
    match argv:
        case ["help", command, *rest] if command != "help" and not command.startswith("-"):
            return _run_guarded(command, [*rest, "--help"])
        case [] | ["-h" | "--help" | "help", *_]:
            sys.stdout.write(_format_usage())
            return ExitCode.PASS if argv else ExitCode.USAGE
        case ["--version", *_]:
            sys.stdout.write(f"goodput {installed_version()}\n")
            return ExitCode.PASS
    return _run_guarded(argv[0], argv[1:])


def _run_guarded(name: str, argv: list[str]) -> int:
    try:
        # A subcommand of another package has an entry point of its own, with a dot.
        command = _load(f"{name}.{argv[0]}") if argv else None
        if command is not None:
            name, argv = f"{name} {argv[0]}", argv[1:]
        else:
            command = _load(name)
        if command is None:
            return _fail(
                f"goodput: no command {name!r}{did_you_mean(name, COMMANDS)}; "
                f"commands are {', '.join(COMMANDS)}",
                ExitCode.USAGE,
            )
        return int(command(argv))
    except GoodputError as error:
        _print_traceback_if_debugging()
        return _fail(f"{error}", error.exit_code)
    except ModuleNotFoundError as error:
        _print_traceback_if_debugging()
        if error.name is None or error.name.startswith("goodput_"):
            return _fail(_explain_internal(error), ExitCode.INTERNAL)
        return _fail(_explain_missing(name, error.name), ExitCode.USAGE)
    except KeyboardInterrupt:
        return _fail("interrupted", ExitCode.INTERRUPTED)
    except SystemExit as stop:
        # argparse exits with 0 after `--help`, and rich with 1 if a pipe breaks. The exit code of
        # a library must not be taken for a verdict.
        return ExitCode.CLOSED_OUTPUT if stop.code else ExitCode.PASS
    except BrokenPipeError:
        raise
    except MemoryError:
        return _fail("out of memory; use --window or --limit to read less", ExitCode.INTERNAL)
    except OSError as error:
        _print_traceback_if_debugging()
        return _fail(_explain_os_error(error), ExitCode.INTERNAL)
    except Exception as error:  # noqa: BLE001 - the last place to catch it before a user sees it
        _print_traceback_if_debugging()
        return _fail(_explain_internal(error), ExitCode.INTERNAL)


def _load(name: str) -> Callable[[list[str]], int] | None:
    found = list(entry_points(group=_GROUP, name=name))
    if not found:
        return None
    loaded: Callable[[list[str]], int] = found[0].load()
    return loaded


def _explain_missing(command: str, module: str) -> str:
    extra = (
        COMMANDS[command].extra if command in COMMANDS else _SUBCOMMAND_EXTRAS.get(command, "all")
    )
    return f"`goodput {command}` needs the package {module!r}; {install_hint(extra)}"


def _format_usage() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {c.summary}" for name, c in COMMANDS.items())
    return _USAGE.format(commands=rows)


def _explain_os_error(error: OSError) -> str:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        where = f" at {error.filename}" if error.filename else ""
        return f"the disk is full{where}; free some space and run again"
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return (
            "this process may not open more files; raise the limit with `ulimit -n` and run again"
        )
    return _explain_internal(error)


def _explain_internal(error: BaseException) -> str:
    return (
        f"internal error: {type(error).__name__}: {error}; "
        f"run again with {ENV_DEBUG}=1 for the traceback and report it"
    )


def _print_traceback_if_debugging() -> None:
    if os.environ.get(ENV_DEBUG):
        traceback.print_exc()


def _fail(sentence: str, code: int) -> int:
    # Sentences quote files and servers.
    sys.stderr.write(f"error: {printable(sentence)}\n")
    return code

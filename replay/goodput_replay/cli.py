"""`replay`: run the command that the arguments name; modules are imported when it needs them."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["main"]

_COMMANDS: Final[Mapping[str, str]] = {
    "ab": "goodput_replay.compare.ab",
    "capacity": "goodput_replay.sweep.capacity",
    "compare": "goodput_replay.compare.compare_command",
    "export": "goodput_replay.export",
    "gate": "goodput_replay.compare.gate_command",
    "merge": "goodput_replay.merge",
    "report": "goodput_replay.report.command",
    "watch": "goodput_replay.watch.command",
}


def main(argv: list[str]) -> int:
    """Replay a trace, or run the command that the first argument names.

    Args:
        argv: the arguments after `replay`.

    Returns:
        0 for a complete and valid run, 3 for an invalid one; with `--gate` the verdict's code.

    Raises:
        GoodputError: the run could not start, or ended early.
    """
    # Before pyarrow is loaded: its usual allocator keeps freed memory, so that a process would grow
    # with the number of row groups that it reads.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    if argv and (module := _COMMANDS.get(argv[0])):
        command: Callable[[list[str]], int] = import_module(module).main
        return command(argv[1:])
    # The other commands do not need the options of a replay, whose modules take a while to load.
    from goodput_replay.options import parse_options  # noqa: PLC0415

    options = parse_options(argv)
    from goodput_replay.runner import run  # noqa: PLC0415 - loads numpy and pyarrow

    return run(options, argv)

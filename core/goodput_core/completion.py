"""`goodput completion`: print a static completion script for a shell.

The script is generated from the parsers of all commands, which the entry points of the group
`goodput.parsers` build. Completing a line therefore never starts Python.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Final

from goodput_core.cli import CommandParser
from goodput_core.contract import DISTRIBUTION
from goodput_core.dispatch import COMMANDS
from goodput_core.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PARSERS_GROUP", "command_parsers", "main", "make_parser"]

PARSERS_GROUP: Final = "goodput.parsers"
_SHELLS: Final = ("bash", "zsh", "tcsh")


def make_parser() -> CommandParser:
    """Build the parser of `goodput completion`."""
    parser = CommandParser(
        "goodput completion",
        summary="Print a completion script for a shell.",
        examples=(
            'eval "$(goodput completion bash)"          # in ~/.bashrc',
            'eval "$(goodput completion bash replay)"',
            "goodput completion zsh > ~/.zfunc/_goodput  # a folder of $fpath",
        ),
    )
    parser.add_argument("shell", choices=_SHELLS, help="the shell")
    parser.add_argument(
        "program",
        nargs="?",
        choices=("goodput", "replay"),
        default="goodput",
        help="the program to complete (default: %(default)s)",
    )
    return parser


def main(argv: list[str]) -> int:
    """Print the script.

    Raises:
        ModuleNotFoundError: shtab is not installed.
        UsageError: an unknown shell or program.
    """
    args = make_parser().parse_args(argv)
    # The only third-party package of core, needed for this command alone.
    import shtab  # noqa: PLC0415

    root = _build_command("replay") if args.program == "replay" else _build_root()
    for action in _iterate_actions(root):
        if action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined] # shtab reads it
    sys.stdout.write(shtab.complete(root, shell=args.shell, root_prefix=args.program))
    return ExitCode.PASS


def command_parsers() -> dict[str, CommandParser]:
    """Build the parsers of all installed commands.

    Returns:
        Parsers by command name. Subcommands that are missing from their command's parser have
        both names, such as `replay.report`.
    """
    found: dict[str, CommandParser] = {}
    for one in entry_points(group=PARSERS_GROUP):
        try:
            found[one.name] = one.load()()
        except ModuleNotFoundError as error:
            # Without its extra, a command is completed by its name alone.
            if (error.name or "").startswith("goodput_"):
                raise
    return found


def _build_root() -> CommandParser:
    root = CommandParser(
        "goodput", summary=f"{DISTRIBUTION}: serve LLMs and replay production traces."
    )
    commands = root.add_subparsers(metavar="COMMAND", prog="goodput")
    for name, command in COMMANDS.items():
        parser = _build_command(name)
        commands.add_parser(name, help=command.summary, parents=[parser], add_help=False)
    return root


def _build_command(name: str) -> CommandParser:
    """Return the parser of a command with its own subcommands below it."""
    parsers = command_parsers()
    parser = parsers.get(name) or CommandParser(f"goodput {name}")
    below = {
        full.partition(".")[2]: one for full, one in parsers.items() if full.startswith(f"{name}.")
    }
    if below:
        own = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]  # noqa: SLF001
        commands = own[0] if own else parser.add_subparsers(metavar="COMMAND", prog=parser.prog)
        for sub, one in below.items():
            commands.add_parser(sub, help=one.description, parents=[one], add_help=False)
    return parser


def _iterate_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:  # noqa: SLF001 - argparse has no public listing
        yield action
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for below in action.choices.values():
                yield from _iterate_actions(below)

"""The argument parser of all commands: argparse with our exit codes, examples and `--version`.

Options belong to the commands; this module holds only the conventions they share.
"""

from __future__ import annotations

import argparse
import re
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, NoReturn

from goodput_core.contract import DISTRIBUTION
from goodput_core.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "CommandParser",
    "argument_type",
    "installed_version",
    "parse_port",
    "parse_whole",
    "require_two_ports",
]

_MAX_PORT: Final = 65_535
_NEGATIVE_VALUE: Final = re.compile(r"-\.?\d")
_INVALID_CHOICE: Final = re.compile(r"invalid choice: '(.+)' \(choose from (.+)\)")


def installed_version() -> str:
    """Return the version of the installed distribution."""
    return version(DISTRIBUTION)


class CommandParser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises `UsageError` (exit 64), and whose help ends in examples.

    Args:
        prog: the command as it is typed: `goodput trace import`.
        summary: one sentence; the first line of the help.
        examples: command lines that work as written.
    """

    def __init__(
        self, prog: str, *, summary: str | None = None, examples: Sequence[str] = (), **kwargs: Any
    ) -> None:
        epilog = "examples:\n" + "\n".join(f"  {line}" for line in examples) if examples else None
        kwargs.setdefault("description", summary)
        kwargs.setdefault("epilog", epilog)
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(prog=prog, **kwargs)
        # argparse takes -1 for a value, but -1% and -5s for options. No option has such a name.
        self._negative_number_matcher = _NEGATIVE_VALUE
        if not kwargs.get("parents"):  # a parent has the option already
            self.add_argument(
                "--version",
                action=_PrintVersion,
                nargs=0,
                default=argparse.SUPPRESS,
                help="show the version and exit",
            )

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing usage and exiting with argparse's own code."""
        if match := _INVALID_CHOICE.search(message):
            message += did_you_mean(match[1], (word.strip("' ") for word in match[2].split(",")))
        raise UsageError(f"{self.prog}: {message}; see `{self.prog} --help`")


class _PrintVersion(argparse.Action):
    # argparse's own action takes the text when the parser is built; reading the metadata then
    # would slow down every command.
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        sys.stdout.write(f"{parser.prog.partition(' ')[0]} {installed_version()}\n")
        parser.exit()


def argument_type(parse: Callable[[str], Any], name: str) -> Callable[[str], Any]:
    """Wrap a parser that raises `ValueError` so that argparse shows its message to the user.

    Args:
        parse: the parser of one argument.
        name: the type's name in argparse's own messages.
    """

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    convert.__name__ = name
    return convert


def parse_whole(text: str, low: int, high: int, what: str) -> int:
    """Return a whole number from `low` to `high`.

    Args:
        text: decimal digits without sign, spaces or underscores.
        low: the minimum, inclusive.
        high: the maximum, inclusive.
        what: the number's name in the error, such as "a port".

    Raises:
        ValueError: the text is not such a number.
    """
    # int() alone would accept '1_0' and ' 1 '.
    if not (text.isascii() and text.isdigit()) or len(text) > 9 or not low <= int(text) <= high:
        raise ValueError(f"{text[:40]!r} is not {what} in {low} to {high}")
    return int(text)


def parse_port(text: str) -> int:
    """Return a port number; 0 selects any free port.

    Raises:
        ValueError: the text is not a port number.
    """
    return parse_whole(text, 0, _MAX_PORT, "a port")


def require_two_ports(args: argparse.Namespace, parser: CommandParser) -> None:
    """Reject equal values of `--port` and `--admin-port`, unless both are 0.

    Raises:
        UsageError: the ports are equal.
    """
    if args.port == args.admin_port != 0:
        raise UsageError(
            f"{parser.prog}: --port and --admin-port are both {args.port}; "
            "give them different ports"
        )

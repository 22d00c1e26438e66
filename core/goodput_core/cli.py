"""How every Goodput command parses its arguments: argparse with our exit codes and examples.

Only the conventions live here, so that `goodput trace` and `goodput up` fail and help alike;
each component keeps its own options.
"""

from __future__ import annotations

import argparse
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, NoReturn

from goodput_core.contract import DISTRIBUTION
from goodput_core.errors import UsageError

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


def installed_version() -> str:
    """Return the version of the installed distribution."""
    return version(DISTRIBUTION)


class CommandParser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are `UsageError` (exit 64) and whose help ends in examples.

    Args:
        prog: the words a person types: `goodput trace import`.
        summary: one sentence; the help's first line.
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

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing usage and exiting with argparse's own code."""
        raise UsageError(f"{self.prog}: {message}; see `{self.prog} --help`")


def argument_type(parse: Callable[[str], Any], name: str) -> Callable[[str], Any]:
    """Wrap a parser that raises `ValueError` so that argparse repeats its sentence to the user."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    convert.__name__ = name
    return convert


def parse_whole(text: str, low: int, high: int, what: str) -> int:
    """A whole number within bounds; `what` it is, for the sentence: "a port".

    Raises:
        ValueError: it is none.
    """
    # int() alone would take '1_0' and ' 1 '.
    if not (text.isascii() and text.isdigit()) or len(text) > 9 or not low <= int(text) <= high:
        raise ValueError(f"{text[:40]!r} is not {what} in {low} to {high}")
    return int(text)


def parse_port(text: str) -> int:
    """A port; 0 takes any free one.

    Raises:
        ValueError: it is none.
    """
    return parse_whole(text, 0, _MAX_PORT, "a port")


def require_two_ports(args: argparse.Namespace, parser: CommandParser) -> None:
    """Refuse `--port` and `--admin-port` that name the same port.

    Raises:
        UsageError: they do.
    """
    if args.port == args.admin_port != 0:
        raise UsageError(
            f"{parser.prog}: --port and --admin-port are both {args.port}; "
            "give them different ports"
        )

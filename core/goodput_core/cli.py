"""How every Goodput command parses its arguments: argparse with our exit codes and examples.

Only the conventions live here, so that `goodput trace` and `goodput up` fail and help alike;
each component keeps its own options.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, NoReturn

from goodput_core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["CommandParser", "argument_type"]


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

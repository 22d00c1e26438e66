"""`goodput operator`: the command line, before and after the process that it starts."""

from __future__ import annotations

from goodput_operator.manager.assembly import assemble
from goodput_operator.manager.options import parse_options
from goodput_operator.manager.process import run_operator

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Look after the services of a cluster until asked to stop.

    Returns:
        0 after SIGTERM, 130 after Ctrl-C.

    Raises:
        GoodputError: it cannot run as asked, or can run no longer.
    """
    return run_operator(parse_options(argv), assemble)

"""What `kopf run` does otherwise than `goodput operator`, and how the two are made alike.

There Kopf parses a command line of its own, sets up logging, and ends without an error whatever
happened to the operator. All three are mended by way of its command, which is click's.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

import click
import kopf

from goodput_core.contract import ENV_OPERATOR_OPTIONS
from goodput_core.errors import GoodputError, InternalError, UsageError
from goodput_operator.manager.logs import configure_logging
from goodput_operator.manager.options import parse_options
from goodput_operator.manager.wiring import wire

if TYPE_CHECKING:
    from collections.abc import Collection

    from goodput_operator.manager.wiring import Assemble

__all__ = ["register"]


def register(argv: list[str], make: Assemble) -> None:
    """Register the operator's handlers with the `kopf run` that imports the caller.

    Args:
        argv: options of `goodput operator`.
        make: makes the operator.

    Raises:
        Exit: the options make no sense, which stderr tells; Kopf's command ends by it.
    """
    command = click.get_current_context()
    try:
        options = parse_options(argv)
        _require_same(options.namespaces, command.params["namespaces"])
    except GoodputError as error:
        raise _ended(error) from error
    configure_logging(debug=options.verbose)
    wired = wire(
        kopf.get_default_registry(),
        options,
        make,
        # Kopf has no other way to be told from within that it must end.
        ended=lambda: os.kill(os.getpid(), signal.SIGTERM),
    )

    def tell() -> None:
        failure = wired.failure()
        if failure is not None:
            raise _ended(failure) from failure

    command.call_on_close(tell)


def _require_same(ours: Collection[str], kopfs: Collection[str]) -> None:
    """Kopf would watch other namespaces than the operator waits for.

    Raises:
        UsageError: it would.
    """
    if set(ours) != set(kopfs):
        raise UsageError(
            f"kopf run watches {_named(kopfs)} and {ENV_OPERATOR_OPTIONS} names {_named(ours)}; "
            "give each namespace both as -n to kopf run and as --namespace in the options, "
            "or neither and -A to kopf run for all"
        )


def _named(namespaces: Collection[str]) -> str:
    return f"the namespaces {', '.join(sorted(namespaces))}" if namespaces else "all namespaces"


def _ended(error: BaseException) -> click.exceptions.Exit:
    """Tell why, as `goodput operator` would, and the code to end with."""
    sys.stderr.write(f"error: {error}\n")
    ours = error if isinstance(error, GoodputError) else InternalError
    return click.exceptions.Exit(ours.exit_code)

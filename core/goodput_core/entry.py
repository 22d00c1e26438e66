"""Entry points of the commands; until the modules are loaded, Ctrl-C ends them silently.

Importing the dispatcher takes a tenth of a second, in which Python's own handler of SIGINT would
print a traceback.
"""

from __future__ import annotations

import signal

__all__ = ["kubectl_goodput", "main", "replay"]


def main() -> None:
    """Entry point of `goodput`."""
    _end_by_interrupt()
    from goodput_core import dispatch  # noqa: PLC0415 - see the module's docstring

    dispatch.main()


def replay() -> None:
    """Entry point of `replay`."""
    _end_by_interrupt()
    from goodput_core import dispatch  # noqa: PLC0415 - see the module's docstring

    dispatch.replay()


def kubectl_goodput() -> None:
    """Entry point of `kubectl-goodput`, which kubectl runs as `kubectl goodput`."""
    _end_by_interrupt()
    from goodput_core import dispatch  # noqa: PLC0415 - see the module's docstring

    dispatch.kubectl_goodput()


def _end_by_interrupt() -> None:
    # A shell ignores SIGINT for its background jobs; then it stays ignored. The dispatcher replaces
    # the default action with its own handler.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

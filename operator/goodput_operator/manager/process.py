"""The operator as a process of its own, Kopf included: how it starts, and which way it ends.

What it decides by comes from whoever calls `run_operator`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING

import kopf

from goodput_core.errors import ExitCode, GoodputError
from goodput_operator.kube.errors import WatchFailedError
from goodput_operator.manager.logs import configure_logging
from goodput_operator.manager.wiring import wire

if TYPE_CHECKING:
    from goodput_operator.manager.options import Options
    from goodput_operator.manager.wiring import Assemble

__all__ = ["run_operator"]


def run_operator(options: Options, make: Assemble) -> int:
    """Look after services until asked to stop.

    Args:
        options: how it runs.
        make: makes the operator.

    Returns:
        0 after SIGTERM, 130 after Ctrl-C.

    Raises:
        GoodputError: it cannot run as asked, or can run no longer.
    """
    configure_logging(debug=options.verbose)
    return asyncio.run(_serve(options, make))


async def _serve(options: Options, make: Assemble) -> int:
    registry = kopf.OperatorRegistry()
    stop = asyncio.Event()
    ready = asyncio.Event()
    wired = wire(registry, options, make, ended=stop.set)
    asked: list[signal.Signals] = []
    loop = asyncio.get_running_loop()

    def ask(number: signal.Signals) -> None:
        asked.append(number)
        stop.set()

    async def take_signals() -> None:
        # Kopf takes them while it starts, and would not tell one from another.
        await ready.wait()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ask, number)

    signals = asyncio.create_task(take_signals(), name="signals")
    try:
        await kopf.operator(
            registry=registry,
            clusterwide=not options.namespaces,
            namespaces=options.namespaces,
            standalone=True,
            stop_flag=stop,
            ready_flag=ready,
        )
    except GoodputError:
        raise
    except Exception as error:
        raise wired.failure() or WatchFailedError(
            f"the watch of the cluster ended: {error}"
        ) from error
    finally:
        signals.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await signals
    if (failure := wired.failure()) is not None:
        raise failure
    return ExitCode.INTERRUPTED if signal.SIGINT in asked else ExitCode.PASS

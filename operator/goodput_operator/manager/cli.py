"""`goodput operator`: Kopf's handlers, signals, logging and the exit status of the process.

Kopf runs the event loop of both `goodput operator` and `kopf run`. Its startup handler starts the
`Operator`, its login handler provides the watch session, and its event handlers fill the cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import kopf
from pythonjsonlogger.json import JsonFormatter

from goodput_core.errors import ExitCode, GoodputError
from goodput_operator.control.admin_ports import Scraper
from goodput_operator.control.pod_measures import PodMeasures
from goodput_operator.kube.errors import WatchFailedError
from goodput_operator.kube.fence import SystemClock
from goodput_operator.kube.watch import configure, register_watches
from goodput_operator.manager.options import Options, parse_options
from goodput_operator.manager.runtime import Operator
from goodput_operator.reconcile.decide import decide

__all__ = ["configure_logging", "create_operator", "main", "register_handlers", "run_operator"]

CreateOperator = Callable[[Options, Callable[[], None]], Operator]
"""Creates an operator from its options and a function that it calls when it fails."""


def main(argv: list[str]) -> int:
    """Run the LLMServices of a cluster until stopped.

    Returns:
        0 after SIGTERM, 130 after Ctrl-C.

    Raises:
        GoodputError: the operator could not start, or failed.
    """
    return run_operator(parse_options(argv), create_operator)


def create_operator(options: Options, on_failure: Callable[[], None]) -> Operator:
    """Create the operator of the command line.

    Args:
        options: settings of the operator.
        on_failure: called once when the operator fails.
    """
    installation = options.installation
    return Operator(
        options,
        decide=partial(decide, installation=installation),
        measure=lambda session: PodMeasures(
            Scraper(session), prometheus_urls=installation.prometheus_urls
        ),
        clock=SystemClock(),
        on_failure=on_failure,
    )


def run_operator(options: Options, create: CreateOperator) -> int:
    """Run the operator until a signal stops it.

    Args:
        options: settings of the operator.
        create: creates the operator.

    Returns:
        0 after SIGTERM, 130 after Ctrl-C.

    Raises:
        GoodputError: the operator could not start, or failed.
    """
    configure_logging(debug=options.verbose)
    return asyncio.run(_run(options, create))


async def _run(options: Options, create: CreateOperator) -> int:
    registry = kopf.OperatorRegistry()
    stop = asyncio.Event()
    ready = asyncio.Event()
    operator = create(options, stop.set)
    register_handlers(registry, operator)
    received: list[signal.Signals] = []
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        received.append(number)
        stop.set()

    async def handle_signals() -> None:
        # Replace the handlers that Kopf installs while it starts: they do not distinguish signals.
        await ready.wait()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal, number)

    signals = asyncio.create_task(handle_signals(), name="signals")
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
        raise operator.failure or WatchFailedError(
            f"the watch of the cluster ended: {error}"
        ) from error
    finally:
        signals.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await signals
    if operator.failure is not None:
        raise operator.failure
    return ExitCode.INTERRUPTED if signal.SIGINT in received else ExitCode.PASS


def register_handlers(registry: kopf.OperatorRegistry, operator: Operator) -> None:
    """Register all Kopf handlers.

    Args:
        registry: Kopf's registry.
        operator: started and stopped by the handlers.
    """

    async def startup(*, settings: kopf.OperatorSettings, **_: Any) -> None:
        configure(settings)
        try:
            await operator.start()
        except Exception as error:
            operator.failure = error
            # Kopf would start again after any other error.
            raise kopf.PermanentError(str(error)) from error

    async def cleanup(**_: Any) -> None:
        await operator.stop()

    async def login(**_: Any) -> kopf.AiohttpSession:
        return await operator.login()

    kopf.on.startup(registry=registry)(startup)
    kopf.on.cleanup(registry=registry)(cleanup)
    kopf.on.login(registry=registry)(login)
    register_watches(
        registry,
        on_change=lambda body, deleted: operator.store_event(body, deleted=deleted),
        enqueue=operator.enqueue,
    )


class _Formatter(JsonFormatter):
    """Formats times in UTC, as RFC 3339 does."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"


def configure_logging(*, debug: bool) -> None:
    """Log JSON lines to stderr: a constant event name and fields, never tokens or complete objects.

    Args:
        debug: True to log the phases of every reconciliation.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _Formatter(
            "%(asctime)s %(levelname)s %(name)s %(message)s",
            rename_fields={
                "asctime": "time",
                "levelname": "level",
                "name": "logger",
                "message": "event",
            },
        )
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("goodput_operator").setLevel(logging.DEBUG if debug else logging.INFO)
    logging.getLogger("kopf").setLevel(logging.WARNING)
    # The command reports a failed start in one sentence, which these logs would repeat.
    logging.getLogger("kopf.activities.startup").setLevel(logging.CRITICAL)
    logging.getLogger("kubernetes.aio.config").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "coroutine 'authenticator' was never awaited", RuntimeWarning)

"""The operator process: Kopf's handlers, signals, logging and the exit status.

Kopf runs the event loop of both `goodput operator` and `kopf run`. Its startup handler starts the
`Operator`, its login handler provides the watch session, and its event handlers feed the cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import kopf
from pythonjsonlogger.json import JsonFormatter

from goodput_core.errors import ExitCode, GoodputError
from goodput_operator.kube.errors import WatchFailedError
from goodput_operator.kube.watch import configure, register_watches

if TYPE_CHECKING:
    from goodput_operator.manager.options import Options
    from goodput_operator.manager.runtime import Operator

__all__ = ["Assemble", "Started", "configure_logging", "register_handlers", "run_operator"]

Assemble = Callable[["Options", Callable[[], None]], "Operator"]
"""Creates an operator from its options and a function that it calls when it fails."""


class Started:
    """The operator that Kopf's startup handler created.

    Attributes:
        operator: None before the startup handler.
        startup_error: why it could not start.
    """

    def __init__(self) -> None:
        self.operator: Operator | None = None
        self.startup_error: Exception | None = None

    def failure(self) -> BaseException | None:
        """Return why it could not start or ended; None if it did not fail."""
        if self.startup_error is not None:
            return self.startup_error
        return None if self.operator is None else self.operator.failure


def register_handlers(
    registry: kopf.OperatorRegistry,
    options: Options,
    make: Assemble,
    *,
    ended: Callable[[], None],
) -> Started:
    """Register all Kopf handlers.

    Args:
        registry: Kopf's.
        options: of the operator.
        make: creates the operator in Kopf's event loop.
        ended: called when the operator fails.
    """
    state = Started()

    def running() -> Operator:
        assert state.operator is not None, "Kopf runs startup handlers before all others"
        return state.operator

    async def startup(*, settings: kopf.OperatorSettings, **_: Any) -> None:
        configure(settings)
        state.operator = make(options, ended)
        try:
            await state.operator.start()
        except Exception as error:
            state.startup_error = error
            # Kopf would retry any other error for ever.
            raise kopf.PermanentError(str(error)) from error

    async def cleanup(**_: Any) -> None:
        if state.operator is not None:
            await state.operator.stop()

    async def login(**_: Any) -> kopf.AiohttpSession:
        return await running().login()

    kopf.on.startup(registry=registry)(startup)
    kopf.on.cleanup(registry=registry)(cleanup)
    kopf.on.login(registry=registry)(login)
    register_watches(
        registry,
        changed=lambda body, deleted: running().changed(body, deleted=deleted),
        enqueue=lambda key: running().enqueue(key),
    )
    return state


def run_operator(options: Options, make: Assemble) -> int:
    """Run the operator until it is stopped by a signal.

    Args:
        options: of the operator.
        make: creates the operator.

    Returns:
        0 after SIGTERM, 130 after Ctrl-C.

    Raises:
        GoodputError: the operator could not start, or failed.
    """
    configure_logging(debug=options.verbose)
    return asyncio.run(_run(options, make))


async def _run(options: Options, make: Assemble) -> int:
    registry = kopf.OperatorRegistry()
    stop = asyncio.Event()
    ready = asyncio.Event()
    state = register_handlers(registry, options, make, ended=stop.set)
    received: list[signal.Signals] = []
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        received.append(number)
        stop.set()

    async def handle_signals() -> None:
        # Kopf installs its own handlers while it starts, which do not tell signals apart.
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
        raise state.failure() or WatchFailedError(
            f"the watch of the cluster ended: {error}"
        ) from error
    finally:
        signals.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await signals
    if (failure := state.failure()) is not None:
        raise failure
    return ExitCode.INTERRUPTED if signal.SIGINT in received else ExitCode.PASS


class _Formatter(JsonFormatter):
    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - the standard library's name
        del datefmt
        at = datetime.fromtimestamp(record.created, UTC)
        return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def configure_logging(*, debug: bool) -> None:
    """Log JSON lines to stderr: a constant event name and fields, never tokens or whole objects.

    Args:
        debug: also log the phases of every reconciliation.
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
    # The command reports a failed start in one sentence, which these would repeat.
    logging.getLogger("kopf.activities.startup").setLevel(logging.CRITICAL)
    logging.getLogger("kubernetes.aio.config").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "coroutine 'authenticator' was never awaited", RuntimeWarning)

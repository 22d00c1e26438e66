"""Ties an operator to Kopf: its handlers start it, stop it, log in for it and feed it.

The same for `goodput operator`, where we run Kopf, and for `kopf run`, where Kopf runs us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import kopf

from goodput_operator.kube.watch import configure, register_watches

if TYPE_CHECKING:
    from goodput_operator.manager.options import Options
    from goodput_operator.manager.runtime import Operator

__all__ = ["Assemble", "Wired", "wire"]

Assemble = Callable[["Options", Callable[[], None]], "Operator"]
"""Makes an operator of its options and of what it calls when it ends by itself."""


class Wired:
    """The operator that Kopf's handlers started, once they did."""

    def __init__(self) -> None:
        self.operator: Operator | None = None
        self.refused: Exception | None = None

    def failure(self) -> BaseException | None:
        """Why it could not start, or ended by itself."""
        if self.refused is not None:
            return self.refused
        return None if self.operator is None else self.operator.failure


def wire(
    registry: kopf.OperatorRegistry,
    options: Options,
    make: Assemble,
    *,
    ended: Callable[[], None],
) -> Wired:
    """Register all handlers.

    Args:
        registry: Kopf's.
        options: of the operator.
        make: makes it, in Kopf's event loop.
        ended: called when it ends by itself.
    """
    wired = Wired()

    def running() -> Operator:
        assert wired.operator is not None, "Kopf delivers nothing before its start-up handlers"
        return wired.operator

    async def started(*, settings: kopf.OperatorSettings, **_: Any) -> None:
        configure(settings)
        wired.operator = make(options, ended)
        try:
            await wired.operator.start()
        except Exception as error:
            wired.refused = error
            # Kopf would try again for ever; whoever started us reads the sentence instead.
            raise kopf.PermanentError(str(error)) from error

    async def stopped(**_: Any) -> None:
        if wired.operator is not None:
            await wired.operator.stop()

    async def login(**_: Any) -> kopf.AiohttpSession:
        return await running().login()

    kopf.on.startup(registry=registry)(started)
    kopf.on.cleanup(registry=registry)(stopped)
    kopf.on.login(registry=registry)(login)
    register_watches(
        registry,
        changed=lambda body, deleted: running().told(body, deleted=deleted),
        enqueue=lambda key: running().wanted(key),
    )
    return wired

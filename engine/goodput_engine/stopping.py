"""Check that the background tasks of a process still run when it stops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_core.errors import InternalError

if TYPE_CHECKING:
    import asyncio

__all__ = ["require_running"]


def require_running(*tasks: asyncio.Future[None]) -> None:
    """Raise the error of a background task that ended too early.

    Raises:
        InternalError: a task ended without an error.
    """
    for task in tasks:
        if task.done():
            task.result()
            raise InternalError("a background task of this process ended; report it as a bug")

"""JSON lines on stderr: a constant event name, then fields.

Tokens and objects of users are never among them.
"""

from __future__ import annotations

import logging
import sys
import warnings
from datetime import UTC, datetime

from pythonjsonlogger.json import JsonFormatter

__all__ = ["configure_logging"]


class _Formatter(JsonFormatter):
    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - the standard library's name
        del datefmt
        at = datetime.fromtimestamp(record.created, UTC)
        return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def configure_logging(*, debug: bool) -> None:
    """Send every logger's events to stderr, one JSON object a line; for a process of our own.

    Args:
        debug: also the phases of every turn.
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
    # A start that fails is told in one sentence by whoever began it. Kopf and the client would
    # tell the same before it, and Python of what Kopf then leaves unstarted.
    logging.getLogger("kopf.activities.startup").setLevel(logging.CRITICAL)
    logging.getLogger("kubernetes.aio.config").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "coroutine 'authenticator' was never awaited", RuntimeWarning)

"""Logs: one line per event on stderr, with a constant name and fields that a program can parse.

The processes of the engine log starts, stops and errors, but no requests: metrics count requests,
and prompts must not appear in a log.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections import Counter
from typing import Final

from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web import RequestPayloadError

__all__ = ["EventCounter", "LineFormatter", "configure_logging"]

_INTERVAL_S: Final = 10.0

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class LineFormatter(logging.Formatter):
    """Formats lines such as `2026-01-31T12:00:00.123Z INFO listening url=http://127.0.0.1:8001`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info and record.exc_info[1] is not None:
            # Escape the traceback to one line, so that a log collector sees a single event.
            fields["traceback"] = self.formatException(record.exc_info)
        rest = "".join(f" {key}={_format_value(value)}" for key, value in fields.items())
        return f"{seconds}.{int(record.msecs):03d}Z {record.levelname} {record.getMessage()}{rest}"


class EventCounter:
    """Logs frequent events as counts, at most one line per interval.

    The first event is logged immediately. `add` requires a running event loop.

    Args:
        log: the logger.
        event: the event's name.
        interval_s: minimum time between two lines.
    """

    def __init__(self, log: logging.Logger, event: str, *, interval_s: float = _INTERVAL_S) -> None:
        self._log = log
        self._event = event
        self._interval_s = interval_s
        self._counts: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, reason: str) -> None:
        """Count one event under a reason."""
        self._counts[reason] += 1
        if self._timer is None:
            self._flush()

    def _flush(self) -> None:
        self._timer = None
        if self._counts:
            self._log.warning(self._event, extra=dict(self._counts))
            self._counts.clear()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._interval_s, self._flush)


def _format_value(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and not any(c in text for c in ' "=')
    return text if plain and text else json.dumps(text)


def configure_logging() -> None:
    """Configure all loggers to write one line per event to stderr; only commands call this."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    handler.addFilter(_is_not_caused_by_client)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # Of libraries, log only errors. The filter drops errors that a client caused.
    for name in ("aiohttp", "asyncio"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _is_not_caused_by_client(record: logging.LogRecord) -> bool:
    """False if a client caused the record, by invalid HTTP or by disconnecting."""
    error = record.exc_info[1] if record.exc_info and record.name == "aiohttp.server" else None
    return not isinstance(error, (HttpProcessingError, RequestPayloadError, ConnectionError))

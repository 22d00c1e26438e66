"""One line per event on stderr: a constant name, then fields a machine can split.

The processes of the engine log start, stop and what went wrong, never a request: metrics count
those, and a prompt must not end up in a log.
"""

from __future__ import annotations

import json
import logging
import sys
import time

from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web import RequestPayloadError

__all__ = ["LineFormatter", "configure_logging"]

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class LineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO listening url=http://127.0.0.1:8001` and so on."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the record holds."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info and record.exc_info[1] is not None:
            # Escaped to one line: a log collector must not see a traceback as fifty events.
            fields["traceback"] = self.formatException(record.exc_info)
        rest = "".join(f" {key}={_value(value)}" for key, value in fields.items())
        return f"{seconds}.{int(record.msecs):03d}Z {record.levelname} {record.getMessage()}{rest}"


def _value(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and not any(c in text for c in ' "=')
    return text if plain and text else json.dumps(text)


def configure_logging() -> None:
    """Send every logger's events to stderr, one line each; for a command's process only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    handler.addFilter(_is_ours)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # What a library thinks worth a line is an error at least, and ours, not a client's.
    for name in ("aiohttp", "asyncio"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _is_ours(record: logging.LogRecord) -> bool:
    """Not of a client that sends what is no HTTP, or leaves: any may, and a line would quote it."""
    error = record.exc_info[1] if record.exc_info and record.name == "aiohttp.server" else None
    return not isinstance(error, (HttpProcessingError, RequestPayloadError, ConnectionError))

"""Fetch weights in a process of their own, with its progress in the log."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec

from goodput_core.errors import ExitCode, InputError, InternalError
from goodput_core.process import share_session_priority
from goodput_core.units import BYTES_PER_GIB

if TYPE_CHECKING:
    from asyncio import StreamReader

    from goodput_engine.weights.source import WeightsSource

__all__ = ["fetch_weights"]

_log: Final = logging.getLogger(__name__)

_WORKER: Final = "goodput_engine.weights.worker"
# Between two lines of one phase in the log.
_LOG_INTERVAL_S: Final = 10.0
_MAX_LINE_BYTES: Final = 1 << 20
_LAST_BYTES: Final = 2_000


async def fetch_weights(source: WeightsSource) -> str:
    """Return the folder with the weights of a source. Cancel it to end the process.

    Raises:
        InputError: the weights are not available, or cannot be converted.
        InternalError: the process ended without a result.
    """
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", _WORKER, msgspec.json.encode(source).decode(),
        stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=_MAX_LINE_BYTES,
        env={**os.environ, **quiet}, start_new_session=True,
    )  # fmt: skip
    share_session_priority(process.pid)
    assert process.stdout is not None
    assert process.stderr is not None
    tail = asyncio.ensure_future(_read_tail(process.stderr))
    try:
        result = await _follow(process.stdout, source.title)
        code = await process.wait()
        last = await tail
    except BaseException:
        with suppress(ProcessLookupError):
            process.kill()
        tail.cancel()
        await process.wait()
        raise
    if "folder" in result:
        return str(result["folder"])
    if "error" in result:
        kind = InputError if result["exit_code"] == ExitCode.USAGE else InternalError
        raise kind(result["error"])
    ended = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    detail = f": {last}" if last else "; the memory may be too small"
    raise InternalError(
        f"{source.title}: the process that fetches the weights ended {ended}{detail}"
    )


async def _follow(lines: StreamReader, title: str) -> dict[str, Any]:
    """Log the progress, and return the last line; empty if it is no result."""
    phase, logged_s = "", 0.0
    async for text in lines:
        line: dict[str, Any] = json.loads(text)
        if "warning" in line:
            _log.warning("model weights", extra={"model": title, "warning": line["warning"]})
        elif "phase" not in line:
            return line
        elif line["phase"] != phase or time.monotonic() - logged_s >= _LOG_INTERVAL_S:
            phase, logged_s = line["phase"], time.monotonic()
            fields = {"model": title, "phase": phase}
            if line["total"]:
                gib = f"{line['done'] / BYTES_PER_GIB:.2f} of {line['total'] / BYTES_PER_GIB:.2f}"
                fields["gib"] = gib
            _log.info("model weights", extra=fields)
    return {}


async def _read_tail(stream: StreamReader) -> str:
    """Read a stream to its end, and return its last line."""
    kept = b""
    while chunk := await stream.read(_LAST_BYTES):
        kept = (kept + chunk)[-_LAST_BYTES:]
    lines = kept.decode(errors="replace").split("\n")
    return next((" ".join(line.split())[:300] for line in reversed(lines) if line.strip()), "")

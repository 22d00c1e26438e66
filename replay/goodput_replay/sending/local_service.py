"""Run a service during one run, with `goodput up` as a child process.

The child reports on stdout that it is ready. It stops when its stdin is closed, so it also ends if
this process is killed. Its own process session keeps Ctrl-C from stopping the service before the
run has ended.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Final

import msgspec

from goodput_core.contract import EVENT_DECISION, EVENT_FETCHING, EVENT_READY
from goodput_core.errors import ExitCode, GoodputError, InternalError, UsageError
from goodput_core.process import share_session_priority

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

__all__ = ["LocalService", "running_service"]

_STOP_S: Final = 40.0  # beyond the child's own grace period of 30 seconds
_TAIL_BYTES: Final = 8192
_MAX_LINE: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalService:
    """A running service.

    Args:
        url: URL of its router.
        admin_url: URL of the router's admin port.
    """

    url: str
    admin_url: str


class _Event(msgspec.Struct):
    event: str
    url: str = ""
    admin_url: str = ""
    decision: msgspec.Raw = msgspec.Raw()
    line: str = ""


@asynccontextmanager
async def running_service(
    manifest: Path,
    *,
    device: str | None,
    model_path: str | None = None,
    log: Path,
    decisions: Path,
    report: Callable[[str], object],
) -> AsyncIterator[LocalService]:
    """Start the service of a manifest on this machine, and stop it when the block ends.

    Args:
        manifest: manifest of an LLMService.
        device: device profile in place of the manifest's model source.
        model_path: path of a model in place of the manifest's model source.
        log: file for the stderr output of the service.
        decisions: file for control decisions, one per line; created with the first decision.
        report: called with each line about weights that are fetched before the service starts.

    Yields:
        The running service.

    Raises:
        GoodputError: the service did not start; the error has the message and exit code of the
            child.
    """
    command = [sys.executable, "-m", "goodput_core", "up", "-f", str(manifest)]
    command += ["--json", "--exit-with-parent", "--port", "0"]
    command += ["--device", device] if device is not None else []
    command += ["--model-path", model_path] if model_path is not None else []
    with log.open("wb") as sink:
        child = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=sink,
            limit=_MAX_LINE,
            start_new_session=True,
        )
    share_session_priority(child.pid)
    try:
        service = await _wait_ready(child, report)
        if service is None:
            raise _make_error(await child.wait(), log)
        # stdout is read to its end, because the child would block on a full pipe.
        recorder = asyncio.ensure_future(_record_decisions(child, decisions))
        try:
            yield service
        finally:
            recorder.cancel()
    finally:
        await _stop(child)


async def _wait_ready(
    child: asyncio.subprocess.Process, report: Callable[[str], object]
) -> LocalService | None:
    assert child.stdout is not None
    while line := await child.stdout.readline():
        event = _parse_event(line)
        if event is not None and event.event == EVENT_READY:
            return LocalService(url=event.url, admin_url=event.admin_url)
        if event is not None and event.event == EVENT_FETCHING:
            report(event.line)
    return None


async def _record_decisions(child: asyncio.subprocess.Process, decisions: Path) -> None:
    assert child.stdout is not None
    with ExitStack() as stack:
        file: BinaryIO | None = None
        while line := await child.stdout.readline():
            event = _parse_event(line)
            if event is None or event.event != EVENT_DECISION:
                continue
            # A full disk ends the run when a record is written. Until then, stdout must be read.
            with suppress(OSError):
                if file is None:
                    file = stack.enter_context(decisions.open("wb", buffering=0))
                file.write(bytes(event.decision) + b"\n")


def _parse_event(line: bytes) -> _Event | None:
    try:
        return msgspec.json.decode(line, type=_Event)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


async def _stop(child: asyncio.subprocess.Process) -> None:
    if child.returncode is not None:
        return
    assert child.stdin is not None
    child.stdin.close()
    try:
        async with asyncio.timeout(_STOP_S):
            await child.wait()
    except TimeoutError:
        child.kill()
        await child.wait()
    except asyncio.CancelledError:
        # A second interrupt: SIGINT during the shutdown makes the child kill its processes.
        child.send_signal(signal.SIGINT)
        await child.wait()
        raise


def _make_error(code: int, log: Path) -> GoodputError:
    """Return an error with the child's last error message and exit code."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    sentence = errors[-1] if errors else f"goodput up ended with code {code} before it was ready"
    return UsageError(sentence) if code == ExitCode.USAGE else InternalError(sentence)

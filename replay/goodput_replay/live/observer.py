"""Hand a run over to an observing process, which counts, draws and serves it.

Counting, intervals and pages would delay sends, in a thread too, because threads share the
interpreter: with a thread, the p99 send lag at 1,000 requests a second rose from 8 ms to 30 ms
(measured). The sending process therefore only encodes its records, three microseconds each, and
writes them to a pipe four times a second. If the observing process falls behind or ends, the run
continues without it.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import msgspec

from goodput_core.errors import UsageError
from goodput_replay.live.messages import OBSERVED, End, StopScraping

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rich.console import Console

    from goodput_core.slo.record import RequestRecord
    from goodput_replay.live.messages import Begin
    from goodput_replay.live.tally import RunProgress

__all__ = ["ObserverOptions", "ObserverReady", "RunObserver"]

_FLUSH_S: Final = 0.25
_BATCH: Final = 128
# Bytes that the observing process may be behind, some ten thousand records.
_MAX_BEHIND: Final = 16 << 20
_CLOSE_S: Final = 10.0
_SAVE_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverOptions:
    """Options of the observing process.

    Args:
        ui_port: port of the live page, 0 for any free one; None for no page.
        prometheus: address and port of the metrics page; None for no page.
    """

    ui_port: int | None = None
    prometheus: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverReady:
    """The first line of the observing process on stdout.

    Args:
        error: sentence if it cannot serve; empty otherwise.
        lines: lines for the user, such as the address of the live page.
    """

    error: str = ""
    lines: tuple[str, ...] = ()


class RunObserver:
    """Shows one run; an asynchronous context manager.

    The process starts on entry, while the target is checked.

    Args:
        options: what the process serves.
        console: console on stderr, for the addresses; the process draws on stderr itself.
    """

    def __init__(self, options: ObserverOptions, console: Console) -> None:
        self._options = options
        self._console = console
        self._child: asyncio.subprocess.Process | None = None
        self._records: list[tuple[RequestRecord, bool]] = []
        self._read_progress: Callable[[], RunProgress] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._scraping = False

    async def __aenter__(self) -> Self:
        self._child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "goodput_replay.live.process"),
            msgspec.json.encode(self._options).decode(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop_timer()
        child = self._child
        if child is None or child.stdin is None:
            return
        child.stdin.close()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await child.wait()
        except TimeoutError:
            await _kill(child)
            # The run is complete without its display, so its verdict and exit code stay.
            self._console.print(
                f"warning: the process that shows the run did not end within {_CLOSE_S:g} s and "
                "was killed; the run itself is complete",
                soft_wrap=True,
                highlight=False,
                markup=False,
            )
        except asyncio.CancelledError:
            await _kill(child)
            raise

    async def wait_ready(self) -> None:
        """Wait until the process serves, and print its addresses.

        Raises:
            UsageError: a port cannot be used.
        """
        assert self._child is not None, "the context was entered"
        assert self._child.stdout is not None
        line = await self._child.stdout.readline()
        ready = msgspec.json.decode(line, type=ObserverReady) if line else ObserverReady()
        if ready.error:
            raise UsageError(ready.error)
        for text in ready.lines:
            self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def begin(self, begin: Begin, read_progress: Callable[[], RunProgress]) -> None:
        """Show the run from now on.

        Args:
            begin: the run.
            read_progress: returns the current progress.
        """
        self._read_progress = read_progress
        self._scraping = begin.scrape is not None
        self._write(OBSERVED.encode(begin))
        self._tick()

    def add(self, record: RequestRecord, *, warmup: bool) -> None:
        """Hand over a request that ended."""
        self._records.append((record, warmup))
        if len(self._records) >= _BATCH:
            self._flush()

    async def stop_scraping(self) -> None:
        """Wait until the server's metrics are written, if they are scraped."""
        child = self._child
        if not self._scraping or child is None or child.stdout is None:
            return
        self._scraping = False
        self._write(OBSERVED.encode(StopScraping()))
        with suppress(TimeoutError):
            async with asyncio.timeout(_SAVE_S):
                await child.stdout.readline()

    def end(self, folder: Path) -> None:
        """Show the report of the run in `folder`, which was judged."""
        self._stop_timer()
        self._flush()
        self._write(OBSERVED.encode(End(folder=folder.resolve())))

    def _tick(self) -> None:
        assert self._read_progress is not None, "the run has begun"
        self._flush()
        self._write(OBSERVED.encode(self._read_progress()))
        self._timer = asyncio.get_running_loop().call_later(_FLUSH_S, self._tick)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _flush(self) -> None:
        if self._records:
            self._write(OBSERVED.encode_records(self._records))
            self._records.clear()

    def _write(self, data: bytes) -> None:
        """Write without waiting; end the observation if the process is too far behind."""
        child = self._child
        if child is None or child.returncode is not None:
            return
        assert child.stdin is not None
        if child.stdin.transport.get_write_buffer_size() > _MAX_BEHIND:
            with suppress(ProcessLookupError):
                child.kill()
            return
        with suppress(ConnectionError, RuntimeError):
            child.stdin.write(data)


async def _kill(child: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        child.kill()
    await child.wait()

"""The observing process of a run: reads the sending process's messages, draws and serves.

It ends when its stdin closes. Signals of the terminal are left to the sending process, which ends
the run in order.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from yarl import URL

from goodput_core.contract import PATH_METRICS
from goodput_core.errors import GoodputError
from goodput_core.text import printable
from goodput_replay.frames import MAX_FRAME
from goodput_replay.live.exporter import MetricsExporter
from goodput_replay.live.messages import OBSERVED, Begin, End, StopScraping
from goodput_replay.live.observer import ObserverOptions, ObserverReady
from goodput_replay.live.page import LIVE_SCRIPTS, LivePage
from goodput_replay.live.server import HOST, LiveServer, open_site
from goodput_replay.live.tally import LiveTally, RunProgress
from goodput_replay.live.terminal import TerminalView
from goodput_replay.report.run_report import render
from goodput_replay.scraping.scraper import MetricsScraper

if TYPE_CHECKING:
    from goodput_replay.frames import Records

__all__ = ["main"]


def main() -> None:
    """Observe one run; the argument is `ObserverOptions` as JSON."""
    for one in (signal.SIGINT, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    options = msgspec.json.decode(sys.argv[1], type=ObserverOptions)
    asyncio.run(_observe(options))


async def _observe(options: ObserverOptions) -> None:
    pipe = asyncio.StreamReader(limit=MAX_FRAME)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(pipe), sys.stdin)
    async with AsyncExitStack() as stack:
        server: LiveServer | None = None
        exporter: MetricsExporter | None = None
        lines: list[str] = []
        try:
            if options.ui_port is not None:
                server = LiveServer(LIVE_SCRIPTS)
                runner, port = await open_site(server.app, options.ui_port, "--ui-port")
                stack.push_async_callback(runner.cleanup)
                lines.append(f"live page: http://{HOST}:{port}/")
            if options.prometheus is not None:
                host, port = options.prometheus
                exporter = MetricsExporter(host)
                runner, port = await open_site(exporter.app, port, "--prometheus", host=host)
                stack.push_async_callback(runner.cleanup)
                url = URL.build(scheme="http", host=host, port=port, path=PATH_METRICS)
                lines.append(f"metrics: {url}")
        except GoodputError as error:
            _report(ObserverReady(error=str(error)))
            return
        _report(ObserverReady(lines=tuple(lines)))
        await _Observation(server, exporter, Console(stderr=True)).run(pipe)


def _report(ready: ObserverReady) -> None:
    # The sending process may have ended; stdin is closed then, too, which ends this one. No buffer
    # may keep the line, because Python would write it again at its end.
    with suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), msgspec.json.encode(ready) + b"\n")


class _Observation:
    """Follows one run from its first message to its last."""

    def __init__(
        self, server: LiveServer | None, exporter: MetricsExporter | None, console: Console
    ) -> None:
        self._server = server
        self._exporter = exporter
        self._view = TerminalView(console)
        self._tally: LiveTally | None = None
        self._progress: RunProgress | None = None
        self._console = console
        self._scraper: MetricsScraper | None = None

    async def run(self, pipe: asyncio.StreamReader) -> None:
        """Read messages until the pipe closes."""
        with self._view:
            while (message := await OBSERVED.read(pipe)) is not None:
                match message:
                    case Begin():
                        self._begin(message)
                    case RunProgress():
                        self._show(message)
                    case StopScraping():
                        await self._stop_scraping()
                    case End():
                        self._view.close()
                        if self._server is not None and self._server.clients:
                            await self._server.end(render(message.folder))
                    case _:
                        await self._count(message)

    def _begin(self, begin: Begin) -> None:
        self._tally = LiveTally(begin.window)
        if begin.scrape is not None:
            self._scraper = MetricsScraper(begin.scrape, self._warn)
            self._scraper.start()
        if self._server is not None:
            server = None if self._scraper is None else self._scraper.metrics
            page = LivePage(self._tally, begin.info, self._read_progress, server)
            self._server.begin(page)
        if self._exporter is not None:
            self._exporter.begin(self._tally, lambda: self._progress)

    async def _stop_scraping(self) -> None:
        """Write the server's metrics; the sending process waits for the line on stdout."""
        assert self._scraper is not None, "pages are scraped"
        for sentence in await self._scraper.stop():
            self._warn(sentence)
        _report(ObserverReady())

    def _warn(self, sentence: str) -> None:
        # The names of engines come from a server.
        self._console.print(printable(sentence), soft_wrap=True, highlight=False, markup=False)

    async def _count(self, records: Records) -> None:
        assert self._tally is not None, "the run has begun"
        for record, warmup in records:
            self._tally.add(record, warmup=warmup)
        # Let the pages be served between two batches.
        await asyncio.sleep(0)

    def _show(self, progress: RunProgress) -> None:
        assert self._tally is not None, "the run has begun"
        self._progress = progress
        self._tally.sample(progress)
        if self._view.is_due(progress):
            self._view.draw(self._tally.so_far(progress))

    def _read_progress(self) -> RunProgress:
        assert self._progress is not None, "progress follows the begin of a run at once"
        return self._progress


if __name__ == "__main__":
    main()

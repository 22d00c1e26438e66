"""Scrape metrics pages during a run, in the observing process.

Pages are not trusted: they are bounded in size and time, redirects are not followed, and a page
that fails is only counted. The page of Goodput's router leads to those of its engines, which start
and stop with the control laws.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

import aiohttp
from yarl import URL

from goodput_core.contract import PATH_METRICS
from goodput_core.server_metrics import PageError
from goodput_core.text import printable
from goodput_core.units import NS_PER_S
from goodput_replay.runs.server_metrics import ServerMetrics, write_server_metrics
from goodput_replay.scraping.page_series import PageSeries, is_router, read_page
from goodput_replay.sending.target import tls_context
from goodput_replay.watch.readings import ReadError, StateReader, read_response

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from goodput_core.server_metrics import Samples
    from goodput_replay.scraping.settings import ScrapeSettings

__all__ = ["MetricsScraper"]

_MAX_BYTES: Final = 8 << 20
_TOTAL_S: Final = 5.0
_LAST_S: Final = 2.0
_MAX_SOURCES: Final = 32
_MAX_TYPE: Final = 60
_TYPES: Final = frozenset({"text/plain", "application/openmetrics-text"})
# Any second beyond those that a router counts, so that its state has no counts by second.
_NO_SECONDS: Final = 1 << 30


class MetricsScraper:
    """Scrapes the pages of one run.

    Args:
        settings: the pages.
        warn: shows a warning about a page to the user; called once for each page.

    Attributes:
        metrics: the values until now.
    """

    def __init__(self, settings: ScrapeSettings, warn: Callable[[str], None]) -> None:
        self.metrics: Final = ServerMetrics(every_ns=settings.every_ns, metrics=settings.metrics)
        self._settings = settings
        self._warn = warn
        self._series: dict[str, PageSeries] = {}
        self._stopped = asyncio.Event()
        self._task: asyncio.Future[None] | None = None
        # The token is for the pages that the user named.
        self._pages = dict.fromkeys(settings.urls, settings.token)
        if settings.service_url is not None:
            self._pages.setdefault(settings.service_url, "")

    def start(self) -> None:
        """Scrape all pages at common times, each independent of the others."""
        self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> list[str]:
        """Scrape a last time, write the values, and return sentences about what failed."""
        assert self._task is not None, "the scraper was started"
        self._stopped.set()
        await asyncio.wait([self._task], timeout=_LAST_S)
        self._task.cancel()
        await asyncio.wait([self._task])
        sentences = [
            f"warning: {one.name}: {one.failed} of {one.scrapes} scrapes failed; "
            f"the last: {one.problem}"
            for one in self.metrics.sources.values()
            if one.failed
        ]
        if self.metrics.sources and (
            warning := write_server_metrics(self._settings.file, self.metrics)
        ):
            sentences.append(warning)
        return sentences

    async def _run(self) -> None:
        connector = aiohttp.TCPConnector(ssl=tls_context(self._settings.ca_file) or True)
        # Compressed bodies could be far longer than the received bytes.
        headers = {"Accept-Encoding": "identity"}
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
            await asyncio.gather(
                *(self._follow(session, url, token) for url, token in self._pages.items())
            )

    async def _follow(self, session: aiohttp.ClientSession, url: str, token: str) -> None:
        every_ns = self._settings.every_ns
        while not self._stopped.is_set():
            try:
                async with asyncio.timeout(
                    (every_ns - self._since_zero_ns() % every_ns) / NS_PER_S
                ):
                    await self._stopped.wait()
            except TimeoutError:
                pass
            # A rate over a very short last interval would be misleading.
            if not self._stopped.is_set() or self._since_zero_ns() % every_ns > every_ns // 4:
                await self._scrape_all(session, url, token)

    async def _scrape_all(self, session: aiohttp.ClientSession, url: str, token: str) -> None:
        """Scrape a page, and those of the engines if it is that of a router."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        samples = await self._scrape(session, url, url, headers)
        if samples is not None and is_router(samples):
            await self._scrape_engines(session, URL(url))

    async def _scrape_engines(self, session: aiohttp.ClientSession, url: URL) -> None:
        """Scrape the engines that the router names, if they are on its host."""
        try:
            view = await StateReader(session, url.origin()).router(_NO_SECONDS)
        except ReadError:
            return  # the next scrape tries again
        # Two routers may have engines of the same name.
        named = str(url) != self._settings.service_url and len(self._pages) > 1
        prefix = f"{url.authority}/" if named else ""
        pages = {}
        for replica in view.replicas:
            admin = _parse(replica.admin_url or "")
            ready = replica.ready or replica.draining
            if ready and admin is not None and admin.host == url.host:
                pages[f"{prefix}{replica.name}"] = str(admin.with_path(PATH_METRICS))
        await asyncio.gather(*(self._scrape(session, *page, {}) for page in pages.items()))

    async def _scrape(
        self, session: aiohttp.ClientSession, name: str, url: str, headers: Mapping[str, str]
    ) -> Samples | None:
        """Scrape a page once; None if that failed."""
        if name not in self._series:
            if len(self._series) >= _MAX_SOURCES:
                return None
            self._series[name] = PageSeries(self._settings.metrics)
        at_ns = self._since_zero_ns()
        try:
            kind, body = await read_response(
                session, URL(url), headers=headers, total_s=_TOTAL_S, max_bytes=_MAX_BYTES
            )
            if kind not in _TYPES:
                raise PageError(f"its page is {printable(kind[:_MAX_TYPE])}, not Prometheus text")
            # Decoding a hostile page takes seconds, in which the live page must be served.
            samples = await asyncio.to_thread(read_page, body, self._settings.metrics)
        except (ReadError, PageError) as error:
            self._fail(name, at_ns, str(error))
            return None
        values = self._series[name].update(at_ns, samples)
        if not samples:
            self._fail(
                name,
                at_ns,
                "its page has none of the known metrics; name some with --scrape-metric",
            )
            return None
        self.metrics.add(name, at_ns, values)
        return samples

    def _fail(self, name: str, at_ns: int, problem: str) -> None:
        known = self.metrics.sources.get(name)
        if known is None or not known.failed:
            self._warn(f"warning: {name} was not scraped: {problem}; the run continues")
        self.metrics.add_failure(name, at_ns, problem)

    def _since_zero_ns(self) -> int:
        return time.monotonic_ns() - self._settings.zero_ns


def _parse(text: str) -> URL | None:
    try:
        url = URL(text)
    except ValueError:
        return None
    return url if url.scheme == "http" and url.host else None

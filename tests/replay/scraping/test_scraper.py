"""Metrics pages are scraped during a run, and none can disturb it."""

from __future__ import annotations

import asyncio
import gzip
import ssl
import time
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_replay.runs.server_metrics import UP, ServerMetrics, read_server_metrics
from goodput_replay.scraping.scraper import MetricsScraper
from goodput_replay.scraping.settings import ScrapeSettings, choose_interval

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

TYPE = "text/plain; version=0.0.4; charset=utf-8"
PAGE = "vllm:num_requests_running 3\nvllm:prompt_tokens_total 10\n"


@asynccontextmanager
async def _served(respond: Any, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/{path:.*}", respond)
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    try:
        scheme = "http" if tls is None else "https"
        yield f"{scheme}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _page(text: str = PAGE, **headers: str) -> web.Response:
    return web.Response(body=text.encode(), headers={"Content-Type": TYPE, **headers})


class _Scraping:
    """A scraper with a short interval, until a condition holds."""

    def __init__(self, folder: Path, *urls: str, every_ms: int = 50, **settings: Any) -> None:
        self.warnings: list[str] = []
        self.ended: list[str] = []
        self.folder = folder
        values = {"service_url": None, "metrics": (), "token": "", "ca_file": None, **settings}
        self.settings = ScrapeSettings(
            urls=urls,
            every_ns=every_ms * NS_PER_MS,
            zero_ns=time.monotonic_ns(),
            file=folder / "server_metrics.parquet",
            **values,
        )
        self.scraper = MetricsScraper(self.settings, self.warnings.append)

    async def until(self, condition: Callable[[ServerMetrics], bool]) -> ServerMetrics:
        self.scraper.start()
        async with asyncio.timeout(30):
            while not condition(self.scraper.metrics):  # noqa: ASYNC110 - a run has no event
                await asyncio.sleep(0.005)
        self.ended = await self.scraper.stop()
        found = read_server_metrics(self.folder)
        assert found is not None
        return found


def _scrapes(metrics: ServerMetrics) -> int:
    return sum(one.scrapes for one in metrics.sources.values())


async def test_values_and_rates_are_written_with_their_times(tmp_path: Path) -> None:
    count = 0

    async def respond(_: web.Request) -> web.Response:
        nonlocal count
        count += 1
        return _page(f"vllm:num_requests_running {count}\nvllm:prompt_tokens_total {10 * count}\n")

    async with _served(respond) as url:
        scraping = _Scraping(tmp_path, f"{url}/metrics")
        metrics = await scraping.until(lambda m: _scrapes(m) >= 4)
    (source,) = metrics.sources.values()
    assert (source.failed, source.problem) == (0, "")
    times, running = metrics.values(source.name, "running_requests")
    assert list(running) == list(range(1, len(running) + 1))
    assert all(0 < at_ns < 30 * NS_PER_S for at_ns in times)
    rate_times, rates = metrics.values(source.name, "prompt_tokens")
    assert list(rate_times) == list(times)[1:], "a rate needs two scrapes"
    for (before, at), rate in zip(pairwise(times), rates, strict=True):
        assert rate == pytest.approx(10 * NS_PER_S / (at - before))
    assert list(metrics.values(source.name, UP)[1]) == [1.0] * source.scrapes
    assert scraping.warnings == scraping.ended == []


async def _hang(_: web.Request) -> web.Response:
    await asyncio.sleep(60)
    return _page()


async def _redirect(_: web.Request) -> web.Response:
    raise web.HTTPFound("http://192.0.2.1/metrics")


async def _bomb(_: web.Request) -> web.Response:
    return web.Response(
        body=gzip.compress(b"x" * (100 << 20)),
        headers={"Content-Type": TYPE, "Content-Encoding": "gzip"},
    )


async def _cut_off(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": TYPE, "Content-Length": "100000"})
    await response.prepare(request)
    await response.write(PAGE.encode())
    assert request.transport is not None
    request.transport.abort()
    return response


def _answer(response: Callable[[], web.Response]) -> Any:
    async def respond(_: web.Request) -> web.Response:
        return response()

    return respond


BAD: dict[str, tuple[Any, str]] = {
    "an error": (_answer(lambda: web.Response(status=500)), "responded with status 500"),
    "no access": (_answer(lambda: web.Response(status=401)), "responded with status 401"),
    "a redirect": (_redirect, "responded with status 302"),
    "a web page": (
        _answer(lambda: web.Response(text=PAGE, content_type="text/html")),
        "its page is text/html, not Prometheus text",
    ),
    "a binary page": (
        _answer(lambda: web.Response(body=b"\x08\x96\x01")),
        "its page is application/octet-stream, not Prometheus text",
    ),
    "an unknown server": (
        _answer(lambda: _page("other_requests 1\n")),
        "its page has none of the known metrics; name some with --scrape-metric",
    ),
    "an empty page": (_answer(lambda: _page("")), "its page has none of the known metrics"),
    "a bad line": (_answer(lambda: _page("vllm:num_requests_running x\n")), "not Prometheus text"),
    "a compressed page of 100 MB": (_bomb, "larger than 8 MiB"),
    "a page that is cut off": (_cut_off, "not reachable"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_page_that_cannot_be_used_is_counted_and_warned_about_once(
    name: str, tmp_path: Path
) -> None:
    respond, problem = BAD[name]
    async with _served(respond) as url:
        scraping = _Scraping(tmp_path, f"{url}/metrics")
        metrics = await scraping.until(lambda m: _scrapes(m) >= 2)
    (source,) = metrics.sources.values()
    assert source.failed == source.scrapes >= 2
    assert problem in source.problem
    assert set(metrics.values(source.name, UP)[1]) == {0.0}
    (warning,) = scraping.warnings
    assert warning.startswith(f"warning: {url}/metrics was not scraped: ")
    assert warning.endswith("; the run continues")
    (end,) = scraping.ended
    assert f"{source.failed} of {source.scrapes} scrapes failed; the last: " in end


async def test_a_page_of_100_mb_is_read_no_further_than_its_limit(tmp_path: Path) -> None:
    sent = 0
    ended = asyncio.Event()

    async def respond(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(headers={"Content-Type": TYPE})
        await response.prepare(request)
        try:
            for _ in range(100):
                await response.write(b"x" * (1 << 20))
                sent += 1 << 20
        except ConnectionError:
            pass
        finally:
            ended.set()
        return response

    async with _served(respond) as url:
        scraping = _Scraping(tmp_path, url, every_ms=1000)
        metrics = await scraping.until(lambda m: _scrapes(m) >= 1)
        async with asyncio.timeout(10):
            await ended.wait()
    assert sent < 40 << 20
    assert metrics.sources[url].problem == "its response is larger than 8 MiB"


async def test_a_page_that_hangs_delays_neither_the_others_nor_the_end(tmp_path: Path) -> None:
    async def respond(_: web.Request) -> web.Response:
        return _page()

    async with _served(_hang) as hanging, _served(respond) as url:
        scraping = _Scraping(tmp_path, hanging, url)
        began = time.monotonic()
        metrics = await scraping.until(lambda m: url in m.sources and m.sources[url].scrapes >= 5)
        assert time.monotonic() - began < 10
    assert set(metrics.sources) == {url}


async def test_a_page_that_fails_for_a_while_leaves_a_gap(tmp_path: Path) -> None:
    count = 0

    async def respond(_: web.Request) -> web.Response:
        nonlocal count
        count += 1
        return web.Response(status=503) if count in {3, 4} else _page()

    async with _served(respond) as url:
        scraping = _Scraping(tmp_path, url)
        metrics = await scraping.until(lambda m: _scrapes(m) >= 6)
    times, up = metrics.values(url, UP)
    assert list(up[:6]) == [1, 1, 0, 0, 1, 1]
    found = set(metrics.values(url, "running_requests")[0])
    assert [at in found for at in times[:6]] == [True, True, False, False, True, True]
    assert metrics.sources[url].failed == 2


async def test_the_key_is_for_the_named_pages_and_not_for_engines(tmp_path: Path) -> None:
    seen: dict[str, set[str]] = {}

    async def engine(request: web.Request) -> web.Response:
        seen.setdefault("engine", set()).add(request.headers.get("Authorization", ""))
        return _page("goodput_engine_running_requests 2\n")

    async def router(request: web.Request) -> web.Response:
        key = request.headers.get("Authorization", "")
        seen.setdefault(request.path, set()).add(key)
        if request.path == "/control/state":
            replicas = [
                {"name": "here", "admin_url": engines, "ready": True},
                {"name": "elsewhere", "admin_url": "http://192.0.2.1:80", "ready": True},
                {"name": "localhost", "admin_url": engines.replace("127.0.0.1", "localhost"),
                 "ready": True},
                {"name": "file", "admin_url": "file:///etc/passwd", "ready": True},
                {"name": "starting", "admin_url": engines, "ready": False},
                {"name": "unknown", "admin_url": None, "ready": True},
                {"name": "here", "admin_url": engines, "ready": True},
            ]  # fmt: skip
            seconds = {"first_s": 0, "end_s": 0, "classes": {}}
            return web.json_response(
                {"role": "router", "epoch": "a", "replicas": replicas, "seconds": seconds}
            )
        return _page("goodput_router_in_flight_requests 1\n")

    async with _served(engine) as engines, _served(router) as url:
        page = f"{url}/metrics"
        scraping = _Scraping(tmp_path, page, token="secret")
        metrics = await scraping.until(
            lambda m: "here" in m.sources and m.sources["here"].scrapes >= 2
        )
    assert set(metrics.sources) == {page, "here"}
    assert seen == {"/metrics": {"Bearer secret"}, "/control/state": {""}, "engine": {""}}
    assert set(metrics.values("here", "running_requests")[1]) == {2.0}
    assert b"secret" not in (tmp_path / "server_metrics.parquet").read_bytes()


async def test_a_folder_that_vanished_is_a_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    scraping = _Scraping(folder, "http://127.0.0.1:9/metrics")
    warned = asyncio.Event()
    scraping.scraper = MetricsScraper(scraping.settings, lambda _: warned.set())
    scraping.scraper.start()
    async with asyncio.timeout(30):
        await warned.wait()
    sentences = await scraping.scraper.stop()
    assert sentences[-1].endswith(
        "the server's metrics were not written (No such file or directory)"
    )


@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "unknown CA"])
async def test_a_page_with_a_certificate_of_its_own_ca_needs_the_ca_file(
    trusted: bool, certificate: Path, tmp_path: Path
) -> None:
    async def respond(_: web.Request) -> web.Response:
        return _page()

    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    async with _served(respond, tls) as url:
        ca_file = certificate / "cert.pem" if trusted else None
        scraping = _Scraping(tmp_path, url, ca_file=ca_file)
        metrics = await scraping.until(lambda m: _scrapes(m) >= 1)
    expected = "" if trusted else "its certificate is not trusted"
    assert metrics.sources[url].problem == expected


@pytest.mark.parametrize(
    ("duration_s", "every_s"),
    [(10, 2), (1200, 2), (3600, 6), (86_400, 60), (604_800, 60), (None, 5)],
)
def test_long_runs_are_scraped_less_often(duration_s: int | None, every_s: int) -> None:
    duration_ns = None if duration_s is None else duration_s * NS_PER_S
    assert choose_interval(duration_ns) == every_s * NS_PER_S

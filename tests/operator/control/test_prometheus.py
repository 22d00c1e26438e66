from __future__ import annotations

import asyncio
import json
import shutil
import socket
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client import CollectorRegistry, generate_latest

from goodput_core.contract import CLIENT_OUTCOMES, PROMISE_RESULTS, PROMISES
from goodput_core.control import PromiseCounts, Signal
from goodput_core.slo.record import Outcome
from goodput_core.slo.targets import Targets
from goodput_core.units import NS_PER_S
from goodput_operator.control.prometheus import decode_answer, scrape_prometheus
from goodput_operator.control.readings import RouterCounters, RouterScrape, ScrapeTarget

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

R0 = ScrapeTarget(name="chat-router-0", uid="r0", url="http://10.0.0.1:9000")
R1 = ScrapeTarget(name="chat-router-1", uid="r1", url="http://10.0.0.2:9000")


def series(name: str, value: float | str, *, at_s: float = 1000, **labels: str) -> dict[str, Any]:
    return {"metric": {"__name__": name, "llmservice": "chat", **labels},
            "values": [[at_s - 15, "0"], [at_s, str(value)]]}  # fmt: skip


def of_router(count: int, *, at_s: float = 1000, **labels: Any) -> list[dict[str, Any]]:
    def one(name: str, value: float, **more: str) -> dict[str, Any]:
        return series(name, value, at_s=at_s, **labels, **more)

    return [
        one("goodput_router_arrivals_total", count + 5),
        one("goodput_router_in_flight_requests", 2),
        one("goodput_router_client_errors_total", 2, status="404"),
        one("goodput_router_client_errors_total", 1, status="400"),
        one("goodput_requests_total", count - 1, slo_class="chat", outcome="attained"),
        one("goodput_requests_total", 1, slo_class="chat", outcome="missed"),
        one("goodput_requests_total", 7, slo_class="chat", outcome="cancelled"),
        one("goodput_promises_total", count - 2, slo_class="chat", promise="ttft", result="kept"),
        one("goodput_promises_total", 1, slo_class="chat", promise="ttft", result="missed"),
        one("goodput_promises_total", 1, slo_class="chat", promise="ttft", result="close"),
    ]


def answer(*found: dict[str, Any], **changes: Any) -> bytes:
    data = {"resultType": "matrix", "result": list(found), **changes}
    return json.dumps({"status": "success", "data": data}).encode()


def read(body: bytes, *sources: ScrapeTarget) -> tuple[int, dict[str, RouterCounters | None]]:
    at_ns, scrapes = decode_answer(body, namespace="default", sources=sources)
    for scrape in scrapes:
        assert scrape.signal is (Signal.FRESH if scrape.counters else Signal.MISSING)
    return at_ns, {scrape.source.uid: scrape.counters for scrape in scrapes}


def test_series_add_up_to_what_the_router_itself_would_tell() -> None:
    at_ns, told = read(answer(*of_router(10, pod="chat-router-0", namespace="default")), R0)
    router = told["r0"]
    assert at_ns == 1000 * NS_PER_S
    assert router is not None
    assert (router.arrivals, router.client_errors, router.in_flight) == (15, 3, 2)
    chat = router.classes["chat"]
    assert (chat.good, chat.total) == (9, 10)
    assert chat.ttft == PromiseCounts(judged=10, missed=1, close=1)


def test_routers_are_distinguished_by_pod_or_by_address() -> None:
    found = [
        *of_router(10, at_s=1010, pod="chat-router-0"),
        *of_router(20, at_s=1003, instance="10.0.0.2:9000"),
    ]
    at_ns, told = read(answer(*found), R0, R1)
    assert [one and one.arrivals for one in told.values()] == [15, 25]
    assert at_ns == 1003 * NS_PER_S, "no number is newer than the oldest"


def test_what_a_router_exported_before_a_restart_counts_no_more() -> None:
    # Since it no client has erred and no request has ended: these series are not there again.
    lazy = ("goodput_router_client_errors_total", "goodput_promises_total")
    found = [
        series
        for at_s, count in ((1000, 40), (1060, 3))
        for series in of_router(count, at_s=at_s, pod="chat-router-0")
        if (series["metric"]["__name__"] in lazy) == (at_s == 1000)
    ]
    at_ns, told = read(answer(*found), R0)
    router = told["r0"]
    assert at_ns == 1060 * NS_PER_S, "or no interval would end until the old ones are forgotten"
    assert router is not None
    assert (router.arrivals, router.client_errors, router.in_flight) == (8, 0, 2)
    chat = router.classes["chat"]
    assert (chat.good, chat.total, chat.ttft) == (2, 3, PromiseCounts())


@pytest.mark.parametrize("apart_s", [0, 4], ids=["at once", "one after the other"])
def test_a_router_that_two_jobs_scrape_is_counted_once(apart_s: int) -> None:
    found = [
        *of_router(10, at_s=1000, pod="chat-router-0", job="pods"),
        *of_router(10 + apart_s, at_s=1000 + apart_s, pod="chat-router-0", job="services"),
    ]
    at_ns, told = read(answer(*found), R0)
    router = told["r0"]
    assert at_ns == (1000 + apart_s) * NS_PER_S
    assert router is not None
    assert (router.arrivals, router.client_errors, router.in_flight) == (15 + apart_s, 3, 2)
    assert router.classes["chat"].total == 10 + apart_s


def test_a_router_that_stops_delays_no_measurement() -> None:
    found = [
        *of_router(10, at_s=1010, pod="chat-router-0"),
        *of_router(20, at_s=900, pod="chat-router-1"),
    ]
    at_ns, told = read(answer(*found), R0, replace(R1, ready=False))
    assert at_ns == 1010 * NS_PER_S
    assert [one and one.arrivals for one in told.values()] == [15, 25]


@pytest.mark.parametrize(
    "labels",
    [
        pytest.param({"pod": "chat-router-0", "namespace": "other"}, id="another namespace"),
        pytest.param({"pod": "chat-router-9", "instance": "10.0.0.1:9000"}, id="another pod"),
        pytest.param({"instance": "10.0.0.1:9001"}, id="another port"),
        pytest.param({}, id="nobody's"),
    ],
)
def test_what_is_not_this_router_s_is_missing_not_zero(labels: dict[str, Any]) -> None:
    assert read(answer(*of_router(10, **labels)), R0)[1] == {"r0": None}


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"<html>", id="not JSON"),
        pytest.param(b'{"status": "error", "error": "no"}', id="an error"),
        pytest.param(answer(resultType="vector"), id="another type"),
        pytest.param(answer({"metric": {}, "values": []}), id="no sample"),
        pytest.param(answer(series("x", "NaN", pod="chat-router-0")), id="NaN"),
        pytest.param(answer(series("x", "-1", pod="chat-router-0")), id="negative"),
        pytest.param(answer(series("x", "many", pod="chat-router-0")), id="no number"),
    ],
)
def test_an_invalid_response_is_rejected(body: bytes) -> None:
    with pytest.raises(
        ValueError,
        match=r"^the response does not match the query$|^a value in the response is not a count$",
    ):
        read(body, R0)


@asynccontextmanager
async def answering(body: bytes) -> AsyncIterator[str]:
    """A server that gives this answer to every query."""

    async def answered(_: web.Request) -> web.Response:
        return web.Response(body=body)

    app = web.Application()
    app.router.add_get("/api/v1/query", answered)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def asked(server: str, *sources: ScrapeTarget) -> tuple[RouterScrape, ...]:
    async with aiohttp.ClientSession() as session:
        _, scrapes = await scrape_prometheus(
            session, server, llmservice="chat", namespace="default", sources=sources
        )
    return scrapes


async def test_all_classes_at_as_many_routers_as_a_manifest_may_have_are_read() -> None:
    def whole(pod: str, name: str, **more: str) -> dict[str, Any]:
        target = {
            "pod": pod, "namespace": "default", "container": "router", "endpoint": "admin",
            "instance": "10.100.100.100:9000", "job": "default/chat-router",
        }  # fmt: skip
        values = [[1_800_000_000.123 + 10 * n, "1000000"] for n in range(12)]
        return {"metric": {"__name__": name, "llmservice": "chat", **target, **more},
                "values": values}  # fmt: skip

    pods = [f"chat-router-5d46cfd476-{n:05}" for n in range(64)]
    found = [
        series
        for pod in pods
        for series in (
            whole(pod, "goodput_router_arrivals_total"),
            whole(pod, "goodput_router_in_flight_requests", role="router"),
            *(
                whole(pod, "goodput_requests_total", slo_class=f"class-{n}", outcome=outcome)
                for n in range(16)
                for outcome in CLIENT_OUTCOMES
            ),
            *(
                whole(pod, "goodput_promises_total", slo_class=f"class-{n}", promise=promise,
                      result=result)
                for n in range(16)
                for promise in PROMISES
                for result in PROMISE_RESULTS
            ),
        )
    ]  # fmt: skip
    sources = [ScrapeTarget(name=pod, uid=pod, url="http://10.0.0.1:9000") for pod in pods]
    async with answering(answer(*found)) as server:
        scrapes = await asked(server, *sources)
    assert {scrape.signal for scrape in scrapes} == {Signal.FRESH}
    assert {len(one.counters.classes) for one in scrapes if one.counters} == {16}


async def test_an_answer_without_end_is_not_read_to_its_end() -> None:
    async with answering(b" " * (20 << 20)) as server:
        (scrape,) = await asked(server, R0)
    assert scrape.signal is Signal.FAILED
    assert "returned more than" in scrape.detail


async def test_a_server_that_is_not_there_has_failed() -> None:
    (scrape,) = await asked("http://127.0.0.1:1", R0)
    assert scrape.signal is Signal.FAILED
    assert "cannot be reached" in scrape.detail


# A real server -----------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@asynccontextmanager
async def serving(text: bytes) -> AsyncIterator[str]:
    """An admin port that shows these metrics."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4"})

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@asynccontextmanager
async def prometheus(folder: Path, target: str) -> AsyncIterator[str]:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("NOT RUN: there is no prometheus here; `apt-get install prometheus` brings it")
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: chat, static_configs: [{{targets: ['{target}']}}]}}]\n",
        encoding="utf-8",
    )
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        program,
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


async def test_a_real_server_tells_what_a_router_counted(tmp_path: Path) -> None:
    from goodput_engine.router.outcomes import OutcomeCounts

    registry = CollectorRegistry()
    outcomes = OutcomeCounts(registry, llmservice="chat", classes=["chat", "batch"])
    settle(outcomes, ttft_ms=100)
    settle(outcomes, ttft_ms=900)
    outcomes.begin()
    async with (
        serving(generate_latest(registry)) as at,
        prometheus(tmp_path, at) as server,
        aiohttp.ClientSession() as session,
        asyncio.timeout(60),
    ):
        source = ScrapeTarget(name="chat-router-0", uid="r0", url=f"http://{at}")
        told: RouterCounters | None = None
        at_ns = 0
        while told is None:
            await asyncio.sleep(0.2)
            at_ns, (scrape,) = await scrape_prometheus(
                session, server, llmservice="chat", namespace="default", sources=[source]
            )
            told = scrape.counters
    assert at_ns > 0
    assert (told.arrivals, told.in_flight) == (3, 1)
    assert (told.classes["chat"].good, told.classes["chat"].total) == (1, 2)
    assert told.classes["chat"].ttft == PromiseCounts(judged=2, missed=1)
    assert told.classes["batch"].total == 0


def settle(outcomes: Any, *, ttft_ms: int) -> None:
    """A request of class chat, promised its first token within half a second."""
    from types import SimpleNamespace

    from goodput_core.slo.record import RequestRecord

    targets = Targets(ttft_ns=500_000_000)
    record = RequestRecord(
        request_id="", slo_class="chat", scheduled_ns=0, sent_ns=0, outcome=Outcome.OK,
        first_token_ns=ttft_ms * 1_000_000, last_token_ns=ttft_ms * 1_000_000,
        end_ns=ttft_ms * 1_000_000, output_tokens=1,
    )  # fmt: skip
    outcomes.begin()
    outcomes.settle(
        SimpleNamespace(
            client_error=None,
            measurable=targets,
            outcome=Outcome.OK,
            slo=SimpleNamespace(targets=targets),
            uploaded=True,
            record=lambda _now_ns: record,
        ),
        record.end_ns,
    )

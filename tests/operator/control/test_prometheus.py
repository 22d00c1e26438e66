"""Routers' counters from a Prometheus server: decoded responses, and a real server."""

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
from goodput_core.control import Signal, TargetCounts
from goodput_core.slo.record import Outcome
from goodput_core.slo.targets import Targets
from goodput_core.units import NS_PER_S
from goodput_operator.control.prometheus import decode_response, query_prometheus
from goodput_operator.control.readings import RouterCounters, RouterScrape, ScrapeTarget

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

API = "/api/v1/query"
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


def response(*found: dict[str, Any], **changes: Any) -> bytes:
    data = {"resultType": "matrix", "result": list(found), **changes}
    return json.dumps({"status": "success", "data": data}).encode()


def read(body: bytes, *targets: ScrapeTarget) -> tuple[int, dict[str, RouterCounters | None]]:
    at_ns, scrapes = decode_response(body, namespace="default", targets=targets)
    for scrape in scrapes:
        assert scrape.signal is (Signal.FRESH if scrape.counters else Signal.MISSING)
    return at_ns, {scrape.target.uid: scrape.counters for scrape in scrapes}


def test_series_are_summed_to_the_counters_of_the_router() -> None:
    at_ns, routers = read(response(*of_router(10, pod="chat-router-0", namespace="default")), R0)
    router = routers["r0"]
    assert at_ns == 1000 * NS_PER_S
    assert router is not None
    assert (router.arrivals, router.client_errors, router.in_flight) == (15, 3, 2)
    chat = router.classes["chat"]
    assert (chat.good, chat.total) == (9, 10)
    assert chat.ttft == TargetCounts(judged=10, missed=1, close=1)


def test_routers_are_distinguished_by_pod_or_by_address() -> None:
    found = [
        *of_router(10, at_s=1010, pod="chat-router-0"),
        *of_router(20, at_s=1003, instance="10.0.0.2:9000"),
    ]
    at_ns, routers = read(response(*found), R0, R1)
    assert [one and one.arrivals for one in routers.values()] == [15, 25]
    assert at_ns == 1003 * NS_PER_S, "the older of the two scrapes"


def test_series_from_before_a_restart_are_not_counted() -> None:
    # No client error and no judged request since the restart, so these series are missing.
    lazy = ("goodput_router_client_errors_total", "goodput_promises_total")
    found = [
        series
        for at_s, count in ((1000, 40), (1060, 3))
        for series in of_router(count, at_s=at_s, pod="chat-router-0")
        if (series["metric"]["__name__"] in lazy) == (at_s == 1000)
    ]
    at_ns, routers = read(response(*found), R0)
    router = routers["r0"]
    assert at_ns == 1060 * NS_PER_S, "the time of the last scrape"
    assert router is not None
    assert (router.arrivals, router.client_errors, router.in_flight) == (8, 0, 2)
    chat = router.classes["chat"]
    assert (chat.good, chat.total, chat.ttft) == (2, 3, TargetCounts())


@pytest.mark.parametrize("apart_s", [0, 4], ids=["at the same time", "at different times"])
def test_a_router_scraped_by_two_jobs_is_counted_once(apart_s: int) -> None:
    found = [
        *of_router(10, at_s=1000, pod="chat-router-0", job="pods"),
        *of_router(10 + apart_s, at_s=1000 + apart_s, pod="chat-router-0", job="services"),
    ]
    at_ns, routers = read(response(*found), R0)
    router = routers["r0"]
    assert at_ns == (1000 + apart_s) * NS_PER_S
    assert router is not None
    assert (router.arrivals, router.client_errors, router.in_flight) == (15 + apart_s, 3, 2)
    assert router.classes["chat"].total == 10 + apart_s


def test_a_router_that_stops_delays_no_measurement() -> None:
    found = [
        *of_router(10, at_s=1010, pod="chat-router-0"),
        *of_router(20, at_s=900, pod="chat-router-1"),
    ]
    at_ns, routers = read(response(*found), R0, replace(R1, ready=False))
    assert at_ns == 1010 * NS_PER_S
    assert [one and one.arrivals for one in routers.values()] == [15, 25]


@pytest.mark.parametrize(
    "labels",
    [
        pytest.param({"pod": "chat-router-0", "namespace": "other"}, id="another namespace"),
        pytest.param({"pod": "chat-router-9", "instance": "10.0.0.1:9000"}, id="another pod"),
        pytest.param({"instance": "10.0.0.1:9001"}, id="another port"),
        pytest.param({}, id="no labels"),
    ],
)
def test_series_of_another_router_are_not_used(labels: dict[str, Any]) -> None:
    assert read(response(*of_router(10, **labels)), R0)[1] == {"r0": None}


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"<html>", id="not JSON"),
        pytest.param(b'{"status": "error", "error": "no"}', id="an error"),
        pytest.param(response(resultType="vector"), id="another type"),
        pytest.param(response({"metric": {}, "values": []}), id="no sample"),
        pytest.param(response(series("x", "NaN", pod="chat-router-0")), id="NaN"),
        pytest.param(response(series("x", "-1", pod="chat-router-0")), id="negative"),
        pytest.param(response(series("x", "many", pod="chat-router-0")), id="not a number"),
    ],
)
def test_an_invalid_response_is_rejected(body: bytes) -> None:
    with pytest.raises(
        ValueError,
        match=r"^the response does not match the query$|^a value in the response is not a count$",
    ):
        read(body, R0)


@asynccontextmanager
async def serving(path: str, body: bytes, content_type: str) -> AsyncIterator[str]:
    """Run a server that returns this body for a path; yield its address."""

    async def handle(_: web.Request) -> web.Response:
        return web.Response(body=body, headers={"Content-Type": content_type})

    app = web.Application()
    app.router.add_get(path, handle)
    async with TestServer(app, host="127.0.0.1") as server:
        yield f"127.0.0.1:{server.port}"


async def scrape(address: str, *targets: ScrapeTarget) -> tuple[RouterScrape, ...]:
    async with aiohttp.ClientSession() as session:
        _, scrapes = await query_prometheus(
            session,
            f"http://{address}",
            llmservice="chat",
            namespace="default",
            targets=targets,
        )
    return scrapes


async def test_the_maximum_number_of_classes_and_routers_is_read() -> None:
    def labelled(pod: str, name: str, **more: str) -> dict[str, Any]:
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
            labelled(pod, "goodput_router_arrivals_total"),
            labelled(pod, "goodput_router_in_flight_requests", role="router"),
            *(
                labelled(pod, "goodput_requests_total", slo_class=f"class-{n}", outcome=outcome)
                for n in range(16)
                for outcome in CLIENT_OUTCOMES
            ),
            *(
                labelled(pod, "goodput_promises_total", slo_class=f"class-{n}", promise=promise,
                      result=result)
                for n in range(16)
                for promise in PROMISES
                for result in PROMISE_RESULTS
            ),
        )
    ]  # fmt: skip
    targets = [ScrapeTarget(name=pod, uid=pod, url="http://10.0.0.1:9000") for pod in pods]
    async with serving(API, response(*found), "application/json") as server:
        scrapes = await scrape(server, *targets)
    assert {scrape.signal for scrape in scrapes} == {Signal.FRESH}
    assert {len(one.counters.classes) for one in scrapes if one.counters} == {16}


async def test_a_response_that_is_too_long_is_not_read_to_its_end() -> None:
    async with serving(API, b" " * (20 << 20), "application/json") as server:
        (found,) = await scrape(server, R0)
    assert found.signal is Signal.FAILED
    assert "returned more than" in found.detail


async def test_an_unreachable_server_is_a_failed_scrape() -> None:
    (found,) = await scrape("127.0.0.1:1", R0)
    assert found.signal is Signal.FAILED
    assert "cannot be reached" in found.detail


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@asynccontextmanager
async def prometheus(folder: Path, target: str) -> AsyncIterator[str]:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("NOT RUN: prometheus is missing; install it with `apt-get install prometheus`")
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


async def test_a_real_server_returns_the_counters_of_a_router(tmp_path: Path) -> None:
    from goodput_engine.router.outcomes import OutcomeCounts

    registry = CollectorRegistry()
    outcomes = OutcomeCounts(registry, llmservice="chat", classes=["chat", "batch"])
    settle(outcomes, ttft_ms=100)
    settle(outcomes, ttft_ms=900)
    outcomes.begin()
    async with (
        serving("/metrics", generate_latest(registry), "text/plain; version=0.0.4") as address,
        prometheus(tmp_path, address) as server,
        aiohttp.ClientSession() as session,
        asyncio.timeout(60),
    ):
        target = ScrapeTarget(name="chat-router-0", uid="r0", url=f"http://{address}")
        counters: RouterCounters | None = None
        at_ns = 0
        while counters is None:
            await asyncio.sleep(0.2)
            at_ns, (found,) = await query_prometheus(
                session, server, llmservice="chat", namespace="default", targets=[target]
            )
            counters = found.counters
    assert at_ns > 0
    assert (counters.arrivals, counters.in_flight) == (3, 1)
    assert (counters.classes["chat"].good, counters.classes["chat"].total) == (1, 2)
    assert counters.classes["chat"].ttft == TargetCounts(judged=2, missed=1)
    assert counters.classes["batch"].total == 0


def settle(outcomes: Any, *, ttft_ms: int) -> None:
    """Settle a request of class chat with a TTFT target of 500 ms."""
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
            measurable_targets=targets,
            outcome=Outcome.OK,
            slo=SimpleNamespace(targets=targets),
            uploaded=True,
            observer=None,
            reported_tokens=(0, 0),
            record=lambda _now_ns: record,
        ),
        record.end_ns,
    )

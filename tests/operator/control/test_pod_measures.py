"""Measures of services over pods, once per interval."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.operator.control.test_measures import ENGINE, counters

from goodput_core.control import Signal
from goodput_core.slo.attainment import Attainment
from goodput_core.slo.window import SecondRing
from goodput_core.units import NS_PER_S
from goodput_operator.control.admin_ports import Scraper
from goodput_operator.control.pod_measures import PodMeasures, engine_targets, router_targets
from goodput_operator.control.readings import EngineScrape, RouterScrape, ScrapeTarget

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

S = NS_PER_S
ALLOWED = ("http://127.0.0.1:1",)


class Processes(Scraper):
    """Returns scrapes of a service's processes without a socket."""

    def __init__(self, session: aiohttp.ClientSession | None = None) -> None:
        if session is not None:
            super().__init__(session)
        self.urls: list[str] = []
        self.arrivals = 0
        self.ring: SecondRing | None = SecondRing(500)

    async def routers(
        self, targets: Any, since: Mapping[str, int] | None = None
    ) -> tuple[RouterScrape, ...]:
        self.urls += [target.url for target in targets]
        return tuple(
            RouterScrape(
                target=t,
                signal=Signal.FRESH,
                counters=replace(
                    counters(self.arrivals),
                    seconds=None
                    if since is None or self.ring is None
                    else self.ring.recent(since.get(t.uid, 0), self.ring.end_s),
                ),
            )
            for t in targets
        )

    async def engines(self, targets: Any) -> tuple[EngineScrape, ...]:
        self.urls += [target.url for target in targets]
        return tuple(EngineScrape(target=t, signal=Signal.FRESH, counters=ENGINE) for t in targets)


def service(uid: str = "u", generation: int = 1, **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "chat", "namespace": "default", "uid": uid, "generation": generation,
        },
        "spec": {
            "model": {"source": "emulated://unit"},
            "slo": {"classes": [{"name": "chat", "ttftMs": 500, "tpotMs": 50}]},
            **spec,
        },
    }  # fmt: skip


def pod(
    role: str, name: str, *, ip: str | None = "10.0.0.1", ready: bool = True, **metadata: Any
) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name, "uid": f"uid-{name}", "labels": {"goodput.dev/role": role}, **metadata,
        },
        "status": {
            "phase": "Running",
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }  # fmt: skip


PODS = [pod("router", "r0"), pod("engine", "e0", ip="10.0.0.2")]


def test_pods_with_an_address_are_scraped_at_their_admin_port() -> None:
    pods = [
        *PODS,
        pod("router", "r1", ip="fd00::1", ready=False),
        pod("router", "r2", deletionTimestamp="2026-01-01T00:00:00Z"),
        pod("router", "r3", ip=None),
        {"metadata": {"name": "other", "uid": "o"}, "status": {"podIP": "10.0.0.9"}},
    ]
    assert router_targets(pods) == (
        ScrapeTarget(name="r0", uid="uid-r0", url="http://10.0.0.1:9000"),
        ScrapeTarget(name="r1", uid="uid-r1", url="http://[fd00::1]:9000", ready=False),
        ScrapeTarget(name="r2", uid="uid-r2", url="http://10.0.0.1:9000", ready=False),
    )
    assert [target.name for target in engine_targets(pods)] == ["e0"]


async def test_pods_are_scraped_once_per_interval() -> None:
    processes = Processes()
    measures = PodMeasures(processes, prometheus_urls=ALLOWED)
    first = await measures.measure(service(), PODS, 0)
    assert first is not None
    assert first.traffic.signal is Signal.MISSING
    assert await measures.measure(service(), PODS, 9 * S) is None
    processes.arrivals = 40
    second = await measures.measure(service(), PODS, 10 * S)
    assert second is not None
    assert (second.interval_ns, second.traffic.arrivals) == (10 * S, 40)
    assert [engine.name for engine in second.engines] == ["e0"]
    assert processes.urls == ["http://10.0.0.1:9000", "http://10.0.0.2:9000"] * 2


async def test_a_restarted_operator_reads_the_last_hour_back() -> None:
    processes = Processes()
    assert processes.ring is not None
    processes.ring.add("chat", 600, good=3, total=4)
    processes.ring.advance(800)
    seen = []
    for _ in range(2):
        measures = PodMeasures(processes, prometheus_urls=ALLOWED)
        for now_s in (2_000, 2_010):
            found = await measures.measure(service(), PODS, now_s * S)
            assert found is not None
            assert found.seconds is not None
            seen.append(found.seconds["chat"].attainment)
    assert seen == [Attainment(good=3, total=4)] * 4


async def test_a_router_without_per_second_counts_makes_the_window_unknown() -> None:
    processes = Processes()
    processes.ring = None
    measures = PodMeasures(processes, prometheus_urls=ALLOWED)
    found = await measures.measure(service(), PODS, 0)
    assert found is not None
    assert found.seconds is None


async def test_a_suspended_service_forgets_its_window() -> None:
    processes = Processes()
    assert processes.ring is not None
    processes.ring.add("chat", 600, good=3, total=4)
    measures = PodMeasures(processes, prometheus_urls=ALLOWED)
    assert await measures.measure(service(), PODS, 0) is not None
    assert await measures.measure(service(generation=2, suspend=True), PODS, 10 * S) is None
    processes.ring = SecondRing(700)
    processes.ring.advance(705)
    found = await measures.measure(service(generation=3), PODS, 20 * S)
    assert found is not None
    assert found.seconds is not None
    assert found.seconds["chat"].attainment.total == 0


async def test_each_service_has_its_own_interval() -> None:
    measures = PodMeasures(Processes(), prometheus_urls=ALLOWED)
    quick = service(control={"intervalSeconds": 2})
    assert await measures.measure(quick, PODS, 0) is not None
    assert await measures.measure(quick, PODS, 2 * S) is not None
    assert await measures.measure(service("v"), PODS, 2 * S) is not None, "another service"


@pytest.mark.parametrize(
    ("before_s", "after_s", "over_s"),
    [
        pytest.param(3600, 10, 10, id="shorter"),
        pytest.param(10, 60, 60, id="longer"),
    ],
)
async def test_a_changed_interval_applies_at_once(before_s: int, after_s: int, over_s: int) -> None:
    measures = PodMeasures(Processes(), prometheus_urls=ALLOWED)
    before = service(control={"intervalSeconds": before_s})
    after = service(generation=2, control={"intervalSeconds": after_s})
    assert await measures.measure(before, PODS, 0) is not None
    assert await measures.measure(after, PODS, 5 * S) is None
    assert await measures.measure(after, PODS, over_s * S - 1) is None
    assert await measures.measure(after, PODS, over_s * S) is not None


async def test_a_suspended_or_invalid_service_is_not_scraped() -> None:
    processes = Processes()
    measures = PodMeasures(processes, prometheus_urls=ALLOWED)
    assert await measures.measure(service(suspend=True), PODS, 0) is None
    assert await measures.measure(service(nonsense=1), PODS, 0) is None
    assert processes.urls == []


async def test_the_state_of_a_deleted_service_is_removed() -> None:
    measures = PodMeasures(Processes(), prometheus_urls=ALLOWED)
    await measures.measure(service(), PODS, 0)
    measures.forget("u")
    measures.forget("u")
    again = await measures.measure(service(), PODS, 1 * S)
    assert again is not None
    assert again.traffic.signal is Signal.MISSING


async def test_a_prometheus_server_is_scraped_instead_of_the_routers() -> None:
    async with aiohttp.ClientSession() as session:
        processes = Processes(session)
        measures = PodMeasures(processes, prometheus_urls=ALLOWED)
        assert await measures.measure(service(), PODS, 0) is not None
        processes.urls.clear()
        unreachable = service(control={"prometheus": {"url": "http://127.0.0.1:1"}})
        measured = await measures.measure(unreachable, PODS, 10 * S)
    assert measured is not None
    assert measured.traffic.signal is Signal.FAILED
    assert [engine.signal for engine in measured.engines] == [Signal.FRESH]
    assert processes.urls == ["http://10.0.0.2:9000"], "engines are still scraped"


async def test_a_server_that_is_not_allowed_gets_no_request(
    server: tuple[str, list[str]],
) -> None:
    url, paths = server
    named = service(control={"prometheus": {"url": url}})
    async with aiohttp.ClientSession() as session:
        for allowed in (ALLOWED, (f"{url}/sub", url[:-1]), (url,)):
            assert paths == []
            measures = PodMeasures(Processes(session), prometheus_urls=allowed)
            measured = await measures.measure(named, PODS, 0)
            assert measured is not None
            assert measured.traffic.signal is Signal.FAILED
            assert "secret" not in str(measured.unmeasured)
    assert paths == ["/api/v1/query"], "only the last one was allowed"


@pytest.fixture
async def server() -> AsyncIterator[tuple[str, list[str]]]:
    """A server and the requested paths."""
    paths: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        paths.append(request.path)
        return web.Response(text="a secret")

    app = web.Application()
    app.router.add_get("/{path:.*}", handle)
    async with TestServer(app) as running:
        yield str(running.make_url("")).rstrip("/"), paths

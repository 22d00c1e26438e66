"""The operator's probe port: its responses, on all addresses of both families."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from goodput_core.errors import UsageError
from goodput_core.units import NS_PER_S
from goodput_operator.backoff import BackOff
from goodput_operator.kube.watch import WATCH_S
from goodput_operator.manager.health import Health, ProbeServer
from goodput_operator.reconcile.metrics import OperatorMetrics
from goodput_operator.reconcile.work_queue import Result, Workers, WorkQueue

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PODS = "/api/v1/pods"


@pytest.fixture
def health(bench: Any) -> Health:
    async def reconcile(_: str) -> Result:
        return Result()

    workers = Workers(
        queue=WorkQueue[str](BackOff()), reconcile=reconcile, clock=bench.clock, count=1
    )
    return Health(clock=bench.clock, paths=[PODS], fence=bench.fence, workers=workers)


@pytest.fixture
async def probes(health: Health) -> AsyncIterator[ProbeServer]:
    probes = ProbeServer(health, OperatorMetrics(), lambda: {"services": []})
    yield probes
    await probes.stop()


async def fetch(probes: ProbeServer, *paths: str) -> list[tuple[int, Any]]:
    """Return the response of the operator's port to each path."""
    port = await probes.start("127.0.0.1", 0)
    responses = []
    async with aiohttp.ClientSession() as http:
        for path in paths:
            async with http.get(f"http://127.0.0.1:{port}{path}") as response:
                responses.append((response.status, await response.json()))
    return responses


async def test_an_operator_with_problems_is_not_live_and_reports_ages(
    probes: ProbeServer, health: Health, bench: Any
) -> None:
    health.note_watch(PODS)
    health.note_event()
    bench.clock.ns += (2 * WATCH_S + 1) * NS_PER_S
    ((status, report),) = await fetch(probes, "/health/live")
    assert status == 503
    assert report["problems"] == [f"no watch of {PODS} has started for 481 s"]
    assert report["watch_age_seconds"] == {PODS: 481}
    assert report["event_age_seconds"] == 481
    assert report["reconciliation_age_seconds"] is None
    assert report["overdue_seconds"] == 0


async def test_an_operator_with_missing_watches_is_live_but_not_ready(
    probes: ProbeServer, health: Health
) -> None:
    (live, report), (ready, ready_report) = await fetch(probes, "/health/live", "/health/ready")
    assert (live, ready) == (200, 503)
    assert report == ready_report
    assert (report["ready"], report["watch_age_seconds"]) == (False, {PODS: None})


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="the kernel has no IPv6")
async def test_two_colons_select_both_address_families(probes: ProbeServer, health: Health) -> None:
    health.note_watch(PODS)
    port = await probes.start("::", free_port())
    async with aiohttp.ClientSession() as http:
        for host in ("127.0.0.1", "[::1]"):
            async with http.get(f"http://{host}:{port}/health/ready") as response:
                assert response.status == 200


async def test_a_port_in_use_is_reported(probes: ProbeServer) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(UsageError, match="choose another with --probe-port"),
    ):
        await probes.start("127.0.0.1", taken.getsockname()[1])

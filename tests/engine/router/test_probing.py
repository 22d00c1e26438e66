"""Probes: readiness and load of the replicas."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.engine.router.conftest import TOKEN, hang, stream, until

from goodput_core.units import NS_PER_MS
from goodput_engine.router.probing import Prober
from goodput_engine.router.replicas import Replica
from goodput_engine.router.settings import ProbeSettings, RouterLimits
from goodput_engine.router.upstreams import Upstream

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.engine.router.conftest import Call, StartBench

FAST = ProbeSettings(
    interval_ns=5 * NS_PER_MS, retry_ns=NS_PER_MS, timeout_ns=100 * NS_PER_MS, hung_after_probes=2
)


async def test_a_replica_gets_no_requests_until_it_is_ready(start: StartBench) -> None:
    bench = await start(2, probe=FAST)
    first, _ = bench.router.replicas
    bench.replicas[0].ready = False
    await until(lambda: not first.ready)
    assert "503" in first.detail
    assert {(await bench.post())[0] for _ in range(4)} == {200}
    assert bench.replicas[0].calls == []
    bench.replicas[0].ready = True
    await until(lambda: first.ready)


async def test_a_replica_that_listens_again_is_detected(start: StartBench) -> None:
    bench = await start(1, probe=FAST)
    (replica,) = bench.router.replicas
    await bench.replicas[0].refuse()
    await until(lambda: not replica.ready)
    assert "cannot connect" in replica.detail
    await bench.replicas[0].start()
    await until(lambda: replica.ready)
    assert (await bench.post())[0] == 200


async def test_a_probe_can_be_triggered_at_once(start: StartBench) -> None:
    bench = await start(1)  # the next probe is due in an hour
    (replica,) = bench.router.replicas
    await bench.replicas[0].refuse()
    replica.wake.set()
    await until(lambda: not replica.ready)


async def test_reported_load_is_stored(start: StartBench) -> None:
    bench = await start(1, probe=FAST)
    (replica,) = bench.router.replicas
    bench.replicas[0].state = json.dumps(
        {"waiting": 3, "running": 5, "kv_total_blocks": 10, "kv_free_blocks": 4, "new": [1]}
    ).encode()
    await until(lambda: replica.report.waiting == 3)
    load = replica.load(0)
    assert (load.waiting, load.kv_used_blocks, load.kv_total_blocks) == (3, 6, 10)
    assert not load.saturated


async def test_a_load_report_may_arrive_in_pieces(start: StartBench) -> None:
    bench = await start(1, probe=FAST)
    (replica,) = bench.router.replicas
    padding = "x" * 700_000
    bench.replicas[0].state = json.dumps({"padding": padding, "waiting": 7}).encode()
    await until(lambda: replica.report.waiting == 7)


async def test_responses_to_probes_may_have_long_headers(start: StartBench) -> None:
    bench = await start(1, probe=FAST)
    (replica,) = bench.router.replicas
    bench.replicas[0].probe_headers.append(f"X-Trace: {'x' * 60_000}")
    bench.replicas[0].state = b'{"waiting":3}'
    await until(lambda: replica.report.waiting == 3)
    assert replica.ready


async def test_a_replica_that_reports_saturation_gets_no_requests(start: StartBench) -> None:
    bench = await start(1, probe=FAST)
    (replica,) = bench.router.replicas
    bench.replicas[0].state = b'{"saturated":true}'
    await until(lambda: replica.saturated)
    assert (await bench.post())[0] == 429
    bench.replicas[0].state = b'{"saturated":false}'
    await until(lambda: not replica.saturated)
    assert (await bench.post())[0] == 200


@pytest.mark.parametrize(
    "state", [b"", b"nonsense", b"[]", b'{"waiting":"many"}', b'{"x":"' + b"y" * (2 << 20) + b'"}']
)
async def test_an_invalid_load_report_changes_nothing(start: StartBench, state: bytes) -> None:
    bench = await start(1, probe=FAST)
    (replica,) = bench.router.replicas
    bench.replicas[0].state = b'{"waiting":3}'
    await until(lambda: replica.report.waiting == 3)
    bench.replicas[0].state = state
    for _ in range(2):
        replica.wake.set()
        await until(lambda: not replica.wake.is_set())
    assert replica.ready
    assert replica.report.waiting == 3
    assert (await bench.post())[0] == 200


async def test_a_removed_replica_gets_no_requests(start: StartBench) -> None:
    bench = await start(2, probe=FAST)
    removed = bench.replicas[0]
    bench.router._apply([bench.replicas[1].upstream])
    removed.behave = pytest.fail  # type: ignore[assignment]
    assert {(await bench.post())[0] for _ in range(4)} == {200}
    assert removed.calls == []


@pytest.mark.parametrize("behave", [hang, stream(asyncio.Event())], ids=["nothing", "a head"])
async def test_a_request_without_a_response_moves_from_a_hung_replica_to_another(
    start: StartBench, behave: Callable[[Call], Awaitable[None]]
) -> None:
    bench = await start(2, probe=FAST)
    hanging, _ = bench.replicas
    hanging.behave = behave
    posting = asyncio.create_task(bench.post())
    call = await hanging.arrived.get()
    hanging.silent = True
    assert (await posting)[0] == 200
    await asyncio.wait_for(call.hung_up.wait(), 5)
    assert await bench.settled() == {"attained": 1}
    assert bench.router.outcomes.retries == {"hung": 1}
    assert [r.in_flight for r in bench.router.replicas] == [0, 0]


async def test_without_a_retry_in_the_budget_a_request_stays_at_a_hung_replica(
    start: StartBench,
) -> None:
    bench = await start(2, probe=FAST, limits=RouterLimits(retry_percent=0, retry_burst=0))
    hanging, _ = bench.replicas
    awake = asyncio.Event()

    async def sleep(call: Call) -> None:
        await awake.wait()
        await call.whole("200 OK", b"{}")

    hanging.behave = sleep
    posting = asyncio.create_task(bench.post())
    await hanging.arrived.get()
    hanging.silent = True
    replica, _ = bench.router.replicas
    await until(lambda: not replica.ready)
    awake.set()
    assert (await posting)[0] == 200
    assert bench.router.outcomes.retries == {}


async def test_a_stream_that_began_stays_at_a_hung_replica(
    start: StartBench,
) -> None:
    bench = await start(2, probe=FAST)
    hanging, _ = bench.replicas
    awake = asyncio.Event()
    hanging.behave = stream(TOKEN, awake, TOKEN + b"data: [DONE]\n\n")
    posting = asyncio.create_task(bench.post())
    await hanging.arrived.get()
    hanging.silent = True
    replica, _ = bench.router.replicas
    await until(lambda: not replica.ready)
    awake.set()
    status, body = await posting
    assert (status, body.count(TOKEN)) == (200, 2)
    assert bench.router.outcomes.retries == {}


OTHERS = ("/health/ready", "/health", "/v1/models")
HEALTH_PATHS: list[tuple[str | None, dict[str, int], str, tuple[str, ...]]] = [
    (None, {"/health/ready": 200}, "", OTHERS),
    (None, {"/health": 200}, "", OTHERS[1:]),
    (None, {"/health": 503}, "503", OTHERS[1:]),
    (None, {"/v1/models": 200}, "", OTHERS[2:]),
    (None, {"/v1/models": 401}, "", OTHERS[2:]),
    (None, {"/v1/models": 500}, "500", OTHERS[2:]),
    (None, {}, "404", OTHERS[2:]),
    # All paths need a key.
    (None, dict.fromkeys(OTHERS, 401), "", OTHERS[2:]),
    (None, {**dict.fromkeys(OTHERS, 403), "/health": 503}, "503", OTHERS[1:]),
    # The manifest names a path, and the others would not do.
    ("/live", {"/live": 200, **dict.fromkeys(OTHERS, 500)}, "", ("/live", *OTHERS)),
    ("/live", {"/live": 503, **dict.fromkeys(OTHERS, 200)}, "503", ("/live", *OTHERS)),
    ("/v1/models", {"/v1/models": 200}, "", ("/v1/models", *OTHERS[:2])),
    # A replica of the revision before the path changed.
    ("/live", {"/health": 200}, "", OTHERS[1:]),
]


@pytest.mark.parametrize(("named", "paths", "detail", "left"), HEALTH_PATHS)
async def test_a_server_without_an_admin_port_is_probed_at_a_path_that_it_has(
    named: str | None, paths: dict[str, int], detail: str, left: tuple[str, ...]
) -> None:
    async def respond(request: web.Request) -> web.Response:
        return web.Response(status=paths.get(request.path, 404))

    app = web.Application()
    app.router.add_get("/{path:.*}", respond)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        replica = Replica(Upstream("a", str(server.make_url("")).rstrip("/")), named)
        prober = Prober(session, FAST, time.monotonic_ns)
        prober.follow([replica], [])
        await until(lambda: detail in replica.detail if detail else replica.ready)
        await prober.close()
    assert replica.health_paths == left

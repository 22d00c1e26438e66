"""How the router learns which replicas are ready and how full they are."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from goodput_core.units import NS_PER_MS
from goodput_engine.router.settings import ProbeSettings, RouterLimits

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.engine.router.conftest import Call, StartBench

FAST = ProbeSettings(
    interval_ns=5 * NS_PER_MS, quick_ns=NS_PER_MS, timeout_ns=100 * NS_PER_MS, strikes=2
)
TOKEN = b'data: {"choices":[{"index":0,"text":"x","finish_reason":null}]}\n\n'


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not true():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.001)


async def test_a_replica_that_is_not_ready_gets_nothing_until_it_is(start: StartBench) -> None:
    bench = await start(2, probe=FAST)
    first, _ = bench.router.replicas
    bench.replicas[0].ready = False
    await until(lambda: not first.ready)
    assert "503" in first.detail
    assert {(await bench.post())[0] for _ in range(4)} == {200}
    assert bench.replicas[0].calls == []
    bench.replicas[0].ready = True
    await until(lambda: first.ready)


async def test_a_replica_that_comes_back_is_found(start: StartBench) -> None:
    bench = await start(1, probe=FAST)
    (replica,) = bench.router.replicas
    await bench.replicas[0].refuse()
    await until(lambda: not replica.ready)
    assert "cannot connect" in replica.detail
    await bench.replicas[0].start()
    await until(lambda: replica.ready)
    assert (await bench.post())[0] == 200


async def test_a_failed_request_has_the_replica_asked_at_once(start: StartBench) -> None:
    bench = await start(1)  # the next probe is due in an hour
    (replica,) = bench.router.replicas
    await bench.replicas[0].refuse()
    replica.wake.set()
    await until(lambda: not replica.ready)


async def test_load_is_taken_over(start: StartBench) -> None:
    bench = await start(1, probe=FAST)
    (replica,) = bench.router.replicas
    bench.replicas[0].state = json.dumps(
        {"waiting": 3, "running": 5, "kv_total_blocks": 10, "kv_free_blocks": 4, "new": [1]}
    ).encode()
    await until(lambda: replica.report.waiting == 3)
    load = replica.load(0)
    assert (load.waiting, load.kv_used_blocks, load.kv_total_blocks) == (3, 6, 10)
    assert not load.saturated


async def test_load_may_come_in_pieces(start: StartBench) -> None:
    bench = await start(1, probe=FAST)
    (replica,) = bench.router.replicas
    padding = "x" * 700_000
    bench.replicas[0].state = json.dumps({"padding": padding, "waiting": 7}).encode()
    await until(lambda: replica.report.waiting == 7)


async def test_a_replica_that_says_it_is_full_gets_nothing(start: StartBench) -> None:
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
async def test_nonsense_about_load_changes_nothing(start: StartBench, state: bytes) -> None:
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


async def test_a_replica_that_leaves_is_no_longer_asked(start: StartBench) -> None:
    bench = await start(2, probe=FAST)
    gone = bench.replicas[0]
    bench.router._apply([bench.replicas[1].upstream])
    gone.behave = pytest.fail  # type: ignore[assignment]
    assert {(await bench.post())[0] for _ in range(4)} == {200}
    assert gone.calls == []


async def nothing(_call: Call) -> None:
    await asyncio.Event().wait()


async def a_head(call: Call) -> None:
    await call.stream_head()
    await nothing(call)


@pytest.mark.parametrize("behave", [nothing, a_head])
async def test_what_waits_at_a_replica_that_hangs_is_answered_by_another(
    start: StartBench, behave: Callable[[Call], Awaitable[None]]
) -> None:
    bench = await start(2, probe=FAST)
    hanging, _ = bench.replicas
    hanging.behave = behave
    asked = asyncio.create_task(bench.post())
    call = await hanging.arrived.get()
    hanging.silent = True
    assert (await asked)[0] == 200
    await asyncio.wait_for(call.hung_up.wait(), 5)
    assert await bench.settled() == {"attained": 1}
    assert bench.router.outcomes.retries == {"hung": 1}
    assert [r.in_flight for r in bench.router.replicas] == [0, 0]


async def test_without_a_retry_to_spend_a_request_waits_for_the_replica_to_wake_up(
    start: StartBench,
) -> None:
    bench = await start(2, probe=FAST, limits=RouterLimits(retry_percent=0, retry_burst=0))
    hanging, _ = bench.replicas
    awake = asyncio.Event()

    async def sleep(call: Call) -> None:
        await awake.wait()
        await call.whole("200 OK", b"{}")

    hanging.behave = sleep
    asked = asyncio.create_task(bench.post())
    await hanging.arrived.get()
    hanging.silent = True
    replica, _ = bench.router.replicas
    await until(lambda: not replica.ready)
    awake.set()
    assert (await asked)[0] == 200
    assert bench.router.outcomes.retries == {}


async def test_a_stream_that_began_stays_with_a_replica_that_answers_no_probe(
    start: StartBench,
) -> None:
    bench = await start(2, probe=FAST)
    hanging, _ = bench.replicas
    awake = asyncio.Event()

    async def pause(call: Call) -> None:
        await call.stream_head()
        await call.chunk(TOKEN)
        await awake.wait()
        await call.chunk(TOKEN + b"data: [DONE]\n\n")
        await call.end()

    hanging.behave = pause
    asked = asyncio.create_task(bench.post())
    await hanging.arrived.get()
    hanging.silent = True
    replica, _ = bench.router.replicas
    await until(lambda: not replica.ready)
    awake.set()
    status, body = await asked
    assert (status, body.count(TOKEN)) == (200, 2)
    assert bench.router.outcomes.retries == {}

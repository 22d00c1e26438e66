"""How the router learns which replicas are ready and how full they are."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from goodput_core.units import NS_PER_MS
from goodput_engine.router.settings import ProbeSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.engine.router.conftest import StartBench

FAST = ProbeSettings(
    interval_ns=5 * NS_PER_MS, quick_ns=NS_PER_MS, timeout_ns=100 * NS_PER_MS, strikes=2
)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not true():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.001)


async def test_a_replica_that_is_not_ready_gets_nothing_until_it_is(start: StartBench) -> None:
    bench = await start(2, probe=FAST)
    first, _ = bench.router.fleet
    bench.replicas[0].ready = False
    await until(lambda: not first.ready)
    assert "503" in first.detail
    assert {(await bench.post())[0] for _ in range(4)} == {200}
    assert bench.replicas[0].calls == []
    bench.replicas[0].ready = True
    await until(lambda: first.ready)


async def test_a_replica_that_comes_back_is_found(start: StartBench) -> None:
    bench = await start(1, probe=FAST)
    (replica,) = bench.router.fleet
    await bench.replicas[0].refuse()
    await until(lambda: not replica.ready)
    assert "cannot connect" in replica.detail
    await bench.replicas[0].start()
    await until(lambda: replica.ready)
    assert (await bench.post())[0] == 200


async def test_a_failed_request_has_the_replica_asked_at_once(start: StartBench) -> None:
    bench = await start(1)  # the next probe is due in an hour
    (replica,) = bench.router.fleet
    await bench.replicas[0].refuse()
    replica.wake.set()
    await until(lambda: not replica.ready)


async def test_load_is_taken_over(start: StartBench) -> None:
    bench = await start(1, probe=FAST)
    (replica,) = bench.router.fleet
    bench.replicas[0].state = json.dumps(
        {"waiting": 3, "running": 5, "kv_total_blocks": 10, "kv_free_blocks": 4, "new": [1]}
    ).encode()
    await until(lambda: replica.report.waiting == 3)
    load = replica.load(0)
    assert (load.waiting, load.kv_used_blocks, load.kv_total_blocks) == (3, 6, 10)
    assert not load.saturated


async def test_a_replica_that_says_it_is_full_gets_nothing(start: StartBench) -> None:
    bench = await start(1, probe=FAST)
    (replica,) = bench.router.fleet
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
    (replica,) = bench.router.fleet
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

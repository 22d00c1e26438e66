"""Workers: a bounded number, one reconciliation per key, and failures do not affect other keys."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import TYPE_CHECKING

from goodput_core.units import NS_PER_MS
from goodput_operator.backoff import BackOff
from goodput_operator.kube.fence import SystemClock
from goodput_operator.reconcile.work_queue import Result, Workers, WorkQueue

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    import pytest

BACK_OFF = BackOff(first_ns=NS_PER_MS, max_ns=4 * NS_PER_MS)


@contextlib.asynccontextmanager
async def working(
    reconcile: Callable[[str], Awaitable[Result]], count: int = 4
) -> AsyncIterator[Workers[str]]:
    queue: WorkQueue[str] = WorkQueue(BACK_OFF, gap_ns=0)
    workers = Workers(queue=queue, reconcile=reconcile, clock=SystemClock(), count=count)
    task = asyncio.create_task(workers.run())
    try:
        yield workers
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_reconciliations_of_different_keys_overlap_up_to_the_limit() -> None:
    running, most = Counter[str](), 0
    full, release, all_done = asyncio.Event(), asyncio.Event(), asyncio.Event()
    ended: set[str] = set()

    async def reconcile(key: str) -> Result:
        nonlocal most
        running[key] += 1
        most = max(most, running.total())
        if running.total() == 3:
            full.set()
        await release.wait()
        running[key] -= 1
        ended.add(key)
        if len(ended) == 10:
            all_done.set()
        return Result()

    async with working(reconcile, count=3) as workers:
        for number in range(10):
            workers.add(f"key-{number}")
        await full.wait()
        await asyncio.sleep(0)
        release.set()
        await all_done.wait()
    assert most == 3


async def test_reconciliations_of_one_key_never_overlap_and_no_request_is_lost() -> None:
    running, count, seen = 0, 0, 0
    latest = 0
    done = asyncio.Event()

    async def reconcile(_: str) -> Result:
        nonlocal running, count, seen
        running += 1
        assert running == 1
        saw = latest
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        running -= 1
        count += 1
        seen = max(seen, saw)
        if seen == 50:
            done.set()
        return Result()

    async with working(reconcile) as workers:
        for number in range(1, 51):
            latest = number
            workers.add("chat")
            await asyncio.sleep(0)
        await done.wait()
    assert count <= 50


async def test_an_exception_is_logged_and_the_key_is_retried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    count = Counter[str]()
    done = asyncio.Event()

    async def reconcile(key: str) -> Result:
        count[key] += 1
        if key == "bad" and count[key] < 3:
            raise ValueError("a bug")
        if count["bad"] == 3 and count["good"]:
            done.set()
        return Result()

    async with working(reconcile, count=1) as workers:
        workers.add("bad")
        workers.add("good")
        await done.wait()
    assert [record.getMessage() for record in caplog.records] == ["reconciliation failed"] * 2
    assert count["good"] == 1


async def test_a_requested_later_reconciliation_happens() -> None:
    clock, started = SystemClock(), []
    done = asyncio.Event()

    async def reconcile(_: str) -> Result:
        started.append(clock.now_ns())
        if len(started) == 2:
            done.set()
            return Result()
        return Result(again_at_ns=clock.now_ns() + 20 * NS_PER_MS)

    async with working(reconcile) as workers:
        workers.add("chat")
        await done.wait()
        assert workers.finished_ns is not None
    assert started[1] - started[0] >= 20 * NS_PER_MS


async def test_a_deleted_key_is_forgotten() -> None:
    second = asyncio.Event()

    async def reconcile(key: str) -> Result:
        if key == "later":
            second.set()
        return Result(deleted=True)

    async with working(reconcile, count=1) as workers:
        workers.add("chat")
        workers.add("later")
        await second.wait()
        assert "chat" not in workers.queue._entries

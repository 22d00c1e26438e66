"""The watch of the client's event loop records its stalls."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from goodput_core.slo.stalls import Stalls
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_replay.runs.summary import ClientSummary
from goodput_replay.runs.summary_builder import read_stalls, summarise_stall
from goodput_replay.sending.process import LoopWatch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BLOCKED_S = 0.06


@asynccontextmanager
async def watched() -> AsyncIterator[LoopWatch]:
    watch = LoopWatch()
    task = asyncio.ensure_future(watch.run())
    await asyncio.sleep(0)
    yield watch
    task.cancel()
    await asyncio.wait([task])


async def test_a_blocked_loop_is_recorded_as_a_stall() -> None:
    async with watched() as watch:
        start_ns = time.monotonic_ns()
        time.sleep(BLOCKED_S)  # noqa: ASYNC251 - blocks the loop
        end_ns = time.monotonic_ns()
        await asyncio.sleep(0.02)
    assert Stalls(watch.stalls).between_ns(start_ns, end_ns) >= BLOCKED_S * NS_PER_S
    assert watch.lateness.max_ns >= (BLOCKED_S - 0.02) * NS_PER_S


async def test_a_stall_directly_before_the_end_is_recorded() -> None:
    async with watched() as watch:
        time.sleep(BLOCKED_S)  # noqa: ASYNC251 - blocks the loop
    assert Stalls(watch.stalls).total_ns >= BLOCKED_S * NS_PER_S


def test_a_delay_below_ten_milliseconds_is_no_stall() -> None:
    watch = LoopWatch()
    for number in range(1, 100):
        watch._wake(number * 19 * NS_PER_MS)
    assert watch.stalls == []
    assert watch.lateness.max_ns >= 9 * NS_PER_MS


def test_any_number_of_stalls_needs_bounded_memory_and_keeps_the_stalled_time() -> None:
    watch = LoopWatch()
    for number in range(1, 100_001):
        watch._wake(number * 25 * NS_PER_MS)
    assert 500 <= len(watch.stalls) <= 1000
    assert Stalls(watch.stalls).total_ns == 100_000 * 25 * NS_PER_MS


def test_stalls_are_read_back_from_a_summary() -> None:
    watch, zero_ns = LoopWatch(), 1_234_567_891
    for at_ns in (30_000_001, 60_000_002, 61_000_003, 1_100_000_999):
        watch._wake(at_ns)
    client = ClientSummary(
        cpu_s=1,
        cpus=2,
        peak_in_flight=3,
        stalls=tuple(
            summarise_stall(stall, zero_ns, sender) for sender in (0, 2) for stall in watch.stalls
        ),
    )
    by_sender = read_stalls(client)
    assert by_sender.keys() == {0, 2}, "the stalls of two senders may overlap"
    stalls = by_sender[2]
    assert len(stalls) == 3
    assert abs(stalls.total_ns - Stalls(watch.stalls).total_ns) <= 6_000
    assert stalls.between_ns(-(10**12), 0) == stalls.total_ns, "they ended before time zero"

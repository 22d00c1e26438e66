"""The HTTP process kills a core that sends no heartbeat."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import psutil
import pytest
from tests.builders.serving import CONFIGURE

from goodput_core.errors import InternalError
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.core.build import build_core
from goodput_engine.core.wire import encode
from goodput_engine.core_client import CoreClient, RequestStream
from goodput_engine.device.load import load_profile
from goodput_engine.messages import Ready, RequestOutput, Submit, WarmingUp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from goodput_engine.messages import StepOutputs


async def test_an_idle_core_sends_heartbeats_and_a_hanging_one_is_killed() -> None:
    beats: asyncio.Queue[StepOutputs] = asyncio.Queue()
    before = set(psutil.Process().children())
    client = await CoreClient.start(CONFIGURE, on_step=beats.put_nowait, silence_s=1.5)
    try:
        async with asyncio.timeout(20):
            await client.await_ready()
            for _ in range(2):  # longer than the allowed silence
                assert not (await beats.get()).outputs
            (process,) = set(psutil.Process().children()) - before
            process.send_signal(signal.SIGSTOP)
            stream = client.submit(Submit(rid=1, arrival_ns=0, input_tokens=1), each=True)
            await stream.more(0)
            assert stream.lost
            error = await client.failure()
    finally:
        await client.close()
    assert isinstance(error, InternalError)
    assert str(error) == "the engine core was silent for 1.5 s, so it was killed"
    assert not process.is_running()


@asynccontextmanager
async def silent_core() -> AsyncIterator[
    tuple[CoreClient, asyncio.subprocess.Process, socket.socket]
]:
    """Connect a client to a process that does nothing, and to a socket in its place."""
    process = await asyncio.create_subprocess_exec("sleep", "60")
    client = CoreClient(process, lambda _: None, 0.1)
    ours, core = socket.socketpair()
    ours.setblocking(False)
    with core:
        await asyncio.get_running_loop().create_unix_connection(lambda: client, sock=ours)
        yield client, process, core


async def test_a_core_with_long_steps_may_be_silent_for_ten_of_them() -> None:
    state = build_core(CONFIGURE, load_profile(CONFIGURE.device)).state(0)
    ready = Ready(
        device="x", vocab_size=1, max_model_tokens=1, state=state, longest_step_ns=150 * NS_PER_MS
    )
    async with silent_core() as (client, process, core):
        began_s = time.monotonic()
        core.sendall(encode(ready))
        async with asyncio.timeout(20):
            assert await process.wait() == -signal.SIGKILL
        assert time.monotonic() - began_s >= 1.5
        assert (
            str(await client.failure()) == "the engine core was silent for 1.5 s, so it was killed"
        )


@pytest.mark.parametrize(
    ("load_ms", "limit"),
    [pytest.param(1, "1", id="the limit"), pytest.param(150, "1.5", id="the loading")],
)
async def test_a_core_that_warms_up_may_be_silent_for_ten_times_the_longer_of_limit_and_loading(
    load_ms: int, limit: str
) -> None:
    async with silent_core() as (client, process, core):
        for _ in range(2):  # each part of the warm-up has the same time
            began_s = time.monotonic()
            core.sendall(encode(WarmingUp(load_ns=load_ms * NS_PER_MS)))
            await asyncio.sleep(0.3)
            assert process.returncode is None
        async with asyncio.timeout(20):
            assert await process.wait() == -signal.SIGKILL
        assert time.monotonic() - began_s >= float(limit)
        assert str(await client.failure()) == (
            f"the engine core was silent for {limit} s of its warm-up, so it was killed"
        )


async def test_a_core_that_is_ready_has_the_limit_of_its_steps_after_a_long_warm_up() -> None:
    state = build_core(CONFIGURE, load_profile(CONFIGURE.device)).state(0)
    async with silent_core() as (client, process, core):
        ready = Ready(device="x", vocab_size=1, max_model_tokens=1, state=state)
        core.sendall(encode(WarmingUp(load_ns=3600 * NS_PER_S)) + encode(ready))
        async with asyncio.timeout(20):
            assert await process.wait() == -signal.SIGKILL
        assert (
            str(await client.failure()) == "the engine core was silent for 0.1 s, so it was killed"
        )


async def test_an_error_of_one_writer_ends_only_its_own_stream() -> None:
    streams = [RequestStream(arrival_ns=0, each=True) for _ in range(2)]
    written: list[int] = []

    def fail() -> bool:
        raise ValueError("no text")

    def write() -> bool:
        written.append(streams[1].tokens)
        return len(written) < 2

    followers = [
        asyncio.ensure_future(streams[0].follow(fail)),
        asyncio.ensure_future(streams[1].follow(write)),
    ]
    await asyncio.sleep(0)
    for tokens in (1, 1, 1):
        for rid, stream in enumerate(streams):
            stream.push(RequestOutput(rid=rid, new_tokens=tokens), 1)
    with pytest.raises(ValueError, match="no text"):
        await followers[0]
    await followers[1]  # ended by the result False; later outputs wait for the caller
    assert written == [1, 2]
    assert [stream.tokens for stream in streams] == [3, 3]

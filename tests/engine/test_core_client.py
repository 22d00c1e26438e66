"""The front's end of the core's process: a core that hangs is as good as dead."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import psutil

from goodput_core.errors import InternalError
from goodput_engine.core_client import CoreClient
from goodput_engine.messages import Configure, Submit

if TYPE_CHECKING:
    from goodput_engine.messages import StepOutputs

CONFIGURE = Configure(
    device="unit",
    policy="sarathi",
    preemption="recompute",
    token_budget=2048,
    min_token_budget=256,
    max_token_budget=8192,
    max_num_seqs=16,
    max_waiting=16,
)


async def test_an_idle_core_shows_that_it_lives_and_a_hanging_one_is_killed() -> None:
    beats: asyncio.Queue[StepOutputs] = asyncio.Queue()
    before = set(psutil.Process().children())
    client = await CoreClient.start(CONFIGURE, on_step=beats.put_nowait, silence_s=1.5)
    try:
        async with asyncio.timeout(20):
            await client.await_ready()
            for _ in range(2):  # over a longer time than it may be silent
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

"""Restarts of a dead engine core: clients, limits, counters, repeated deaths, and stops."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders.http import PATIENCE_S, connect, post_bytes
from tests.builders.serving import server_state, serving

from goodput_core.units import NS_PER_S
from goodput_engine.server.core_supervisor import RestartPolicy

if TYPE_CHECKING:
    from tests.engine.conftest import RunningEngine, StartEngine

LONG = {
    "model": "chat", "prompt": "hello", "max_tokens": 30_000, "ignore_eos": True, "stream": True,
}  # fmt: skip
SHORT = {"model": "chat", "prompt": "hello", "max_tokens": 2}


def cores(engine: RunningEngine) -> list[psutil.Process]:
    return psutil.Process(engine.process.pid).children()


def is_restarting(state: dict[str, Any]) -> bool:
    return bool(state["phase"] == "restarting")


async def serving_again(engine: RunningEngine, *, after: str) -> dict[str, Any]:
    """Wait until a core of another epoch serves; return the state."""
    return await engine.state_when(
        lambda state: state["phase"] == "serving" and state["epoch"] != after
    )


async def next_core(engine: RunningEngine, dead: psutil.Process) -> psutil.Process:
    """Wait until the process of the next core runs its own program.

    Before, it is a copy of the engine, which waits for the other program to start. If that copy is
    suspended, the engine acts on no signal, and the copy stays behind.
    """
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for core in cores(engine):
                with suppress(psutil.Error):  # it has ended
                    if core.pid != dead.pid and "goodput_engine.core.process" in core.cmdline():
                        return core
            await asyncio.sleep(0.01)


async def status_of(engine: RunningEngine, path: str) -> int:
    async with aiohttp.ClientSession(engine.url) as http, http.get(path) as response:
        return response.status


SECONDS = st.integers(0, 10_000)


@given(
    deaths=st.lists(SECONDS, min_size=1, max_size=30).map(sorted),
    restarts=st.integers(0, 10),
    within=st.integers(1, 2_000),
)
def test_restarts_are_limited_within_any_window_and_their_delays_double_up_to_a_bound(
    deaths: list[int], restarts: int, within: int
) -> None:
    policy = RestartPolicy(restarts=restarts, within_ns=within * NS_PER_S)
    recent = [at for at in deaths if at > deaths[-1] - within]
    delay = policy.delay_ns([at * NS_PER_S for at in deaths])
    if len(recent) > restarts:
        assert delay is None
    else:
        expected = policy.first_delay_ns * 2 ** (len(recent) - 1)
        assert delay == min(expected, 30 * NS_PER_S)


async def test_a_killed_core_is_replaced_and_the_limits_of_the_operator_survive(
    start_engine: StartEngine,
) -> None:
    engine = start_engine()
    before = await engine.state()
    assert (await engine.patch_limits({"revision": 3, "token_budget": 1024}))[0] == 200
    assert (await engine.patch_limits({"revision": 4, "max_num_seqs": 7}))[0] == 200
    async with aiohttp.ClientSession(engine.url) as http:
        async with http.post("/v1/completions", json=LONG) as running:
            await running.content.readline()
            waiting = asyncio.ensure_future(
                http.post("/v1/completions", json={**LONG, "stream": False})
            )
            await engine.state_when(lambda state: state["running"] == 2)
            cores(engine)[0].kill()
            await engine.state_when(is_restarting)
            assert await status_of(engine, "/health/live") == 200
            assert await status_of(engine, "/health/ready") == 503
            async with http.post("/v1/completions", json=SHORT) as refused:
                assert refused.status == 503
                assert int(refused.headers["Retry-After"]) >= 1
                assert "X-Goodput-Load" not in refused.headers
                assert (await refused.json())["error"]["code"] == "engine_restarting"
            rest = (await running.content.read()).decode()
        assert '"code":"engine_died"' in rest.splitlines()[-2]
        assert "[DONE]" not in rest
        async with await waiting as lost:
            assert lost.status == 503
            assert (await lost.json())["error"]["code"] == "engine_died"
        state = await serving_again(engine, after=before["epoch"])
        async with http.post("/v1/completions", json=SHORT) as response:
            assert response.status == 200
    state = await engine.state_when(lambda state: state["limits_revision"] == 4)
    assert (state["token_budget"], state["max_num_seqs"]) == (1024, 7)
    assert state["output_tokens"] <= 2, "the counters begin again"
    assert state["kv_free_blocks"] == state["kv_total_blocks"]
    assert (await engine.patch_limits({"revision": 4, "max_num_seqs": 5}))[0] == 409
    async with (
        aiohttp.ClientSession(engine.admin_url) as admin,
        admin.get("/metrics") as response,
    ):
        text = await response.text()
    (line,) = [one for one in text.splitlines() if one.startswith("goodput_engine_core_restarts_t")]
    assert line.endswith(" 1.0")
    log = engine.stderr()
    assert 'core died detail="the engine core ended by SIGKILL; see its log above"' in log
    assert "core restarted restarts=1" in log


async def test_a_request_that_is_uploaded_while_the_core_restarts_is_served_by_the_next_core(
    start_engine: StartEngine,
) -> None:
    engine = start_engine()
    before = await engine.state()
    request = post_bytes(json.dumps(SHORT).encode())
    async with connect(engine.url) as (reader, writer), asyncio.timeout(PATIENCE_S):
        writer.write(request[:-5])
        await engine.state_when(lambda state: state["in_flight"] == 1)
        cores(engine)[0].kill()
        await serving_again(engine, after=before["epoch"])
        writer.write(request[-5:])
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")


async def test_a_core_that_is_killed_while_it_starts_is_replaced_too(
    start_engine: StartEngine,
) -> None:
    engine = start_engine()
    before = await engine.state()
    first = cores(engine)[0]
    first.kill()
    second = await next_core(engine, first)
    second.kill()
    await serving_again(engine, after=before["epoch"])
    assert engine.stderr().count("core died ") == 2
    assert (await engine.state())["in_flight"] == 0
    async with (
        aiohttp.ClientSession(engine.url) as http,
        http.post("/v1/completions", json=SHORT) as response,
    ):
        assert response.status == 200


async def test_a_core_that_dies_too_often_ends_the_replica(start_engine: StartEngine) -> None:
    engine = start_engine("--core-restarts", "1")
    before = await engine.state()
    cores(engine)[0].kill()
    await serving_again(engine, after=before["epoch"])
    cores(engine)[0].kill()
    assert engine.wait() == 70
    (error,) = [line for line in engine.stderr().splitlines() if line.startswith("error: ")]
    assert error == (
        "error: the engine core died 2 times within 10 minutes, so it is not restarted; "
        "the last time: the engine core ended by SIGKILL; see its log above"
    )


@pytest.mark.parametrize("launched", [False, True], ids=["before", "during"])
async def test_sigterm_during_a_restart_leaves_no_process(
    start_engine: StartEngine, launched: bool
) -> None:
    engine = start_engine("--grace", "1h")
    first = cores(engine)[0]
    first.kill()
    second = None
    if launched:
        second = await next_core(engine, first)
        second.suspend()  # the start takes forever
    else:
        await engine.state_when(is_restarting)
    try:
        engine.signal(signal.SIGTERM)
        assert engine.wait() == 0
        if second is not None:
            second.wait(PATIENCE_S)
    finally:
        if second is not None and second.is_running():
            second.kill()
    assert "Traceback" not in engine.stderr()


async def test_liveness_fails_while_the_core_is_stopped_and_recovers() -> None:
    state = server_state()
    before = set(psutil.Process().children())
    async with (
        serving(state, silence_s=10) as url,
        aiohttp.ClientSession(url) as http,
        asyncio.timeout(PATIENCE_S),
    ):
        (core,) = set(psutil.Process().children()) - before

        async def until(status: int) -> None:
            while True:
                async with http.get("/health/live") as response:
                    if response.status == status:
                        return
                await asyncio.sleep(0.05)

        await until(200)
        core.send_signal(signal.SIGSTOP)
        await until(503)
        core.send_signal(signal.SIGCONT)
        await until(200)
        async with http.post("/v1/completions", json=SHORT) as response:
            assert response.status == 200

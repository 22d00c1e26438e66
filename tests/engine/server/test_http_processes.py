"""Several HTTP processes of an engine on one port count as one, and end as one."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
import pytest
from tests.builders.http import PATIENCE_S, connect, post_bytes
from tests.builders.manifests import manifest_text
from tests.builders.schedulers import make_configure
from tests.builders.serving import server_state
from tests.engine.conftest import EngineStarter

from goodput_core.errors import InternalError
from goodput_engine.core.build import build_core
from goodput_engine.core.process import serve
from goodput_engine.core.wire import core_reader, encode, front_reader
from goodput_engine.device.load import load_profile
from goodput_engine.messages import Drain, Ready, Rejected, StepOutputs, Submit
from goodput_engine.server import followers
from goodput_engine.server.followers import Followers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.builders.http import RawConnection
    from tests.engine.conftest import RunningEngine, StartEngine

LIMITS: dict[str, Any] = {"maxNumSeqs": 4, "maxWaiting": 8}
LONG = {
    "model": "chat", "prompt": "hello", "max_tokens": 30_000, "ignore_eos": True, "stream": True,
}  # fmt: skip
SHORT = {"model": "chat", "prompt": "hello", "max_tokens": 2}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """One engine with two HTTP processes for the tests that do not end it."""
    engines = EngineStarter(tmp_path_factory.mktemp("pair"))
    yield engines.start("--http-processes", "2", **LIMITS)
    engines.close()


def children(engine: RunningEngine, module: str) -> list[psutil.Process]:
    processes = psutil.Process(engine.process.pid).children()
    return [one for one in processes if f"goodput_engine.{module}" in one.cmdline()]


def follower_of(engine: RunningEngine) -> psutil.Process:
    """Return the process of the process that does not lead."""
    (follower,) = children(engine, "server.follower")
    return follower


def serves(process: psutil.Process, port: int) -> bool:
    """True if a process has the connection of a client with this port."""
    peers = [one.raddr for one in process.net_connections("tcp4") if one.status == "ESTABLISHED"]
    return any(peer.port == port for peer in peers)


@asynccontextmanager
async def connect_to(
    engine: RunningEngine, *, leads: bool, receive_bytes: int | None = None
) -> AsyncIterator[RawConnection]:
    """Open a connection to the leading process or to the other one; the kernel chooses."""
    process = psutil.Process(engine.process.pid) if leads else follower_of(engine)
    for _ in range(60):
        async with connect(engine.url, receive_bytes=receive_bytes) as (reader, writer):
            # After a response, the connection is accepted.
            writer.write(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b'{"status":"live"}')
            if serves(process, writer.get_extra_info("sockname")[1]):
                yield reader, writer
                return
    raise AssertionError("the kernel chose one process 60 times")


def post(writer: asyncio.StreamWriter, body: dict[str, Any], *headers: str) -> None:
    writer.write(post_bytes(json.dumps(body).encode(), *headers))


async def status(reader: asyncio.StreamReader) -> int:
    """Read the head and the body of a response with a length; return its status."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1])
        for line in head.lower().splitlines()
        if line.startswith(b"content-length")
    )
    await reader.readexactly(length)
    return int(head.split()[1])


async def rest(reader: asyncio.StreamReader) -> bytes:
    """Read the rest of a stream; return its last two events."""
    lines = [b"", b"", b"", b""]
    while lines[-2:] != [b"0\r\n", b"\r\n"]:
        line = await reader.readline()
        assert line, "the connection was closed"
        lines = [*lines[-9:], line]
    return b"".join(lines)


def totals(state: dict[str, Any]) -> tuple[int, int]:
    """Return the number of finished requests, and that of their output tokens."""
    return sum(row[0] for row in state["answered"]), sum(row[3] for row in state["answered"])


async def test_two_processes_return_the_text_of_one(
    engine: RunningEngine, pair: RunningEngine
) -> None:
    rng = random.Random(1)
    bodies = [
        {
            "model": "chat",
            "prompt": "word " * rng.randint(1, 50),
            "stream": rng.random() < 0.5,
            **({"max_tokens": rng.randint(1, 90)} if rng.random() < 0.5 else {}),
            **({"stop": ["quick"]} if rng.random() < 0.3 else {}),
        }
        for _ in range(16)
    ]

    async def texts(url: str) -> list[str]:
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(url, connector=connector) as http:
            return [await text(http, body) for body in bodies]

    async def text(http: aiohttp.ClientSession, body: dict[str, Any]) -> str:
        async with http.post("/v1/completions", json=body) as response:
            assert response.status == 200
            answer = await response.text()
        if not body["stream"]:
            choice = json.loads(answer)["choices"][0]
            return f"{choice['text']} {choice['finish_reason']}"
        events = [one.removeprefix("data: ") for one in answer.split("\n\n")]
        choices = [json.loads(one)["choices"][0] for one in events if one.startswith("{")]
        return f"{''.join(one['text'] for one in choices)} {choices[-1]['finish_reason']}"

    assert await texts(engine.url) == await texts(pair.url)


async def test_counts_are_summed_once_over_a_load_with_cancellations_and_rejections(
    pair: RunningEngine,
) -> None:
    before = await pair.state()
    rng = random.Random(2)
    outcomes: Counter[str] = Counter()

    async def request(http: aiohttp.ClientSession, tokens: int, *, cancels: bool) -> None:
        body = {**LONG, "max_tokens": tokens, "stream": cancels or tokens % 2 == 0}
        async with http.post("/v1/completions", json=body) as response:
            if response.status == 429:
                assert int(response.headers["Retry-After"]) >= 1
                outcomes["rejected"] += 1
            elif cancels:
                await response.content.readline()
                response.close()
            else:
                await response.read()
                outcomes["finished"] += 1
                outcomes["tokens"] += tokens

    async with (
        aiohttp.ClientSession(pair.url, connector=aiohttp.TCPConnector(force_close=True)) as http,
        asyncio.TaskGroup() as group,
    ):
        for number in range(60):
            cancels = number % 5 == 0
            tokens = 30_000 if cancels else rng.randint(20, 60)
            group.create_task(request(http, tokens, cancels=cancels))
            await asyncio.sleep(0)
    for leads in (True, False):
        async with connect_to(pair, leads=leads) as (reader, writer):
            post(writer, SHORT)
            assert await status(reader) == 200
            outcomes.update(finished=1, tokens=2)
    after = await pair.state_when(
        lambda state: state["in_flight"] == state["running"] == state["waiting"] == 0
    )
    finished, tokens = (new - old for new, old in zip(totals(after), totals(before), strict=True))
    assert (finished, tokens) == (outcomes["finished"], outcomes["tokens"])
    assert after["shed"] - before["shed"] == outcomes["rejected"]
    assert after["epoch"] == before["epoch"]
    assert after["kv_free_blocks"] == after["kv_total_blocks"]
    assert min(outcomes["rejected"], outcomes["finished"]) > 0


async def test_a_slow_client_of_one_process_delays_no_other(pair: RunningEngine) -> None:
    async with connect_to(pair, leads=False, receive_bytes=4096) as (_, slow):
        post(slow, LONG)
        await pair.state_when(lambda state: state["running"] == 1)
        for leads in (True, False):
            async with connect_to(pair, leads=leads) as (reader, writer):
                post(writer, SHORT)
                assert await status(reader) == 200
        assert (await pair.state())["in_flight"] == 1
    await pair.state_when(lambda state: state["in_flight"] == state["running"] == 0)


async def test_a_changed_manifest_and_a_restarted_core_reach_both_processes(
    pair: RunningEngine,
) -> None:
    before = await pair.state()
    classes = [{"name": "new", "ttftMs": 9_000, "tpotMs": 900}]
    async with (
        connect_to(pair, leads=True) as first,
        connect_to(pair, leads=False) as second,
        asyncio.timeout(PATIENCE_S),
    ):
        clients = (first, second)
        pair.log.with_suffix(".yaml").write_text(
            manifest_text("engine", slo__classes=classes), encoding="utf-8"
        )
        for reader, writer in clients:
            while True:
                post(writer, SHORT, "X-SLO-Class: new")
                if await status(reader) == 200:
                    break
                await asyncio.sleep(0.1)
        for _, writer in clients:
            post(writer, LONG)
        await pair.state_when(lambda state: state["running"] == 2)
        children(pair, "core.process")[0].kill()
        for reader, _ in clients:
            events = await rest(reader)
            assert b'"code":"engine_died"' in events
            assert b"[DONE]" not in events
        for reader, writer in clients:
            post(writer, SHORT)
            assert await status(reader) == 503
        after = await pair.state_when(
            lambda state: state["phase"] == "serving" and state["epoch"] != before["epoch"]
        )
        assert totals(after) == (0, 0)
        for reader, writer in clients:
            post(writer, SHORT, "X-SLO-Class: new")
            assert await status(reader) == 200
    assert totals(await pair.state()) == (2, 4)


async def test_a_killed_process_loses_its_requests_and_the_others_drain(
    start_engine: StartEngine,
) -> None:
    engine = start_engine("--http-processes", "2")
    async with (
        connect_to(engine, leads=True) as (reader, writer),
        connect_to(engine, leads=False) as (_, other),
        aiohttp.ClientSession(engine.admin_url) as admin,
        asyncio.timeout(PATIENCE_S),
    ):
        post(writer, {**LONG, "max_tokens": 2_000})
        post(other, LONG)
        await engine.state_when(lambda state: state["running"] == 2)
        follower_of(engine).kill()
        while True:  # the core has cancelled the lost request
            async with admin.get("/metrics") as response:
                lines = (await response.text()).splitlines()
            if any(
                one.startswith("goodput_engine_running_requests{") and one.endswith(" 1.0")
                for one in lines
            ):
                break
        async with admin.get("/control/state") as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == "process_lost"
        assert b"[DONE]" in await rest(reader)
    assert engine.wait() == 70
    (error,) = [line for line in engine.stderr().splitlines() if line.startswith("error: ")]
    assert error == ("error: an HTTP process of the engine ended by SIGKILL; see its log above")


async def test_a_drain_finishes_the_requests_of_all_processes(start_engine: StartEngine) -> None:
    engine = start_engine("--http-processes", "2")
    upload = post_bytes(json.dumps(SHORT).encode())
    async with (
        connect_to(engine, leads=True) as first,
        connect_to(engine, leads=False) as second,
        connect_to(engine, leads=True) as third,
        connect_to(engine, leads=False) as fourth,
        connect_to(engine, leads=False) as (upload_reader, upload_writer),
        asyncio.timeout(PATIENCE_S),
    ):
        for _, writer in (first, second):
            post(writer, {**LONG, "max_tokens": 2_000})
        upload_writer.write(upload[:-5])
        await engine.state_when(lambda s: s["running"] == 2 and s["in_flight"] == 3)
        engine.signal(signal.SIGTERM)
        await engine.state_when(lambda state: state["phase"] == "draining")
        for reader, writer in (third, fourth):
            post(writer, SHORT)
            assert await status(reader) == 503
        upload_writer.write(upload[-5:])
        assert await status(upload_reader) == 200
        for reader, _ in (first, second):
            assert b"[DONE]" in await rest(reader)
    assert engine.wait() == 0
    log = engine.stderr()
    assert "draining in_flight=3" in log
    assert "stopped cut_short=0" in log


async def test_no_process_survives_the_leader(start_engine: StartEngine) -> None:
    engine = start_engine("--http-processes", "2")
    processes = [follower_of(engine), *children(engine, "core.process")]
    async with connect_to(engine, leads=False) as (reader, writer), asyncio.timeout(PATIENCE_S):
        post(writer, LONG)
        await reader.readuntil(b"data: ")
        engine.process.kill()
        assert b'data: {"error"' in await reader.read()
    assert not psutil.wait_procs(processes, PATIENCE_S)[1]


async def test_a_process_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "_REPORT_S", 0.1)
    processes = Followers(2)
    before = set(psutil.Process().children())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = replace(server_state().settings, port=port, http_processes=2)
    config = settings.configure
    ready = Ready(
        device="unit",
        vocab_size=1,
        max_model_tokens=1,
        state=build_core(config, load_profile(config.device)).state(0),
    )
    await processes.start(settings)
    ours, theirs = socket.socketpair()
    try:
        (follower,) = set(psutil.Process().children()) - before
        async with asyncio.timeout(PATIENCE_S):
            await processes.serve([theirs], ready, "epoch")
            assert await processes.in_flight() == 0
            follower.suspend()
            await processes.ended
        with pytest.raises(InternalError, match="was silent for 0"):
            processes.require_running()
    finally:
        ours.close()
        await processes.close()


def test_the_core_sends_each_process_its_own_outputs_and_cancels_those_of_an_ended_one() -> None:
    config = make_configure()
    core = build_core(config, load_profile(config.device))
    pairs = [socket.socketpair() for _ in range(3)]
    leader, second, third = (ours for ours, _ in pairs)
    for _, theirs in pairs:
        theirs.setblocking(False)
    second.sendall(encode(Submit(rid=1, arrival_ns=0, input_tokens=10)))
    third.sendall(encode(Submit(rid=2, arrival_ns=0, input_tokens=10)))
    leader.sendall(encode(Submit(rid=3, arrival_ns=0, input_tokens=10)) + encode(Drain()))
    now_ns = 0

    def clock() -> int:
        nonlocal now_ns
        now_ns += 1_000_000
        if now_ns == 40_000_000:
            third.close()
        if now_ns == 80_000_000:
            leader.shutdown(socket.SHUT_WR)
        return now_ns

    serve(pairs[0][1], core, [], front_reader(), clock, others=[pairs[1][1], pairs[2][1]])
    for one, rid in ((leader, 3), (second, 1)):
        messages = core_reader().feed(one.recv(1 << 20))
        assert not any(isinstance(message, Rejected) for message in messages)
        steps = [message for message in messages if isinstance(message, StepOutputs)]
        assert {output.rid for step in steps for output in step.outputs} == {rid}
        assert max(step.state.running for step in steps) == 3
        assert steps[-1].state.running == 2
    for ours, theirs in pairs:
        ours.close()
        theirs.close()

"""A replica's life: drain, disconnects, overload, deaths, and how it refuses to start."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import socket
import subprocess
import sys
import time
from importlib import resources
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
import pytest
from tests.engine.conftest import manifest_text

from goodput_core.contract import HEADER_LOAD

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from tests.engine.conftest import RunEngine, RunningEngine, StartEngine

PATIENCE_S = 20.0
# Thirty seconds of the device's time, unless something ends it.
LONG = {
    "model": "chat", "prompt": "hello", "max_tokens": 30_000, "ignore_eos": True, "stream": True,
}  # fmt: skip


def long(**fields: Any) -> dict[str, Any]:
    return {**LONG, **fields}


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: {"):
            event: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
            yield event


async def state_when(
    engine: RunningEngine, holds: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """The engine's state, once `holds` is true of it."""
    async with aiohttp.ClientSession(engine.admin_url) as admin, asyncio.timeout(PATIENCE_S):
        while True:
            async with admin.get("/control/state") as response:
                state: dict[str, Any] = await response.json()
            if holds(state):
                return state


def core_of(engine: RunningEngine) -> psutil.Process:
    (core,) = psutil.Process(engine.process.pid).children()
    return core


def assert_gone(process: psutil.Process) -> None:
    """It ends by itself."""
    process.wait(PATIENCE_S)


async def test_a_client_that_leaves_mid_stream_frees_what_it_held(
    start_engine: StartEngine,
) -> None:
    engine = start_engine()
    async with aiohttp.ClientSession(engine.url) as http:
        async with http.post("/v1/completions", json=long(prompt="w " * 1000)) as response:
            await anext(events(response))
            state = await state_when(engine, lambda state: state["running"] == 1)
            assert state["kv_free_blocks"] < state["kv_total_blocks"]
            response.close()
        idle = await state_when(
            engine, lambda state: state["running"] == 0 and state["in_flight"] == 0
        )
    assert idle["kv_free_blocks"] == idle["kv_total_blocks"]
    assert idle["output_tokens"] < 30_000


async def test_a_client_that_leaves_before_its_whole_answer_frees_what_it_held(
    start_engine: StartEngine,
) -> None:
    engine = start_engine()
    async with aiohttp.ClientSession(engine.url) as http:
        waiting = asyncio.ensure_future(http.post("/v1/completions", json=long(stream=False)))
        await state_when(engine, lambda state: state["running"] == 1)
        waiting.cancel()
        await state_when(engine, lambda state: state["running"] == 0 and state["in_flight"] == 0)


async def test_a_stop_string_frees_what_the_request_held(start_engine: StartEngine) -> None:
    engine = start_engine()
    async with aiohttp.ClientSession(engine.url) as http:
        async with http.post("/v1/completions", json=long(stop="over a")) as response:
            texts = [event["choices"][0]["text"] async for event in events(response)]
        assert "".join(texts) == "the quick brown fox jumps "
        state = await state_when(engine, lambda state: state["running"] == 0)
    assert state["output_tokens"] < 1000


async def test_overload_is_refused_at_once_and_ends_with_the_load(
    start_engine: StartEngine,
) -> None:
    engine = start_engine(maxNumSeqs=1, maxWaiting=0)
    async with aiohttp.ClientSession(engine.url) as http:
        async with http.post("/v1/completions", json=LONG) as running:
            await anext(events(running))
            for stream in (True, False):
                began = time.monotonic()
                async with http.post("/v1/completions", json=long(stream=stream)) as refused:
                    body = await refused.json()
                assert refused.status == 429
                assert int(refused.headers["Retry-After"]) >= 1
                assert json.loads(refused.headers[HEADER_LOAD])["saturated"] is True
                assert body["error"]["code"] == "rate_limit_exceeded"
                # It did not wait for the answer before it.
                assert time.monotonic() - began < 5
            state = await state_when(engine, lambda state: state["shed"] == 2)
            assert state["saturated"] is True
        await state_when(engine, lambda state: state["running"] == 0)
        async with http.post("/v1/completions", json=long(max_tokens=2)) as response:
            assert response.status == 200


async def test_a_promise_that_cannot_be_kept_is_refused_at_the_door(
    start_engine: StartEngine,
) -> None:
    engine = start_engine(policy="slo", maxNumSeqs=2)
    async with aiohttp.ClientSession(engine.url) as http:
        before = [
            asyncio.ensure_future(http.post("/v1/completions", json=long(stream=False)))
            for _ in range(3)
        ]
        await state_when(engine, lambda state: state["running"] == 2 and state["waiting"] == 1)
        # Twenty thousand tokens take ten steps, and there is a millisecond for them.
        hopeless = long(prompt=[7] * 20_000, max_tokens=1)
        promise = {"X-SLO-TTFT-Ms": "1"}
        async with http.post("/v1/completions", json=hopeless, headers=promise) as refused:
            body = await refused.json()
        assert refused.status == 429
        assert int(refused.headers["Retry-After"]) >= 1
        assert "the promised time to the first token" in body["error"]["message"]
        assert body["error"]["code"] == "rate_limit_exceeded"
        state = await state_when(engine, lambda state: state["shed"] == 1)
        assert not state["saturated"], "the queue has room: another policy would have let it in"
        for answer in before:
            answer.cancel()


async def test_sigterm_lets_answers_finish_and_lets_nothing_in(start_engine: StartEngine) -> None:
    engine = start_engine()
    core = core_of(engine)
    async with (
        aiohttp.ClientSession(engine.url) as http,
        http.post("/v1/completions", json=long(max_tokens=1500)) as running,
    ):
        stream = events(running)
        texts = [(await anext(stream))["choices"][0]["text"]]
        engine.signal(signal.SIGTERM)
        await state_when(engine, lambda state: state["draining"])
        async with http.get("/health/ready") as ready:
            assert ready.status == 503
        async with http.get("/health/live") as live:
            assert live.status == 200
        async with http.post("/v1/completions", json=LONG) as refused:
            assert refused.status == 503
            assert int(refused.headers["Retry-After"]) >= 1
            assert (await refused.json())["error"]["code"] == "draining"
        last: dict[str, Any] = {}
        async for last in stream:
            texts.append(last["choices"][0]["text"])
    assert last["choices"][0]["finish_reason"] == "length"
    assert len("".join(texts).split()) == 1500
    assert engine.wait() == 0
    assert_gone(core)
    assert "Traceback" not in engine.stderr()


async def test_the_end_of_the_grace_period_is_an_error_event(start_engine: StartEngine) -> None:
    engine = start_engine("--grace", "50ms")
    async with (
        aiohttp.ClientSession(engine.url) as http,
        http.post("/v1/completions", json=LONG) as running,
    ):
        stream = events(running)
        await anext(stream)
        engine.signal(signal.SIGTERM)
        seen = [event async for event in stream]
    assert seen[-1]["error"]["code"] == "draining"
    assert engine.wait() == 0
    assert "cut_short=1" in engine.stderr()


async def test_a_second_sigterm_ends_at_once(start_engine: StartEngine) -> None:
    engine = start_engine("--grace", "1h")
    async with (
        aiohttp.ClientSession(engine.url) as http,
        http.post("/v1/completions", json=LONG) as running,
    ):
        stream = events(running)
        await anext(stream)
        engine.signal(signal.SIGTERM)
        await state_when(engine, lambda state: state["draining"])
        engine.signal(signal.SIGTERM)
        seen = [event async for event in stream]
    assert "error" in seen[-1]
    assert engine.wait() == 130


async def test_clients_and_the_shell_learn_of_a_dead_core(
    start_engine: StartEngine,
) -> None:
    engine = start_engine()
    async with (
        aiohttp.ClientSession(engine.url) as http,
        http.post("/v1/completions", json=LONG) as running,
    ):
        stream = events(running)
        await anext(stream)
        waiting = asyncio.ensure_future(http.post("/v1/completions", json=long(stream=False)))
        await state_when(engine, lambda state: state["running"] == 2)
        core_of(engine).kill()
        seen = [event async for event in stream]
        assert seen[-1]["error"]["code"] == "engine_died"
        async with await waiting as refused:
            assert refused.status == 503
    assert engine.wait() == 70
    errors = [line for line in engine.stderr().splitlines() if line.startswith("error: ")]
    assert errors == ["error: the engine core ended by SIGKILL; see its log above"]


@pytest.mark.parametrize(
    "sent",
    [
        b"secret\r\n\r\n",
        b"GET /v1/\xff HTTP/1.1\r\nHost: secret\r\n\r\n",
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\n"
            b"Content-Length: 6\r\n\r\nsecret"
        ),
    ],
    ids=["no HTTP", "a bad path", "a bad encoding"],
)
def test_what_is_no_request_is_400_and_leaves_no_line(
    start_engine: StartEngine, sent: bytes
) -> None:
    engine = start_engine()
    host, port = engine.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as client:
        client.sendall(sent)
        assert b" 400 Bad Request" in client.recv(1024)
    engine.signal(signal.SIGTERM)
    assert engine.wait() == 0
    events = [line.split(" ")[2] for line in engine.stderr().splitlines()]
    assert events == ["listening", "draining", "stopped"]


def test_the_core_does_not_outlive_a_killed_front(start_engine: StartEngine) -> None:
    engine = start_engine()
    core = core_of(engine)
    engine.signal(signal.SIGKILL)
    assert_gone(core)


def test_an_engine_ends_with_its_parent_when_asked(start_engine: StartEngine) -> None:
    engine = start_engine("--exit-with-parent")
    assert engine.process.stdin is not None
    engine.process.stdin.close()
    assert engine.wait() == 130


BROKEN_FOLLOWING = """
import sys
from goodput_core.dispatch import run_command
from goodput_engine.server import lifecycle

async def broken(*_):
    raise LookupError('a bug')

if __name__ == "__main__":
    lifecycle.watch_manifest = broken
    sys.exit(run_command(sys.argv[1:]))
"""


def test_an_engine_ends_when_it_follows_its_manifest_no_more(tmp_path: Path) -> None:
    program, manifest = tmp_path / "broken.py", tmp_path / "chat.yaml"
    program.write_text(BROKEN_FOLLOWING)
    manifest.write_text(manifest_text())
    ended = subprocess.run(
        [sys.executable, program, "engine", "-f", manifest, "--port", "0"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    line = sentence(ended, 70)
    assert line.startswith("error: internal error: LookupError: a bug; ")


def test_one_line_of_json_says_where_it_listens(engine: RunningEngine) -> None:
    assert engine.listening == {
        "event": "listening",
        "url": engine.url,
        "admin_url": engine.admin_url,
        "pid": engine.process.pid,
    }


def sentence(result: subprocess.CompletedProcess[str], code: int) -> str:
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in result.stderr
    return line


def test_real_weights_need_a_device_and_the_profiles_are_listed(run_engine: RunEngine) -> None:
    error = sentence(run_engine(source="hf://Qwen/Qwen3-8B"), 64)
    assert "chat.yaml: spec.model.source: torch execution is not implemented yet" in error
    assert "llama-3-8b-h100, " in error


@pytest.mark.parametrize(
    ("options", "manifest", "part"),
    [
        pytest.param([], {"source": "emulated://uni"}, "spec.model.source: no device", id="source"),
        pytest.param(["--device", "uni"], {}, "--device: no device profile", id="device"),
        pytest.param(
            [], {"policy": "fifo"}, "spec.engine.policy: must be one of request, s", id="policy"
        ),
        pytest.param([], {"polic": "orca"}, "spec.engine.polic: unknown field", id="field"),
        pytest.param(["--admin-port", "70000"], {}, "is not a port", id="a port"),
        pytest.param(["--grace", "30"], {}, "is not a duration", id="grace"),
        pytest.param(["--name", "a\nb"], {}, "--name must be 1 to 253 visible", id="a name"),
        pytest.param(["-f", "/nowhere.yaml"], {}, "/nowhere.yaml: cannot be read", id="no file"),
        pytest.param(["-f", "/dev/null"], {}, "is not a regular file", id="a device"),
        pytest.param(["--host", "no.such.host.invalid"], {}, "cannot listen on", id="a host"),
    ],
)
def test_what_cannot_be_started_is_one_sentence(
    run_engine: RunEngine, options: list[str], manifest: dict[str, Any], part: str
) -> None:
    assert part in sentence(run_engine(*options, **manifest), 64)


def test_a_profile_of_two_devices_cannot_stand_for_one(
    run_engine: RunEngine, tmp_path: Path
) -> None:
    profile = resources.files("goodput_engine.device").joinpath("profiles/unit.yaml").read_text()
    pair = tmp_path / "pair.yaml"
    pair.write_text(profile.replace("tensor_parallel: {value: 1", "tensor_parallel: {value: 2"))
    error = sentence(run_engine("--device", str(pair)), 64)
    assert "spec.engine.tensorParallel: is 1, but the device profile unit is for 2" in error


def test_a_device_may_replace_real_weights(start_engine: StartEngine) -> None:
    assert start_engine("--device", "unit", source="hf://Qwen/Qwen3-8B").url


@pytest.mark.parametrize(
    ("device", "devices", "warnings"),
    [("published-70b-table", 4, 1), ("llama-3-70b-4xh100", 4, 0)],
    ids=["illustrative", "arithmetic"],
)
def test_an_illustrative_device_is_said_to_be_one(
    device: str, devices: int, warnings: int, start_engine: StartEngine
) -> None:
    engine = start_engine(source=f"emulated://{device}", tensorParallel=devices)
    assert engine.stderr().count(f" WARNING illustrative device device={device} ") == warnings


def test_a_port_in_use_is_one_sentence(run_engine: RunEngine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        error = sentence(run_engine("--admin-port", port), 64)
    assert f"cannot listen on 127.0.0.1:{port}: address already in use" in error.lower()


async def test_a_request_that_is_being_uploaded_when_the_drain_begins_is_served(
    start_engine: StartEngine,
) -> None:
    engine = start_engine()
    host, _, port = engine.url.removeprefix("http://").partition(":")
    body = json.dumps({"model": "chat", "prompt": "hello", "max_tokens": 3}).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body[:5])
    await state_when(engine, lambda state: state["in_flight"] == 1)
    engine.signal(signal.SIGTERM)
    await state_when(engine, lambda state: state["phase"] == "draining")
    writer.write(body[5:])
    async with asyncio.timeout(PATIENCE_S):
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
    assert engine.wait() == 0


async def test_an_engine_raises_its_limit_of_open_files(start_engine: StartEngine) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        engine = start_engine()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    limits = psutil.Process(engine.process.pid).rlimit(psutil.RLIMIT_NOFILE)
    assert limits == (hard, hard)


async def test_half_sent_heads_shut_out_neither_requests_nor_the_admin_port(
    start_engine: StartEngine,
) -> None:
    engine = start_engine("--max-connections", "50", "--head-timeout", "10m")
    host, _, port = engine.url.removeprefix("http://").partition(":")
    writers = []
    for _ in range(200):
        _reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        writers.append(writer)
    async with (
        asyncio.timeout(PATIENCE_S),
        aiohttp.ClientSession(engine.url) as http,
        http.post("/v1/completions", json={**LONG, "max_tokens": 2}) as response,
    ):
        assert response.status == 200
    assert (await state_when(engine, lambda state: True))["phase"] == "serving"
    assert "connections limited" in engine.stderr()
    for writer in writers:
        writer.close()

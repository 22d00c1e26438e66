"""Lifecycle of a replica: start, disconnects, overload, drain, and failures."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from importlib import resources
from statistics import median
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
import pytest
from tests.builders.http import PATIENCE_S, connect, post_bytes
from tests.engine.conftest import manifest_text

from goodput_core.contract import HEADER_LOAD

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.engine.conftest import RunEngine, RunningEngine, StartEngine

# Thirty seconds of device time.
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


def core_of(engine: RunningEngine) -> psutil.Process:
    (core,) = psutil.Process(engine.process.pid).children()
    return core


def assert_gone(process: psutil.Process) -> None:
    """Wait until the process ends by itself."""
    process.wait(PATIENCE_S)


async def test_a_client_that_disconnects_during_a_stream_frees_its_blocks(
    start_engine: StartEngine,
) -> None:
    engine = start_engine()
    async with aiohttp.ClientSession(engine.url) as http:
        async with http.post("/v1/completions", json=long(prompt="w " * 1000)) as response:
            await anext(events(response))
            state = await engine.state_when(lambda state: state["running"] == 1)
            assert state["kv_free_blocks"] < state["kv_total_blocks"]
            response.close()
        idle = await engine.state_when(
            lambda state: state["running"] == 0 and state["in_flight"] == 0
        )
    assert idle["kv_free_blocks"] == idle["kv_total_blocks"]
    assert idle["output_tokens"] < 30_000


async def test_a_client_that_disconnects_before_its_response_ends_its_request(
    start_engine: StartEngine,
) -> None:
    engine = start_engine()
    async with aiohttp.ClientSession(engine.url) as http:
        waiting = asyncio.ensure_future(http.post("/v1/completions", json=long(stream=False)))
        await engine.state_when(lambda state: state["running"] == 1)
        waiting.cancel()
        await engine.state_when(lambda state: state["running"] == 0 and state["in_flight"] == 0)


async def test_a_stop_string_ends_the_request(start_engine: StartEngine) -> None:
    engine = start_engine()
    async with aiohttp.ClientSession(engine.url) as http:
        async with http.post("/v1/completions", json=long(stop="over a")) as response:
            texts = [event["choices"][0]["text"] async for event in events(response)]
        assert "".join(texts) == "the quick brown fox jumps "
        state = await engine.state_when(lambda state: state["running"] == 0)
    assert state["output_tokens"] < 1000


async def test_under_overload_requests_get_429_at_once_until_the_load_ends(
    start_engine: StartEngine,
) -> None:
    engine = start_engine(maxNumSeqs=1, maxWaiting=0)
    async with aiohttp.ClientSession(engine.url) as http:
        async with http.post("/v1/completions", json=LONG) as running:
            await anext(events(running))
            for stream in (True, False):
                began = time.monotonic()
                async with http.post("/v1/completions", json=long(stream=stream)) as rejected:
                    body = await rejected.json()
                assert rejected.status == 429
                assert int(rejected.headers["Retry-After"]) >= 1
                assert json.loads(rejected.headers[HEADER_LOAD])["saturated"] is True
                assert body["error"]["code"] == "rate_limit_exceeded"
                # The response does not wait for the running request.
                assert time.monotonic() - began < 5
            state = await engine.state_when(lambda state: state["shed"] == 2)
            assert state["saturated"] is True
        await engine.state_when(lambda state: state["running"] == 0)
        async with http.post("/v1/completions", json=long(max_tokens=2)) as response:
            assert response.status == 200


async def test_the_policy_slo_rejects_a_request_that_would_miss_its_ttft_target(
    start_engine: StartEngine,
) -> None:
    engine = start_engine(policy="slo", maxNumSeqs=2)
    async with aiohttp.ClientSession(engine.url) as http:
        before = [
            asyncio.ensure_future(http.post("/v1/completions", json=long(stream=False)))
            for _ in range(2)
        ]
        # No third: `slo` refuses a request that waits if a busy machine stretches the steps.
        await engine.state_when(lambda state: state["running"] == 2)
        # Twenty thousand tokens take ten steps, and there is a millisecond for them.
        hopeless = long(prompt=[7] * 20_000, max_tokens=1)
        promise = {"X-SLO-TTFT-Ms": "1"}
        async with http.post("/v1/completions", json=hopeless, headers=promise) as rejected:
            body = await rejected.json()
        assert rejected.status == 429
        assert int(rejected.headers["Retry-After"]) >= 1
        assert "cannot meet the latency targets" in body["error"]["message"]
        assert body["error"]["code"] == "rate_limit_exceeded"
        state = await engine.state_when(lambda state: state["shed"] == 1)
        assert not state["saturated"], "the queue has room: another policy would have let it in"
        for answer in before:
            answer.cancel()


async def test_sigterm_finishes_running_requests_and_rejects_new_ones(
    start_engine: StartEngine,
) -> None:
    engine = start_engine()
    core = core_of(engine)
    async with (
        aiohttp.ClientSession(engine.url) as http,
        http.post("/v1/completions", json=long(max_tokens=1500)) as running,
    ):
        stream = events(running)
        texts = [(await anext(stream))["choices"][0]["text"]]
        engine.signal(signal.SIGTERM)
        await engine.state_when(lambda state: state["draining"])
        async with http.get("/health/ready") as ready:
            assert ready.status == 503
        async with http.get("/health/live") as live:
            assert live.status == 200
        async with http.post("/v1/completions", json=LONG) as rejected:
            assert rejected.status == 503
            assert int(rejected.headers["Retry-After"]) >= 1
            assert (await rejected.json())["error"]["code"] == "draining"
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
        await engine.state_when(lambda state: state["draining"])
        engine.signal(signal.SIGTERM)
        seen = [event async for event in stream]
    assert "error" in seen[-1]
    assert engine.wait() == 130


async def test_a_dead_core_is_reported_to_clients_and_by_the_exit_code(
    start_engine: StartEngine,
) -> None:
    engine = start_engine("--core-restarts", "0")
    async with (
        aiohttp.ClientSession(engine.url) as http,
        http.post("/v1/completions", json=LONG) as running,
    ):
        stream = events(running)
        await anext(stream)
        waiting = asyncio.ensure_future(http.post("/v1/completions", json=long(stream=False)))
        await engine.state_when(lambda state: state["running"] == 2)
        core_of(engine).kill()
        seen = [event async for event in stream]
        assert seen[-1]["error"]["code"] == "engine_died"
        async with await waiting as rejected:
            assert rejected.status == 503
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
def test_a_malformed_request_is_400_and_is_not_logged(
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


def test_the_core_ends_with_a_killed_http_process(start_engine: StartEngine) -> None:
    engine = start_engine()
    core = core_of(engine)
    engine.signal(signal.SIGKILL)
    assert_gone(core)


def test_an_engine_ends_with_its_parent_if_the_option_is_set(start_engine: StartEngine) -> None:
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


def test_an_engine_ends_if_the_watch_of_its_manifest_fails(tmp_path: Path) -> None:
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


def test_one_line_of_json_has_its_urls(engine: RunningEngine) -> None:
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


@pytest.mark.parametrize(
    ("options", "manifest", "part"),
    [
        pytest.param([], {"source": "emulated://uni"}, "spec.model.source: no device", id="source"),
        pytest.param(["--device", "uni"], {}, "--device: no device profile", id="device"),
        pytest.param(
            [], {"policy": "fifo"}, "spec.engine.policy: must be one of request, s", id="policy"
        ),
        pytest.param(
            [],
            {"tokenBudget": {"min": 8}},
            "spec.engine.tokenBudget.min: is 8, less than one KV block of the device profile unit; "
            "set at least 16",
            id="a budget below one block",
        ),
        pytest.param([], {"polic": "orca"}, "spec.engine.polic: unknown field", id="field"),
        pytest.param(["--core-restarts", "-1"], {}, "is not a number of", id="restarts"),
        pytest.param(["--admin-port", "70000"], {}, "is not a port", id="a port"),
        pytest.param(["--grace", "30"], {}, "is not a duration", id="grace"),
        pytest.param(["--name", "a\nb"], {}, "--name must be 1 to 253 visible", id="a name"),
        pytest.param(
            ["--threads", "2"], {}, "--threads applies to a real model, but an", id="a model option"
        ),
        pytest.param(
            ["--allow-remote-code"],
            {"source": "hf://Qwen/Qwen3-8B"},
            "--allow-remote-code applies to a folder of this machine, not to Qwen/Qwen3-8B; dow",
            id="code of the Hub",
        ),
        pytest.param(["--memory-utilization", "96%"], {}, "in 1 to 95", id="too much memory"),
        pytest.param(["--memory-utilization", "0.5"], {}, "for example 50%", id="no percentage"),
        pytest.param(
            ["--dtype", "int4"],
            {},
            "invalid choice: 'int4' (choose from 'float32', 'float64'",
            id="a data type",
        ),
        pytest.param(
            [], {"source": "file://chat"}, "'chat' is not an absolute path", id="a relative folder"
        ),
        pytest.param(
            [],
            {"source": "pvc://weights/chat"},
            "spec.model.source: pvc://weights/chat is a volume of a cluster; give the model's path",
            id="a claim",
        ),
        pytest.param(
            ["--model-path", "/nowhere"],
            {"source": "pvc://weights/chat"},
            "/nowhere",
            id="no folder",
        ),
        pytest.param(
            ["--model-path", "/chat", "--device", "unit"],
            {},
            "--device and --model-path exclude each other",
            id="two sources",
        ),
        pytest.param(
            ["--block-size", "128"],
            {"source": "file:///chat"},
            "spec.engine.tokenBudget.min: is 64, less than one KV block; set at least 128",
            id="large blocks",
        ),
        pytest.param(
            ["--attention", "flash-attn"],
            {"source": "file:///chat"},
            "spec.engine.tokenBudget.min: is 64, less than one KV block; set at least 256",
            id="the blocks of flash-attn",
        ),
        pytest.param(
            ["--attention", "flash-attn", "--block-size", "128"],
            {"source": "file:///chat"},
            "--block-size: is 128, but flash-attn needs a multiple of 256; set 256, or select",
            id="blocks that flash-attn cannot read",
        ),
        pytest.param(["-f", "/nowhere.yaml"], {}, "/nowhere.yaml: no such file", id="no file"),
        pytest.param(["-f", "/dev/null"], {}, "is not a regular file", id="a device"),
        pytest.param(["--host", "no.such.host.invalid"], {}, "cannot listen on", id="a host"),
    ],
)
def test_an_engine_that_cannot_start_prints_one_sentence(
    run_engine: RunEngine, options: list[str], manifest: dict[str, Any], part: str
) -> None:
    assert part in sentence(run_engine(*options, **manifest), 64)


def test_a_profile_of_two_devices_is_rejected_for_one(
    run_engine: RunEngine, tmp_path: Path
) -> None:
    profile = resources.files("goodput_engine.device").joinpath("profiles/unit.yaml").read_text()
    pair = tmp_path / "pair.yaml"
    pair.write_text(profile.replace("tensor_parallel: {value: 1", "tensor_parallel: {value: 2"))
    error = sentence(run_engine("--device", str(pair)), 64)
    assert "spec.engine.tensorParallel: is 1, but the device profile unit has 2" in error


@pytest.mark.parametrize("blocks", [1, 20, 31])
def test_a_device_whose_memory_holds_no_request_is_rejected(
    run_engine: RunEngine, tmp_path: Path, blocks: int
) -> None:
    profile = resources.files("goodput_engine.device").joinpath("profiles/unit.yaml").read_text()
    small = tmp_path / "small.yaml"
    small.write_text(profile.replace("{value: 4096, from", f"{{value: {blocks}, from"))
    error = sentence(run_engine("--device", str(small)), 64)
    assert error == (
        f"error: {small}: {blocks} KV blocks of 16 tokens hold {16 * blocks} tokens, too few for "
        "one request; the memory must hold 512, or the complete context if that is shorter; raise "
        "kv_blocks of the device profile, or lower max_model_tokens"
    )


def test_a_device_may_replace_real_weights(start_engine: StartEngine) -> None:
    assert start_engine("--device", "unit", source="hf://Qwen/Qwen3-8B").url


@pytest.mark.parametrize(
    ("device", "devices", "warnings"),
    [("published-70b-table", 4, 1), ("llama-3-70b-4xh100", 4, 0)],
    ids=["illustrative", "arithmetic"],
)
def test_a_warning_names_an_illustrative_device(
    device: str, devices: int, warnings: int, start_engine: StartEngine
) -> None:
    engine = start_engine(source=f"emulated://{device}", tensorParallel=devices)
    assert engine.stderr().count(f" WARNING illustrative device device={device} ") == warnings


def test_a_port_in_use_is_one_sentence(run_engine: RunEngine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        error = sentence(run_engine("--admin-port", port), 64)
    assert f"cannot listen on 127.0.0.1:{port}: address already in use" in error.lower()


async def test_a_request_that_is_uploaded_during_a_drain_is_served(
    start_engine: StartEngine,
) -> None:
    engine = start_engine()
    body = {"model": "chat", "prompt": "hello", "max_tokens": 3}
    request = post_bytes(json.dumps(body).encode())
    async with connect(engine.url) as (reader, writer), asyncio.timeout(PATIENCE_S):
        writer.write(request[:-5])
        await engine.state_when(lambda state: state["in_flight"] == 1)
        engine.signal(signal.SIGTERM)
        await engine.state_when(lambda state: state["phase"] == "draining")
        writer.write(request[-5:])
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
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


async def test_incomplete_heads_block_neither_requests_nor_the_admin_port(
    start_engine: StartEngine,
) -> None:
    engine = start_engine("--max-connections", "50", "--head-timeout", "10m")
    async with AsyncExitStack() as stack:
        for _ in range(200):
            _reader, writer = await stack.enter_async_context(connect(engine.url))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        async with (
            asyncio.timeout(PATIENCE_S),
            aiohttp.ClientSession(engine.url) as http,
            http.post("/v1/completions", json={**LONG, "max_tokens": 2}) as response,
        ):
            assert response.status == 200
        assert (await engine.state())["phase"] == "serving"
        assert "connections limited" in engine.stderr()


async def test_ten_thousand_open_connections_do_not_delay_the_first_token(
    start_engine: StartEngine,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(10_000, hard - 1_000)
    engine = start_engine("--max-connections", str(count + 100))
    host, port = engine.url.removeprefix("http://").split(":")

    async def first_token_s(http: aiohttp.ClientSession) -> float:
        began = time.perf_counter()
        async with http.post("/v1/completions", json={**LONG, "max_tokens": 1}) as response:
            assert response.status == 200
            await response.content.readline()
        return time.perf_counter() - began

    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    opened: list[socket.socket] = []
    try:
        async with asyncio.timeout(4 * PATIENCE_S), aiohttp.ClientSession(engine.url) as http:
            alone = [await first_token_s(http) for _ in range(40)]
            during: list[float] = []
            while len(opened) < count:
                opened += [socket.create_connection((host, int(port))) for _ in range(200)]
                during.append(await first_token_s(http))
            beside = [await first_token_s(http) for _ in range(40)]
        closed = sum(1 for one in opened if is_closed(one))
    finally:
        for one in opened:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert closed == 0
    # Generous, because other processes of the machine delay both.
    limit_s = 4 * median(alone) + 0.02
    assert median(during) < limit_s
    assert median(beside) < limit_s


def is_closed(connection: socket.socket) -> bool:
    """True if the other side has closed a connection on which nothing was sent."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False

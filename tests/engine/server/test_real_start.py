"""`goodput engine` on a real model before it is ready: its weights, its threads, and its 503."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
import pytest

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

from tests.builders.http import PATIENCE_S
from tests.builders.hubs import COMMIT, REPO, open_hub
from tests.builders.torch_models import Outputs, make_folder
from tests.engine.conftest import engine_command, manifest_text

from goodput_core.contract import PATH_LIVE, PATH_MODELS, PATH_READY
from goodput_engine.messages import ExecutorInput, Submit

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.conftest import RunEngine, StartEngine

pytestmark = pytest.mark.torch

PROMPT = [3, 14, 15, 92, 6]
BODY = {"model": "chat", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
URL = "/v1/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer."""
    return make_folder(tmp_path_factory.mktemp("tiny"), "Llama")


def expected_ids(folder: Path) -> list[int]:
    """Return the ids of the output of `BODY`."""
    submit = Submit(
        rid=0,
        arrival_ns=0,
        input_tokens=len(PROMPT),
        max_output_tokens=8,
        executor=ExecutorInput(token_ids=PROMPT, ignore_eos=True),
    )
    return Outputs(folder, "float32").of(submit)[0]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def completion(http: aiohttp.ClientSession) -> tuple[int, dict[str, Any]]:
    async with http.post(URL, json=BODY) as response:
        return response.status, await response.json()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


async def core_of(engine: asyncio.subprocess.Process) -> psutil.Process:
    """Wait for the core process, which has not loaded the model yet."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for child in psutil.Process(engine.pid).children():
                with suppress(psutil.Error):
                    # Before, it is a copy of the engine, which must not be suspended.
                    if "goodput_engine.core.process" in child.cmdline():
                        return child
            await asyncio.sleep(0.01)


async def test_requests_get_503_until_the_weights_are_loaded(folder: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "chat.yaml"
    manifest.write_text(manifest_text(source=f"file://{folder}"), encoding="utf-8")
    port = free_port()
    engine = await asyncio.create_subprocess_exec(
        *engine_command("-f", manifest, "--port", str(port), "--threads", "1"),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        core = await core_of(engine)
        core.suspend()
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
            async with http.get(PATH_LIVE) as response:
                assert response.status == 200
            for method, path in (("GET", PATH_READY), ("GET", PATH_MODELS), ("POST", URL)):
                async with http.request(method, path, json=BODY) as response:
                    assert response.status == 503, path
                    assert int(response.headers["Retry-After"]) >= 1
                    assert (await response.json())["error"]["code"] == "starting"
            core.resume()
            async with asyncio.timeout(PATIENCE_S):
                while (answer := await completion(http))[0] == 503:
                    assert answer[1]["error"]["code"] == "starting"
                    await asyncio.sleep(0.05)
            assert answer[0] == 200, answer
            async with http.get(PATH_READY) as response:
                assert response.status == 200
    finally:
        engine.kill()
        await engine.wait()


# Takes effect in the engine and in its core, because Python imports it at each start.
FOUR_CORES = """\
import os
os.sched_getaffinity = lambda _: {0, 1, 2, 3}
"""
THREE_OF_THEM = """\
import goodput_core.process
goodput_core.process._cpu_quotas = lambda _: [3]
"""


@pytest.mark.parametrize(
    ("processors", "options", "threads"),
    [
        pytest.param(FOUR_CORES, [], 3, id="all cores but one"),
        pytest.param(FOUR_CORES, ["--http-processes", "2"], 2, id="a core for each HTTP process"),
        pytest.param(FOUR_CORES + THREE_OF_THEM, [], 2, id="all of the control group but one"),
        pytest.param(
            FOUR_CORES + THREE_OF_THEM,
            ["--http-processes", "2"],
            1,
            id="a core of the control group for each HTTP process",
        ),
    ],
)
async def test_the_command_chooses_the_threads(
    folder: Path,
    tmp_path: Path,
    start_engine: StartEngine,
    processors: str,
    options: list[str],
    threads: int,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(processors)
    engine = start_engine(
        *options,
        # In a pod, the kernels of the attention are not measured for this number of threads.
        environment={"PYTHONPATH": str(tmp_path), "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        source=f"file://{folder}",
    )
    assert (await engine.state())["device"]["threads"] == threads


async def test_a_pinned_model_of_a_hub_is_served_and_then_needs_no_hub(
    folder: Path, tmp_path: Path, start_engine: StartEngine, run_engine: RunEngine
) -> None:
    source = f"hf://{REPO}"
    async with open_hub(files_of(folder)) as hub:
        environment = {"HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": hub.url}
        environment |= dict.fromkeys(("HF_HUB_OFFLINE", "HF_TOKEN"), "")

        async def serve() -> None:
            """Start an engine, which must not block the loop of the hub."""
            engine = await asyncio.to_thread(
                start_engine,
                *("--threads", "1", "--max-model-tokens", "64"),
                environment=environment,
                source=source,
                revision=COMMIT,
            )
            async with aiohttp.ClientSession(engine.url) as http:
                status, answer = await completion(http)
            assert status == 200, answer
            assert answer["choices"][0]["token_ids"] == expected_ids(folder)
            assert REPO in engine.stderr()
            engine.process.terminate()
            assert engine.wait() == 0

        await serve()
        assert hub.requests > 0
        asked = hub.requests
        await serve()
        assert hub.requests == asked
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            ended = await asyncio.to_thread(run_engine, source=source, revision="d1" * 20)
    assert ended.returncode == 64
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert f"hf://{REPO}: the Hub has no revision '{'d1' * 20}' of it" in line

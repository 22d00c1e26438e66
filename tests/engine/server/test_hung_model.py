"""A forward pass of a real model that never returns, while the engine serves and before."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
import pytest

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

from tests.builders.http import PATIENCE_S
from tests.builders.serving import server_state, serving
from tests.builders.torch_models import VOCABULARY, Outputs, add_code, make_folder
from tests.engine.server.test_real_model import URL, body_of, events, expected_output

from goodput_core.contract import PATH_LIVE, PATH_METRICS
from goodput_core.errors import InternalError
from goodput_engine.core_client import CoreClient
from goodput_engine.messages import ModelFolder

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.conftest import StartEngine

    from goodput_engine.server.state import ServerState

pytestmark = pytest.mark.torch

HANGS = VOCABULARY - 1
"""A token in a prompt with which the forward pass never returns."""
PROMPT = [3, 14, 15, 9, 2]
BAD_PROMPT = [*PROMPT, HANGS]
CONTEXT = 4096
FIRST_STEP_TOKENS = 64
WAIT = "import threading; threading.Event().wait()"
SILENCE_S = 2.0


def make_hanging(folder: Path, condition: str) -> Path:
    """Save a model whose forward pass never returns if a condition of the pass holds."""
    make_folder(folder, "Llama", max_position_embeddings=CONTEXT)
    add_code(folder, f"if {condition}:\n    {WAIT}")
    return folder


def on_token(folder: Path) -> Path:
    return make_hanging(folder, f"bool((input_ids == {HANGS}).any())")


def state_of(folder: Path) -> ServerState:
    """Return the state of an HTTP process for an engine that runs two requests at a time."""
    model = ModelFolder(
        path=str(folder), dtype="float64", threads=1, kv_blocks=300, allow_remote_code=True
    )
    return server_state(
        model=model,
        token_budget=FIRST_STEP_TOKENS,
        min_token_budget=FIRST_STEP_TOKENS,
        max_token_budget=FIRST_STEP_TOKENS,
        max_num_seqs=2,
    )


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the core processes keep the code of the models in a folder of the test."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    # Otherwise the start measures the kernels of attention.
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")


def good_body(**fields: Any) -> dict[str, Any]:
    # The output must not have the token with which the pass hangs.
    return body_of(PROMPT, ignore_eos=True, logit_bias={str(HANGS): -100}, **fields)


async def test_a_step_that_hangs_ends_the_core_and_every_request_gets_an_error(
    tmp_path: Path,
) -> None:
    state = state_of(on_token(tmp_path / "tiny"))
    before = set(psutil.Process().children())
    async with (
        serving(state, silence_s=SILENCE_S) as url,
        aiohttp.ClientSession(url) as http,
        asyncio.timeout(PATIENCE_S),
    ):
        (core,) = [
            one
            for one in set(psutil.Process().children()) - before
            if "goodput_engine.core.process" in one.cmdline()
        ]
        async with http.post(URL, json=good_body()) as response:
            assert response.status == 200
        endless = good_body(stream=True, max_tokens=CONTEXT - 100)
        async with http.post(URL, json=endless) as streaming:
            received = events(streaming)
            await anext(received)
            began_s = time.monotonic()
            posted = [
                asyncio.ensure_future(http.post(URL, json=body))
                # The last one waits, since two run.
                for body in (body_of(BAD_PROMPT), good_body())
            ]
            last = [event async for event in received][-1]
            silent_s = time.monotonic() - began_s
        assert last["error"]["code"] == "engine_died"
        for task in posted:
            async with await task as response:
                assert response.status == 503
                assert int(response.headers["Retry-After"]) >= 1
                error = (await response.json())["error"]
            assert error["code"] == "engine_died"
            assert error["message"] == "the engine core died during this request; retry it"
        assert silent_s >= SILENCE_S
        assert isinstance(state.core, CoreClient)
        failure = await state.core.failure()
        assert isinstance(failure, InternalError)
        assert str(failure) == f"the engine core was silent for {SILENCE_S:g} s, so it was killed"
    assert not core.is_running()


@pytest.mark.parametrize(
    "condition",
    [
        pytest.param("self.calls == 1", id="the first pass"),
        pytest.param("self.calls == 5", id="the self-check"),
        pytest.param(f"input_ids.shape[1] == {FIRST_STEP_TOKENS}", id="the first step"),
    ],
)
async def test_a_step_that_hangs_before_the_core_is_ready_ends_the_core(
    tmp_path: Path, condition: str
) -> None:
    state = state_of(make_hanging(tmp_path / "tiny", condition))
    before = set(psutil.Process().children())
    began_s = time.monotonic()
    with pytest.raises(InternalError, match=r"was silent for [\d.]+ s of its warm-up, so it was"):
        async with asyncio.timeout(PATIENCE_S), serving(state, silence_s=SILENCE_S / 10):
            pass
    assert time.monotonic() - began_s >= SILENCE_S
    assert set(psutil.Process().children()) <= before


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_the_engine_restarts_after_a_step_that_hangs(
    tmp_path: Path, start_engine: StartEngine
) -> None:
    folder = on_token(tmp_path / "tiny")
    same = make_folder(tmp_path / "same", "Llama", max_position_embeddings=CONTEXT)
    ids, _ = expected_output(Outputs(same, "float64"), PROMPT)
    assert HANGS not in ids
    engine = start_engine(
        *("--threads", "1", "--allow-remote-code"),
        source=f"file://{folder}",
        realModel={"dtype": "float64", "kvBlocks": 300},
        tokenBudget={"min": 64, "max": 64, "initial": 64},
    )
    epoch = (await engine.state())["epoch"]

    async def status_of(path: str) -> tuple[int, str | None]:
        async with http.get(path) as response:
            body = await response.json()
            return response.status, body.get("error", {}).get("code")

    async with aiohttp.ClientSession(engine.url) as http:
        async with asyncio.timeout(90):
            hung = asyncio.ensure_future(http.post(URL, json=body_of(BAD_PROMPT)))
            while (live := await status_of(PATH_LIVE))[0] == 200:
                assert not hung.done()
                await asyncio.sleep(0.1)
            assert live == (503, "engine_stuck")
            async with await hung as response:
                assert response.status == 503
                assert (await response.json())["error"]["code"] == "engine_died"
            assert (await status_of(PATH_LIVE))[0] == 200
        await engine.state_when(lambda one: one["phase"] == "serving" and one["epoch"] != epoch)
        async with http.post(URL, json=body_of(PROMPT)) as response:
            answer = await response.json()
            assert response.status == 200, answer
    assert answer["choices"][0]["token_ids"] == ids
    async with (
        aiohttp.ClientSession(engine.admin_url) as admin,
        admin.get(PATH_METRICS) as response,
    ):
        text = await response.text()
    (line,) = [one for one in text.splitlines() if one.startswith("goodput_engine_core_restarts_t")]
    assert line.endswith(" 1.0")
    log = engine.stderr()
    assert "core stuck kill_after_silent_seconds=30" in log
    assert 'core died detail="the engine core was silent for 30 s, so it was killed"' in log
    assert "core restarted restarts=1" in log

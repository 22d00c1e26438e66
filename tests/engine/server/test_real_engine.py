"""`goodput engine` with a real model: metrics, timings, limits, promises, and a lack of memory."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

from tests.builders.torch_models import VOCABULARY, Outputs, add_code, make_folder
from tests.engine.conftest import EngineStarter
from tests.engine.server.test_real_model import (
    URL,
    body_of,
    expected_output,
    requests_at_once,
)

from goodput_core.contract import (
    HEADER_LOAD,
    HEADER_SLO_TPOT_MS,
    HEADER_SLO_TTFT_MS,
    HEADER_TIMINGS,
    PATH_METRICS,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.engine.conftest import RunningEngine

pytestmark = pytest.mark.torch

CONTEXT = 4096
PATIENT = {HEADER_SLO_TTFT_MS: "60000", HEADER_SLO_TPOT_MS: "60000"}
"""Targets for which no policy makes a step smaller than the budget."""
BUDGET = 512
TOO_LARGE = VOCABULARY - 1
"""A token for which the memory of the model below is too small; its self-check has none."""
FORWARD = f"""\
if bool((input_ids == {TOO_LARGE}).any()):
    raise torch.OutOfMemoryError("CUDA out of memory")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer, and with a long context."""
    return make_folder(tmp_path_factory.mktemp("tiny"), "Llama", max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def outputs(folder: Path) -> Outputs:
    """The model's own outputs."""
    return Outputs(folder, "float64")


@pytest.fixture(scope="module")
def engine(
    folder: Path,
    outputs: Outputs,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RunningEngine]:
    """An engine with the policy `slo`, on the same weights with code of the folder."""
    add_code(folder, FORWARD)
    path = tmp_path_factory.mktemp("engine")
    engines = EngineStarter(path)
    yield engines.start(
        *("--threads", "1", "--allow-remote-code"),
        environment={"HF_MODULES_CACHE": str(path / "modules")},
        source=f"file://{folder}",
        policy="slo",
        realModel={"dtype": "float64", "kvBlocks": 600},
        tokenBudget={"min": 32, "max": 2048, "initial": BUDGET},
    )
    engines.close()


def prompt_of(seed: int, length: int) -> list[int]:
    """Return a random prompt for which the memory suffices."""
    stream = random.Random(seed)
    return [stream.randrange(TOO_LARGE) for _ in range(length)]


async def metrics_of(engine: RunningEngine) -> dict[str, float]:
    """Return the metrics of the engine by name and state."""
    async with (
        aiohttp.ClientSession(engine.admin_url) as admin,
        admin.get(PATH_METRICS) as response,
    ):
        text = await response.text()
    return {
        sample.name + sample.labels.get("state", ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("goodput_engine") and "le" not in sample.labels
    }


async def post(
    engine: RunningEngine, prompt: list[int], headers: dict[str, str] | None = None, **fields: Any
) -> tuple[aiohttp.ClientResponse, dict[str, Any]]:
    body = body_of(prompt, ignore_eos=True, logit_bias={str(TOO_LARGE): -100}, **fields)
    async with (
        aiohttp.ClientSession(engine.url) as http,
        http.post(URL, json=body, headers=headers) as response,
    ):
        return response, await response.json()


async def test_metrics_and_timings_are_those_of_the_requests(engine: RunningEngine) -> None:
    before, began = await metrics_of(engine), time.monotonic()
    timings = []
    for cached in (0, 32):
        response, answer = await post(engine, prompt_of(1, 40), max_tokens=8)
        assert response.status == 200, answer
        found = json.loads(response.headers[HEADER_TIMINGS])
        counts = {"prompt_tokens": 40, "cached_tokens": cached, "output_tokens": 8}
        assert counts.items() <= found.items()
        timings.append(found)
    elapsed, after = time.monotonic() - began, await metrics_of(engine)
    for one in timings:
        assert 0 <= one["queue_ms"] <= one["ttft_ms"] <= one["e2e_ms"]
        assert 0 < 7 * one["tpot_ms"] <= one["e2e_ms"] - one["ttft_ms"] + 0.01
    assert sum(one["e2e_ms"] for one in timings) <= elapsed * 1000

    page = (Path(__file__).parents[3] / "docs/metrics.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(goodput_engine_\w+)`", page, re.MULTILINE))
    states = r"(used|cached|empty|_count|_sum)$"
    assert {re.sub(states, "", name) for name in after} == documented

    grown = {
        name.removeprefix("goodput_engine_"): value - before[name] for name, value in after.items()
    }
    assert grown["output_tokens_total"] == 16
    # The last token of an output is not computed.
    assert grown["scheduled_tokens_total"] == (40 + 7) + (40 - 32 + 7)
    assert grown["steps_total"] == grown["step_seconds_count"] == 16
    assert 0 < grown["step_seconds_sum"] <= elapsed
    assert grown["prefix_hit_tokens_total"] == 32
    assert grown["core_restarts_total"] == grown["preemptions_total"] == grown["shed_total"] == 0
    now = {name.removeprefix("goodput_engine_"): value for name, value in after.items()}
    assert now["running_requests"] == now["waiting_requests"] == now["kv_blocksused"] == 0
    assert now["kv_blockscached"] >= 2
    assert now["kv_blockscached"] + now["kv_blocksempty"] == 600
    assert now["token_budget"] == BUDGET


async def test_changed_limits_hold_for_the_steps_of_a_real_model(engine: RunningEngine) -> None:
    async def steps(*prompts: list[int], tokens: int) -> float:
        """Let requests arrive together; return the steps until all of them have ended."""
        before = (await metrics_of(engine))["goodput_engine_steps_total"]
        async with requests_at_once(engine, len(prompts)):
            answers = await asyncio.gather(
                *(post(engine, prompt, PATIENT, max_tokens=tokens) for prompt in prompts)
            )
        assert [response.status for response, _ in answers] == [200] * len(prompts)
        return (await metrics_of(engine))["goodput_engine_steps_total"] - before

    assert await steps(prompt_of(2, 12), prompt_of(3, 12), tokens=16) < 32
    limits = {"token_budget": 32, "max_num_seqs": 1}
    status, body = await engine.patch_limits({"revision": 5, **limits})
    assert status == 200, body
    state = await engine.state_when(lambda state: state["limits_revision"] == 5)
    assert limits.items() <= state.items()
    assert (await metrics_of(engine))["goodput_engine_token_budget"] == 32
    # One request after the other, and a prompt in parts.
    assert await steps(prompt_of(4, 12), prompt_of(5, 12), tokens=16) == 32
    assert await steps(prompt_of(6, 640), tokens=1) >= 640 / 32
    before = {"token_budget": BUDGET, "max_num_seqs": 4}
    status, body = await engine.patch_limits({"revision": 6, **before})
    assert status == 200, body
    await engine.state_when(lambda state: state["limits_revision"] == 6)
    assert await steps(prompt_of(7, 12), prompt_of(8, 12), tokens=16) < 32


async def test_a_promise_that_no_step_of_the_model_can_keep_gets_429(
    engine: RunningEngine,
) -> None:
    prompt = prompt_of(5, 3000)
    # The first step shows the times of this model.
    response, answer = await post(engine, prompt_of(6, 600), max_tokens=4)
    assert response.status == 200, answer
    shed = (await engine.state())["shed"]
    response, answer = await post(engine, prompt, {HEADER_SLO_TTFT_MS: "1"}, max_tokens=1)
    assert response.status == 429, answer
    assert int(response.headers["Retry-After"]) >= 1
    assert answer["error"]["code"] == "rate_limit_exceeded"
    assert "the latency targets of the request, even without others" in answer["error"]["message"]
    assert not json.loads(response.headers[HEADER_LOAD])["saturated"]
    await engine.state_when(lambda state: state["shed"] == shed + 1)
    response, answer = await post(engine, prompt, PATIENT, max_tokens=1)
    assert response.status == 200, answer


async def test_a_request_without_memory_gets_503_and_the_others_continue(
    engine: RunningEngine, outputs: Outputs
) -> None:
    others = [
        prompt
        for seed in range(20, 60)
        if TOO_LARGE
        not in expected_output(outputs, prompt := prompt_of(seed, 12), ignore_eos=True)[0]
    ][:3]
    assert len(others) == 3
    async with requests_at_once(engine, 4):
        answers = await asyncio.gather(
            *(post(engine, prompt) for prompt in (*others, [*others[0], TOO_LARGE, 5]))
        )
    (*served, (response, answer)) = answers
    assert response.status == 503, answer
    assert int(response.headers["Retry-After"]) == 1
    assert answer["error"]["code"] == "out_of_memory"
    assert answer["error"]["type"] == "server_error"
    assert "too little free memory for this request" in answer["error"]["message"]
    for prompt, (other, whole) in zip(others, served, strict=True):
        assert other.status == 200, whole
        (choice,) = whole["choices"]
        assert choice["token_ids"] == expected_output(outputs, prompt, ignore_eos=True)[0]
    state = await engine.state_when(lambda state: not state["in_flight"] and not state["running"])
    assert state["kv_free_blocks"] == state["kv_total_blocks"]
    response, answer = await post(engine, others[0], max_tokens=2)
    assert response.status == 200, answer

"""Requests that the engine drops after their admission, as their clients see them."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import openai
import pytest
from tests.builders.http import PATIENCE_S

if TYPE_CHECKING:
    from tests.engine.conftest import RunningEngine, StartEngine

LONG = {"model": "chat", "prompt": "x", "max_tokens": 20_000, "ignore_eos": True}


@pytest.fixture
def dropping(start_engine: StartEngine) -> RunningEngine:
    return start_engine(policy="sarathi", lateRequests="drop", maxNumSeqs=1)


async def _started(engine: RunningEngine) -> None:
    await engine.state_when(lambda state: state["running"] == 1)


def _assert_rate_limited(error: dict[str, Any]) -> None:
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "was dropped" in error["message"]


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "not streamed"])
async def test_a_waiting_request_that_is_dropped_gets_429(
    dropping: RunningEngine, stream: bool
) -> None:
    body = {**LONG, "stream": stream}
    async with (
        asyncio.timeout(PATIENCE_S),
        aiohttp.ClientSession(dropping.url) as http,
        http.post("/v1/completions", json={**LONG, "stream": True}) as occupant,
    ):
        assert occupant.status == 200
        await _started(dropping)
        headers = {"X-SLO-TTFT-MS": "30"}
        async with http.post("/v1/completions", json=body, headers=headers) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
            assert response.content_type == "application/json"
            _assert_rate_limited((await response.json())["error"])
    state = await dropping.state_when(lambda state: state["shed"] == 1)
    assert state["waiting"] == 0


async def test_a_stream_that_has_begun_ends_with_an_error_event(dropping: RunningEngine) -> None:
    body = {**LONG, "stream": True}
    async with (
        asyncio.timeout(PATIENCE_S),
        aiohttp.ClientSession(dropping.url) as http,
        http.post("/v1/completions", json=body, headers={"X-SLO-E2E-MS": "1000"}) as response,
    ):
        assert response.status == 200
        text = (await response.read()).decode()
    *events, last, end = text.split("\n\n")
    assert end == ""
    assert "[DONE]" not in text
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert 0 < len(chunks) <= 1001
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    _assert_rate_limited(json.loads(last.removeprefix("data: "))["error"])
    state = await dropping.state_when(lambda state: state["shed"] == 1)
    assert (state["running"], state["kv_free_blocks"]) == (0, state["kv_total_blocks"])


async def test_a_response_that_is_not_streamed_gets_429_even_after_tokens(
    dropping: RunningEngine,
) -> None:
    async with (
        asyncio.timeout(PATIENCE_S),
        aiohttp.ClientSession(dropping.url) as http,
        http.post("/v1/completions", json=LONG, headers={"X-SLO-E2E-MS": "50"}) as response,
    ):
        assert response.status == 429
        _assert_rate_limited((await response.json())["error"])


async def test_openais_client_raises_its_errors(dropping: RunningEngine) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{dropping.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as client:
        with pytest.raises(openai.RateLimitError, match="was dropped"):
            await client.completions.create(
                model="chat",
                prompt="x",
                max_tokens=20_000,
                extra_body={"ignore_eos": True},
                extra_headers={"X-SLO-E2E-MS": "50"},
            )
        stream = await client.completions.create(
            model="chat",
            prompt="x",
            max_tokens=20_000,
            stream=True,
            extra_body={"ignore_eos": True},
            extra_headers={"X-SLO-E2E-MS": "1000"},
        )
        with pytest.raises(openai.APIError, match="was dropped") as caught:
            async for _ in stream:
                pass
    assert caught.value.code == "rate_limit_exceeded"

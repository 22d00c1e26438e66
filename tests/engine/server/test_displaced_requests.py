"""Requests that a more important one displaces from a full queue, as their clients see them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp
import pytest
from tests.builders.http import PATIENCE_S

if TYPE_CHECKING:
    from tests.engine.conftest import StartEngine

BODY = {"model": "chat", "prompt": "x", "max_tokens": 20_000, "ignore_eos": True, "stream": True}


@pytest.mark.parametrize("policy", ["sarathi", "slo"])
async def test_the_displaced_request_gets_429_at_once_and_the_other_waits_in_its_place(
    start_engine: StartEngine, policy: str
) -> None:
    engine = start_engine(policy=policy, maxNumSeqs=1, maxWaiting=1)
    targets = {"X-SLO-TTFT-MS": "86400000"}

    async def send(http: aiohttp.ClientSession, priority: int) -> tuple[int, dict[str, str], bytes]:
        headers = {**targets, "X-Priority": f"{priority}"}
        async with http.post("/v1/completions", json=BODY, headers=headers) as response:
            return response.status, dict(response.headers), await response.content.readany()

    async with (
        asyncio.timeout(PATIENCE_S),
        aiohttp.ClientSession(engine.url) as http,
        http.post("/v1/completions", json=BODY, headers=targets) as occupant,
    ):
        assert occupant.status == 200
        await engine.state_when(lambda state: state["running"] == 1)
        low = asyncio.create_task(send(http, 0))
        state = await engine.state_when(lambda state: state["waiting"] == 1)
        priority, weight, target_ns = state["displaceable"]
        assert (priority, weight, target_ns) == (0, 1, 86_400 * 10**9)
        high = asyncio.create_task(send(http, 1))
        status, headers, body = await low
        assert status == 429
        assert int(headers["Retry-After"]) >= 1
        assert headers["Content-Type"].startswith("application/json")
        assert b"rate_limit_exceeded" in body
        assert b"more important" in body
        state = await engine.state_when(lambda state: state["shed"] == 1)
        assert (state["running"], state["waiting"]) == (1, 1), "the occupant still runs"
        equal_status, _, equal_body = await send(http, 1)
        assert equal_status == 429
        assert b"requests are waiting" in equal_body
        occupant.close()
        status, _, body = await high
        assert status == 200
        assert body.startswith(b"data: ")

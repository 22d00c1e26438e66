"""Placement by prefix raises the hit rate of the prefix caches of two real engines."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from tests.engine.router.conftest import started

from goodput_core.spec.choices import RouterPolicy

if TYPE_CHECKING:
    from collections.abc import Iterator

SESSIONS, TURNS, WORDS = 9, 5, 60


@pytest.fixture(scope="module")
def engines() -> Iterator[list[dict[str, str]]]:
    with ExitStack() as stack:
        yield [started(stack, f"r{i}", "engine") for i in range(2)]


async def reuse(http: aiohttp.ClientSession, engines: list[dict[str, str]]) -> list[int]:
    """Return the prompt tokens looked up and found in both prefix caches since the start."""
    sums = [0, 0]
    for engine in engines:
        async with http.get(engine["admin_url"] + "/control/state") as response:
            state: dict[str, Any] = await response.json()
        sums[0] += state["prefix_queried_tokens"]
        sums[1] += state["prefix_hit_tokens"]
    return sums


async def converse(http: aiohttp.ClientSession, url: str, label: str) -> None:
    """Run concurrent sessions, turn by turn; each turn repeats the earlier messages."""
    chats: list[list[dict[str, str]]] = [[] for _ in range(SESSIONS)]
    for turn in range(TURNS):
        for index, chat in enumerate(chats):
            said = " ".join(f"{label}{index}t{turn}w{word}" for word in range(WORDS))
            chat.append({"role": "user", "content": said})

        async def ask(chat: list[dict[str, str]]) -> None:
            body = {"model": "chat", "messages": chat, "max_tokens": 4}
            async with http.post(url + "/v1/chat/completions", json=body) as response:
                assert response.status == 200
                message = (await response.json())["choices"][0]["message"]
            chat.append({"role": "assistant", "content": message["content"]})

        await asyncio.gather(*map(ask, chats))


async def hit_share(engines: list[dict[str, str]], policy: RouterPolicy) -> float:
    with ExitStack() as stack:
        options = [f"--upstream=r{i}={e['url']},{e['admin_url']}" for i, e in enumerate(engines)]
        router = started(stack, "router", "router", "--policy", policy, *options)
        async with aiohttp.ClientSession() as http:
            ready = 0
            while ready < len(engines):
                async with http.get(router["url"] + "/health/ready") as response:
                    ready = (await response.json()).get("ready_replicas", 0)
            before = await reuse(http, engines)
            await converse(http, router["url"], f"{policy}s")
            after = await reuse(http, engines)
    queried, hit = (b - a for a, b in zip(before, after, strict=True))
    return hit / queried


async def test_placement_by_prefix_finds_more_cached_tokens_than_round_robin(
    engines: list[dict[str, str]],
) -> None:
    turns = await hit_share(engines, RouterPolicy.ROUND_ROBIN)
    prefix = await hit_share(engines, RouterPolicy.PREFIX_AFFINITY)
    # Five turns repeat all earlier ones, so two thirds of the tokens can be cached: 10 of 15 parts.
    assert prefix > 0.6
    assert prefix > 1.4 * turns

"""The use of placement by prefix: two real engines find more of the sessions cached."""

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
    """Prompt tokens that were looked up in both prefix caches so far, and those that were found."""
    sums = [0, 0]
    for engine in engines:
        async with http.get(engine["admin_url"] + "/control/state") as response:
            state: dict[str, Any] = await response.json()
        sums[0] += state["prefix_queried_tokens"]
        sums[1] += state["prefix_hit_tokens"]
    return sums


async def converse(http: aiohttp.ClientSession, url: str, label: str) -> None:
    """Sessions side by side, turn by turn; each turn repeats all that was said before."""
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


async def test_turns_find_more_of_their_session_where_it_was_served_before(
    engines: list[dict[str, str]],
) -> None:
    turns = await hit_share(engines, RouterPolicy.ROUND_ROBIN)
    prefix = await hit_share(engines, RouterPolicy.PREFIX_AFFINITY)
    # Of five turns that repeat all before them, two thirds can be found again: 10 parts of 15.
    assert prefix > 0.6
    assert prefix > 1.4 * turns

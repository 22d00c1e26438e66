"""An armed shard starts at the instant that its coordinator sends, and at no other."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from goodput_core.contract import PATH_READY, PATH_REPLAY_START, PATH_REPLAY_STATE
from goodput_core.dispatch import run_command
from goodput_core.errors import UsageError
from goodput_core.units import NS_PER_S
from goodput_replay.sending.arming import await_start, read_token
from goodput_replay.shares import Share
from goodput_replay.start_time import format_instant

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TOKEN = "secret"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


class Armed:
    """A shard that waits for its start, and a client of its port."""

    def __init__(self, port: int, task: asyncio.Task[int], session: aiohttp.ClientSession) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.task = task
        self._session = session

    async def get(self, path: str) -> tuple[int, Any]:
        async with self._session.get(self.url + path) as response:
            return response.status, await _content(response)

    async def post(self, body: object, headers: dict[str, str] = HEADERS) -> tuple[int, Any]:
        url = self.url + PATH_REPLAY_START
        async with self._session.post(url, json=body, headers=headers) as response:
            return response.status, await _content(response)


async def _content(response: aiohttp.ClientResponse) -> Any:
    json = response.content_type == "application/json"
    return await response.json() if json else await response.text()


@asynccontextmanager
async def armed(unused_tcp_port: int) -> AsyncIterator[Armed]:
    share = Share(index=1, count=3)
    waiting = await_start(("127.0.0.1", unused_tcp_port), token=TOKEN, share=share, requests=7)
    task = asyncio.create_task(waiting)
    async with aiohttp.ClientSession() as session:
        one = Armed(unused_tcp_port, task, session)
        while not task.done():
            try:
                await one.get(PATH_READY)
                break
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.01)
        yield one
    task.cancel()
    await asyncio.wait([task])


def instant(ahead_s: float) -> str:
    return format_instant(time.time_ns() + round(ahead_s * NS_PER_S))


async def test_a_shard_reports_its_state_and_starts_at_the_sent_instant(
    unused_tcp_port: int,
) -> None:
    async with armed(unused_tcp_port) as shard:
        status, state = await shard.get(PATH_REPLAY_STATE)
        assert status == 200
        assert (state["shard"], state["shards"], state["requests"]) == (2, 3, 7)
        assert abs(state["wallNs"] - time.time_ns()) < 5 * NS_PER_S
        assert "startAtNs" not in state
        start = instant(1.3)
        assert (await shard.post({"startAt": start}))[0] == 200
        status, state = await shard.post({"startAt": start})
        assert status == 200, "the same start is confirmed again"
        started_ns = await shard.task
        assert started_ns == state["startAtNs"]
        assert started_ns > time.time_ns(), "the shard waits for the rest of the time itself"
        with pytest.raises(aiohttp.ClientConnectionError):
            await shard.get(PATH_REPLAY_STATE)  # closed before the first request


async def test_a_start_that_cannot_be_kept_or_trusted_is_rejected(unused_tcp_port: int) -> None:
    async with armed(unused_tcp_port) as shard:
        for body, headers, status, problem in (
            ({"startAt": instant(60)}, {}, 401, "the control token is missing or wrong"),
            ({"startAt": instant(60)}, {"Authorization": "Bearer other"}, 401, "missing or wrong"),
            ({"startAt": instant(0.5)}, HEADERS, 409, "passed"),
            ({"startAt": instant(9e5)}, HEADERS, 409, "more than a week ahead"),
            ({"startAt": "soon"}, HEADERS, 400, "is not an instant"),
            ({"start": instant(60)}, HEADERS, 400, 'the body must be {"startAt": INSTANT}'),
            ([], HEADERS, 400, "the body must be"),
        ):
            answer = await shard.post(body, headers)
            assert answer[0] == status, answer
            assert problem in answer[1]["error"]
        assert not shard.task.done()
        assert (await shard.post({"startAt": instant(60)}))[0] == 200
        status, answer = await shard.post({"startAt": instant(70)})
        assert (status, answer["error"][:13]) == (409, "another start")


async def test_a_port_in_use_is_named(unused_tcp_port: int) -> None:
    async with armed(unused_tcp_port):
        waiting = await_start(
            ("127.0.0.1", unused_tcp_port), token=TOKEN, share=Share(index=0, count=1), requests=1
        )
        with pytest.raises(UsageError, match=rf"--arm: 127.0.0.1, port {unused_tcp_port}: cannot"):
            await waiting


def test_without_a_token_no_shard_is_armed() -> None:
    with pytest.raises(UsageError, match="GOODPUT_CONTROL_TOKEN is not set"):
        read_token({})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--arm", "7000", "--start-at", "4102444800"), "both determine the start"),
        (("--arm", "7000", "--emulate", "examples/chat.yaml"), "no request is sent"),
        (("--arm", "7000", "--shard", "job/3"), "needs JOB_COMPLETION_INDEX"),
    ],
)
def test_options_that_contradict_arming_are_rejected(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], problem: str
) -> None:
    assert run_command(["replay", "--trace", "sample", *options]) == 64
    assert problem in capsys.readouterr().err

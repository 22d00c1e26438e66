"""The control laws over real processes: `goodput up` under a load that steps up and down.

A slow device makes a few requests a second a load: one replica bears about 3.7 of these, and in
steps larger than about 540 tokens who decodes waits for longer than was promised. Intervals are a
second; the laws' own windows are not shortened, so this takes minutes.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import pytest

from goodput_core.control.slo_window import LEAST_REQUESTS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

PROMPT: Final = 1000
ANSWER: Final = 40
EXAMPLES: Final = Path(__file__).resolve().parents[2] / "examples"


class Up:
    """A running service, and what it has said."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.url = ""
        self.rate_per_s = 0.0
        self.kept = 0
        self.failures: list[str] = []

    def changes(self) -> list[tuple[str, str]]:
        """Each change's knob and what became of it, in order."""
        found = []
        for event in self.events:
            if event["event"] == "change":
                assert event["applied"]
                found.append((event["knob"], event["message"]))
        return found

    def replicas(self) -> int:
        """How many were asked for, by the latest decision."""
        asked = [e["decision"]["apply_replicas"] for e in self.events if e["event"] == "decision"]
        return int(asked[-1]) if asked else 1

    async def until(self, reached: Callable[[], bool], within_s: float) -> None:
        ends = time.monotonic() + within_s
        while not reached():
            assert time.monotonic() < ends, (self.changes(), self.replicas())
            await asyncio.sleep(0.2)


async def _follow(up: Up, stream: asyncio.StreamReader) -> None:
    while line := await stream.readline():
        event = json.loads(line)
        up.events.append(event)
        if event["event"] == "ready":
            up.url = event["url"]


async def _one(up: Up, http: aiohttp.ClientSession, rng: random.Random) -> None:
    body = {
        "model": "chat",
        "prompt": [rng.randrange(32_000) for _ in range(PROMPT)],
        "max_tokens": ANSWER,
        "ignore_eos": True,
        "stream": True,
    }
    try:
        async with http.post(f"{up.url}/v1/completions", json=body) as response:
            text = await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        up.failures.append(repr(error))
        return
    if response.status == 200 and "[DONE]" in text:
        up.kept += 1
    else:
        up.failures.append(text[:200])


async def _load(up: Up, rng: random.Random) -> None:
    timeout = aiohttp.ClientTimeout(total=300)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=connector) as http,
        asyncio.TaskGroup() as group,
    ):
        while True:
            group.create_task(_one(up, http, rng))
            await asyncio.sleep(rng.expovariate(up.rate_per_s))


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Up]:
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "goodput_core", "up", "-f", str(EXAMPLES / "control.yaml"),
            "--device", str(EXAMPLES / "slow-device.yaml"), "--port", "0",
            "--json", "--exit-with-parent",
            cwd=folder, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=log, env=dict(os.environ), limit=1 << 20,
        )  # fmt: skip
    up = Up()
    assert process.stdout is not None
    following = asyncio.ensure_future(_follow(up, process.stdout))
    try:
        await up.until(lambda: bool(up.url), within_s=60)
        yield up
    finally:
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            await process.wait()
        following.cancel()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_load_step_moves_the_budget_first_then_replicas_and_back_down(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as up:
        up.rate_per_s = 1.4
        loading = asyncio.ensure_future(_load(up, random.Random(1)))
        try:
            await up.until(lambda: up.kept >= 2 * LEAST_REQUESTS, within_s=120)
            assert up.changes() == [], "constant load changes nothing"
            up.rate_per_s = 6.0
            await up.until(lambda: up.replicas() > 1, within_s=150)
            knobs = [knob for knob, _ in up.changes()]
            assert knobs[0] == "TokenBudget"
            assert knobs[-1] == "Replicas"
            first = up.changes()[0][1]
            assert first.startswith("token budget 1024 → 768, safety 90 % → 85 %: TPOT is missed")
            await up.until(lambda: _started(up), within_s=60)
            await _until_told(up)
            up.rate_per_s = 0.5
            await up.until(lambda: up.replicas() == 1, within_s=240)
            await up.until(lambda: _left(up), within_s=60)
        finally:
            loading.cancel()
            with suppress(asyncio.CancelledError):
                await loading
    assert up.failures == [], "no request notices"
    directions = [message.split(":")[0] for knob, message in up.changes() if knob == "Replicas"]
    assert directions[0].startswith("replicas 1 → ")
    assert directions[-1].endswith(" → 1")


async def _until_told(up: Up) -> None:
    """Every replica, the new one too, has the lowered budget."""
    told = [event for event in up.events if event["event"] in ("ready", "replica_started")]
    urls = [one["admin_url"] for event in told for one in event.get("replicas", [event])]
    assert len(urls) >= 2
    budgets: list[int] = [1024]
    async with aiohttp.ClientSession() as http:

        async def ask(url: str) -> int:
            async with http.get(f"{url}/control/state") as response:
                return int((await response.json())["token_budget"])

        ends = time.monotonic() + 30
        while max(budgets) > 768:
            assert time.monotonic() < ends, budgets
            await asyncio.sleep(0.2)
            budgets = await asyncio.gather(*map(ask, urls))


def _started(up: Up) -> bool:
    return any(event["event"] == "replica_started" for event in up.events)


def _left(up: Up) -> bool:
    return any(event["event"] == "replica_left" for event in up.events)


@pytest.mark.slow
def test_a_replay_keeps_the_decisions_of_the_service_that_it_started(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "goodput_core", "replay", "--trace", "sample",
            "--window", "0s..6s", "-f", str(EXAMPLES / "control.yaml"),
            "--device", str(EXAMPLES / "slow-device.yaml"), "--out", "run",
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / "decisions.jsonl").read_text(encoding="utf-8").splitlines()
    decisions = [json.loads(line) for line in lines]
    assert len(decisions) >= 5, "one a second"
    arrivals = [d["observation"]["traffic"]["arrivals"] for d in decisions]
    assert sum(arrivals) > 0
    assert {d["params"]["mode"] for d in decisions} == {"Auto"}
    assert not list((tmp_path / "run").glob("*.partial"))

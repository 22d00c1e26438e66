"""The control laws over local processes: `goodput up` under a load that steps up and down.

On the slow device a few requests per second are a high load. One replica sustains about 3.7 of
these requests per second, and steps of more than about 540 tokens miss the TPOT target. The
interval is a second. The windows of the laws are not shortened, so the test takes minutes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import pytest
from tools.e2e.client_process import Load, client_session

from goodput_core.control.slo_window import LEAST_REQUESTS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

EXAMPLES: Final = Path(__file__).resolve().parents[2] / "examples"


class ServiceEvents:
    """A running `goodput up` and its events."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    async def read_events(self, stream: asyncio.StreamReader) -> None:
        while line := await stream.readline():
            self.events.append(json.loads(line))

    def named(self, *names: str) -> list[dict[str, Any]]:
        """Return the events with these names."""
        return [event for event in self.events if event["event"] in names]

    def changes(self) -> list[tuple[str, str]]:
        """Return the knob and the message of each change."""
        changes = self.named("change")
        assert all(change["applied"] for change in changes)
        return [(change["knob"], change["message"]) for change in changes]

    def replicas(self) -> int:
        """Return the replicas of the latest decision."""
        decisions = self.named("decision")
        return int(decisions[-1]["decision"]["apply_replicas"]) if decisions else 1

    async def wait_for(self, check: Callable[[], object], within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while not check():
            assert time.monotonic() < deadline, (self.changes(), self.replicas())
            await asyncio.sleep(0.2)


@asynccontextmanager
async def running_up(folder: Path) -> AsyncIterator[ServiceEvents]:
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "goodput_core", "up", "-f", str(EXAMPLES / "control.yaml"),
            "--device", str(EXAMPLES / "slow-device.yaml"), "--port", "0",
            "--json", "--exit-with-parent",
            cwd=folder, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=log, env=dict(os.environ), limit=1 << 20,
        )  # fmt: skip
    up = ServiceEvents()
    assert process.stdout is not None
    reading = asyncio.ensure_future(up.read_events(process.stdout))
    try:
        await up.wait_for(lambda: up.named("ready"), within_s=120)
        yield up
    finally:
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(120):
            await process.wait()
        reading.cancel()


@asynccontextmanager
async def running_load(url: str) -> AsyncIterator[Load]:
    async with client_session(timeout_s=300) as http:
        load = Load("chat", url, http, prompt_tokens=1000, output_tokens=40)
        running = asyncio.ensure_future(load.run())
        try:
            yield load
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_a_load_step_moves_the_budget_first_then_replicas_and_back_down(
    tmp_path: Path,
) -> None:
    async with running_up(tmp_path) as up:
        [ready] = up.named("ready")
        async with running_load(ready["url"]) as load:
            load.set_rate(1.4)
            await up.wait_for(lambda: load.outcomes["done"] >= 2 * LEAST_REQUESTS, within_s=240)
            assert up.changes() == [], "constant load changes nothing"
            load.set_rate(6.0)
            await up.wait_for(lambda: up.replicas() > 1, within_s=300)
            knobs = [knob for knob, _ in up.changes()]
            assert knobs[0] == "TokenBudget"
            assert knobs[-1] == "Replicas"
            first = up.changes()[0][1]
            assert first.startswith("token budget 1024 → 768, safety 90 % → 85 %: TPOT is missed")
            await up.wait_for(lambda: up.named("replica_started"), within_s=120)
            await wait_for_lowered_budgets(up)
            load.set_rate(0.5)
            await up.wait_for(lambda: up.replicas() == 1, within_s=900)
            await up.wait_for(lambda: up.named("replica_left"), within_s=120)
    assert set(load.outcomes) == {"done"}, "no request fails"
    messages = [message.split(":")[0] for knob, message in up.changes() if knob == "Replicas"]
    assert messages[0].startswith("replicas 1 → ")
    assert messages[-1].endswith(" → 1")


async def wait_for_lowered_budgets(up: ServiceEvents) -> None:
    """Wait until every replica, including the new one, has the lowered budget."""
    started = up.named("ready", "replica_started")
    urls = [one["admin_url"] for event in started for one in event.get("replicas", [event])]
    assert len(urls) >= 2
    budgets: list[int] = [1024]
    async with aiohttp.ClientSession() as http:

        async def token_budget(url: str) -> int:
            async with http.get(f"{url}/control/state") as response:
                return int((await response.json())["token_budget"])

        deadline = time.monotonic() + 60
        while max(budgets) > 768:
            assert time.monotonic() < deadline, budgets
            await asyncio.sleep(0.2)
            budgets = await asyncio.gather(*map(token_budget, urls))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_replay_writes_the_decisions_of_the_service_that_it_started(tmp_path: Path) -> None:
    ended = subprocess.run(
        [
            sys.executable, "-m", "goodput_core", "replay", "--trace", "sample",
            "--window", "0s..6s", "-f", str(EXAMPLES / "control.yaml"),
            "--device", str(EXAMPLES / "slow-device.yaml"), "--out", "run",
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=220, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    lines = (tmp_path / "run" / "decisions.jsonl").read_text(encoding="utf-8").splitlines()
    decisions = [json.loads(line) for line in lines]
    assert len(decisions) >= 5, "one per second"
    arrivals = [d["observation"]["traffic"]["arrivals"] for d in decisions]
    assert sum(arrivals) > 0
    assert {d["params"]["mode"] for d in decisions} == {"Auto"}
    assert not list((tmp_path / "run").glob("*.partial"))

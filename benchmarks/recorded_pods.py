"""Records the published state of a real engine and router under load, for a stand-in.

`goodput up` runs a service of the same shape on an emulated device; while requests of many
lengths run, its router and one of its engines are asked for their state. The laws compute nothing
(`Manual`), so limits are the manifest's own, as in a cluster whose promises are kept.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from goodput_core.contract import (
    EVENT_READY,
    PATH_COMPLETIONS,
    PATH_CONTROL_STATE,
    QUERY_SECONDS_SINCE,
    ROLE_ENGINE,
    ROLE_ROUTER,
)

__all__ = ["record"]

_REQUESTS = 300
_AT_ONCE = 12
_LONGEST_PROMPT, _LONGEST_ANSWER = 2048, 128
_ENOUGH = 0.8
"""Requests until the states are recorded; the others are still running or to come."""
_PATIENCE_S = 120


def record(manifest: dict[str, Any], profile: str) -> dict[str, Any]:
    """The body of `GET /control/state` of a router and of an engine, by role.

    Args:
        manifest: of the service.
        profile: the device that its engines emulate; here it starts at once.
    """
    with tempfile.TemporaryDirectory(prefix="recorded-pods-") as folder:
        return asyncio.run(_record(Path(folder), manifest, profile))


async def _record(folder: Path, manifest: dict[str, Any], profile: str) -> dict[str, Any]:
    control = {"mode": "Manual"}
    (folder / "service.yaml").write_text(
        json.dumps({**manifest, "spec": {**manifest["spec"], "control": control}})
    )
    device = yaml.safe_load(
        files("goodput_engine.device").joinpath("profiles", f"{profile}.yaml").read_text()
    )
    device["numbers"]["startup_seconds"]["value"] = 0
    (folder / "device.yaml").write_text(yaml.safe_dump(device))
    with (folder / "log").open("wb") as log:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "goodput_core", "up", "--json", "--exit-with-parent"),
            *("-f", folder / "service.yaml", "--device", folder / "device.yaml", "--port", "0"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            limit=1 << 20,
        )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        async with asyncio.timeout(_PATIENCE_S):
            ready = await _ready(child.stdout)
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(child.stdout.read())  # or it would block on us
                states = await _under_load(ready, manifest["metadata"]["name"])
                reading.cancel()
    except (TimeoutError, LookupError):
        sys.exit(f"nothing to record: {(folder / 'log').read_text()[-2000:]}")
    finally:
        child.stdin.close()
        await child.wait()
    return states


async def _ready(stdout: asyncio.StreamReader) -> dict[str, Any]:
    while line := await stdout.readline():
        event: dict[str, Any] = json.loads(line)
        if event["event"] == EVENT_READY:
            return event
    raise LookupError


async def _under_load(ready: dict[str, Any], model: str) -> dict[str, Any]:
    asked = {ROLE_ENGINE: ready["replicas"][0]["admin_url"], ROLE_ROUTER: ready["admin_url"]}
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        load = asyncio.ensure_future(_load(session, ready["url"], model))
        while not load.done():
            states = {role: await _state(session, url) for role, url in asked.items()}
            if states[ROLE_ROUTER]["arrivals"] > _ENOUGH * _REQUESTS:
                break
            await asyncio.sleep(0.2)
        await load
    # What pods read at their start: the operator's first limits stand in their ConfigMap.
    states[ROLE_ENGINE]["limits_revision"] = 1
    return states


async def _state(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    query = {QUERY_SECONDS_SINCE: "0"}  # which an engine ignores
    async with session.get(url + PATH_CONTROL_STATE, params=query) as response:
        state: dict[str, Any] = await response.json()
        return state


async def _load(session: aiohttp.ClientSession, url: str, model: str) -> None:
    """Requests of lengths that are even on a logarithmic scale."""
    rng, places = random.Random(1), asyncio.Semaphore(_AT_ONCE)

    async def one(prompt: int, answer: int) -> None:
        tokens = [rng.randrange(1000) for _ in range(prompt)]
        body = {"model": model, "prompt": tokens, "max_tokens": answer, "ignore_eos": True}
        async with places, session.post(url + PATH_COMPLETIONS, json=body) as response:
            await response.read()

    def length(most: int) -> int:
        return round(math.exp(math.log(most) * rng.random()))

    lengths = [(length(_LONGEST_PROMPT), length(_LONGEST_ANSWER)) for _ in range(_REQUESTS)]
    await asyncio.gather(*(one(*pair) for pair in lengths))

"""Records the published state of a real engine and router under load, for `fake_pods`.

`goodput up` runs such a service on an emulated device. While requests of many lengths run, the
states of its router and of one of its engines are read. The control mode is `Manual`, so the limits
are those of the manifest, as in a cluster that meets its objectives.
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
_LONGEST_PROMPT, _LONGEST_OUTPUT = 2048, 128
_RECORD_AFTER = 0.8
"""Share of the requests after which the states are recorded."""
_TIMEOUT_S = 120


def record(manifest: dict[str, Any], profile: str) -> dict[str, Any]:
    """Return the body of `GET /control/state` of a router and of an engine, by role.

    Args:
        manifest: manifest of the service.
        profile: device profile of its engines; used without a start-up time.
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
        async with asyncio.timeout(_TIMEOUT_S):
            ready = await _ready(child.stdout)
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(
                    child.stdout.read()
                )  # so that its pipe does not fill up
                states = await _under_load(ready, manifest["metadata"]["name"])
                reading.cancel()
    except (TimeoutError, LookupError):
        sys.exit(f"the service did not become ready: {(folder / 'log').read_text()[-2000:]}")
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
    urls = {ROLE_ENGINE: ready["replicas"][0]["admin_url"], ROLE_ROUTER: ready["admin_url"]}
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        load = asyncio.ensure_future(_load(session, ready["url"], model))
        while not load.done():
            states = {role: await _state(session, url) for role, url in urls.items()}
            if states[ROLE_ROUTER]["arrivals"] > _RECORD_AFTER * _REQUESTS:
                break
            await asyncio.sleep(0.2)
        await load
    # Pods read the operator's first limits from their ConfigMap at start.
    states[ROLE_ENGINE]["limits_revision"] = 1
    return states


async def _state(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    query = {QUERY_SECONDS_SINCE: "0"}  # ignored by engines
    async with session.get(url + PATH_CONTROL_STATE, params=query) as response:
        state: dict[str, Any] = await response.json()
        return state


async def _load(session: aiohttp.ClientSession, url: str, model: str) -> None:
    """Send requests whose lengths are uniform on a logarithmic scale."""
    rng, slots = random.Random(1), asyncio.Semaphore(_AT_ONCE)

    async def send(prompt: int, output: int) -> None:
        tokens = [rng.randrange(1000) for _ in range(prompt)]
        body = {"model": model, "prompt": tokens, "max_tokens": output, "ignore_eos": True}
        async with slots, session.post(url + PATH_COMPLETIONS, json=body) as response:
            await response.read()

    def length(most: int) -> int:
        return round(math.exp(math.log(most) * rng.random()))

    lengths = [(length(_LONGEST_PROMPT), length(_LONGEST_OUTPUT)) for _ in range(_REQUESTS)]
    await asyncio.gather(*(send(*pair) for pair in lengths))

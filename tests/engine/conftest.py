"""Engines for tests: `goodput engine` as a process, with a device whose steps take 1 ms."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.builders.http import PATIENCE_S
from tests.builders.manifests import manifest_text as shared_manifest

CONTROL_TOKEN = "a token of the tests"

StartEngine = Callable[..., "RunningEngine"]
RunEngine = Callable[..., "subprocess.CompletedProcess[str]"]


def manifest_text(
    *,
    source: str = "emulated://unit",
    revision: str | None = None,
    mode: str = "Manual",
    **engine: Any,
) -> str:
    """Return an LLMService with two classes; `engine` changes fields of `spec.engine`."""
    changes = {f"engine__{name}": value for name, value in engine.items()}
    return shared_manifest(
        "engine", model__source=source, model__revision=revision, control__mode=mode, **changes
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningEngine:
    """A `goodput engine` that listens."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str
    admin_url: str
    listening: dict[str, Any] = field(repr=False)

    def signal(self, number: int) -> None:
        """Send the process a signal."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for the end of the process and return its exit code."""
        return self.process.wait(PATIENCE_S)

    async def state(self) -> dict[str, Any]:
        """Return the engine's `/control/state`."""
        return await self.state_when(lambda _: True)

    async def state_when(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the engine's state once a condition holds for it."""
        async with aiohttp.ClientSession(self.admin_url) as admin, asyncio.timeout(PATIENCE_S):
            while True:
                async with admin.get("/control/state") as response:
                    state: dict[str, Any] = await response.json()
                if condition(state):
                    return state

    async def patch_limits(
        self, change: object, authorization: str | None = f"Bearer {CONTROL_TOKEN}"
    ) -> tuple[int, dict[str, Any]]:
        """Send `PATCH /control/limits`; return the status and the body of the response."""
        headers = {} if authorization is None else {"Authorization": authorization}
        async with (
            aiohttp.ClientSession(self.admin_url) as admin,
            admin.patch("/control/limits", json=change, headers=headers) as response,
        ):
            return response.status, await response.json()

    def stderr(self) -> str:
        """Return the text of the log."""
        return self.log.read_text(encoding="utf-8")


def engine_command(*arguments: str | Path) -> list[str]:
    """Return the command line of an engine of this installation."""
    return [sys.executable, "-m", "goodput_core", "engine", *map(str, arguments)]


class EngineStarter:
    """Starts engines with files in one folder, and ends them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(
        self, *options: str, environment: dict[str, str] | None = None, **manifest: Any
    ) -> RunningEngine:
        """Start an engine and wait until it listens; `manifest` as in `manifest_text`."""
        number = len(self._processes)
        path = self._folder / f"{number}.yaml"
        path.write_text(manifest_text(**manifest), encoding="utf-8")
        log = self._folder / f"{number}.log"
        command = engine_command("-f", path, "--port", "0", "--json", *options)
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "GOODPUT_CONTROL_TOKEN": CONTROL_TOKEN, **(environment or {})},
            )
        self._processes.append(process)
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
        line = process.stdout.readline() if ready else b""
        assert line, f"the engine did not listen: {log.read_text(encoding='utf-8')}"
        listening = json.loads(line)
        return RunningEngine(
            process=process,
            log=log,
            url=listening["url"],
            admin_url=listening["admin_url"],
            listening=listening,
        )

    def close(self) -> None:
        """End all engines."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(PATIENCE_S)
            finally:
                process.kill()
                for pipe in (process.stdin, process.stdout):
                    if pipe is not None:
                        pipe.close()


@pytest.fixture
def start_engine(tmp_path: Path) -> Iterator[StartEngine]:
    """Start engines for one test."""
    engines = EngineStarter(tmp_path)
    yield engines.start
    engines.close()


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """One engine for all tests that do not change it."""
    engines = EngineStarter(tmp_path_factory.mktemp("engine"))
    yield engines.start("--name", "replica-7", environment={"GOODPUT_REVISION": "r1"})
    engines.close()


@pytest.fixture
def run_engine(tmp_path: Path) -> RunEngine:
    """Run an engine that is expected to end by itself; `manifest` as in `manifest_text`."""

    def run(*options: str, **manifest: Any) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "chat.yaml"
        path.write_text(manifest_text(**manifest), encoding="utf-8")
        return subprocess.run(
            engine_command("-f", path, "--port", "0", *options),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    return run

"""`goodput up` as a separate process: its events, its log and its child processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterator

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "chat.yaml"
MARK = "STAND_IN_DIR"


@dataclass
class Up:
    """A running `goodput up --json`; a mark in the environment identifies its processes."""

    process: subprocess.Popen[str]
    mark: str
    logs: Path
    seen: list[dict[str, Any]] = field(default_factory=list)

    def event(self, name: str) -> dict[str, Any]:
        """Wait for the next event of this name; earlier events are in `seen`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event: dict[str, Any] = json.loads(line)
            self.seen.append(event)
            if event["event"] == name:
                return event
        raise AssertionError(f"ended without {name}: {self.seen}; {self.log()}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(timeout=60)

    def wait_for_log(self, text: str) -> None:
        """Wait until stderr contains a text."""
        deadline = time.monotonic() + 30
        while text not in self.log():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.01)  # the log is a file of another process

    def log(self) -> str:
        return self.logs.read_text(encoding="utf-8")

    def members(self) -> list[psutil.Process]:
        """Return the live processes with the mark, including `up` itself."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                pass
        return found

    def child(self, name: str) -> psutil.Process:
        """Return the process of the fleet with this name among its arguments."""
        (found,) = [p for p in psutil.Process(self.process.pid).children() if name in p.cmdline()]
        return found

    def left_behind(self) -> list[psutil.Process]:
        """Return the processes that still run ten seconds after `up` ended."""
        _, alive = psutil.wait_procs(self.members(), timeout=10)
        return alive


@pytest.fixture
def start_up(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    """Start `up` over stand-in children, whose behaviours are the keyword arguments."""
    started: list[Up] = []

    def start(
        *options: str,
        program: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        stderr_fd: int | None = None,
        **kinds: str,
    ) -> Up:
        behaviours = {name.replace("_", "-"): kind for name, kind in kinds.items()}
        logs = tmp_path / f"log-{len(started)}"
        command = program or (sys.executable, str(HERE / "children" / "up.py"))
        with logs.open("wb") as stderr:
            process = subprocess.Popen(
                [*command, "-f", str(EXAMPLE), "--port", "0", "--json", *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr if stderr_fd is None else stderr_fd,
                text=True,
                env={
                    **os.environ,
                    MARK: str(tmp_path),
                    "TMPDIR": str(tmp_path),  # `kill -9` leaves the private folder behind
                    "STAND_INS": json.dumps(behaviours),
                    **(env or {}),
                },
            )
        up = Up(process=process, mark=str(tmp_path), logs=logs)
        started.append(up)
        return up

    yield start
    for up in started:
        for process in up.members():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        up.process.wait(timeout=30)
        for stream in (up.process.stdin, up.process.stdout):
            if stream is not None:
                stream.close()

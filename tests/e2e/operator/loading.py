"""Requests to a service while something happens to those who look after it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from goodput_core.contract import METRIC_REQUESTS, PATH_METRICS
from goodput_core.errors import ExitCode
from goodput_operator.kube.objects import ADMIN_PORT
from goodput_replay.run.records import read_judged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.operator.installed import Installed

__all__ = ["under_load"]

_BIN = Path(sys.executable).parent
_PER_S = 3
_SHAPE = ("--duration", "20m", "--rate", str(_PER_S), "--burst-factor", "1")


@contextmanager
def under_load(
    installed: Installed, name: str, folder: Path, until: Callable[..., Any]
) -> Iterator[None]:
    """Replay a trace against a service for the length of the block; each answer must be whole.

    Args:
        installed: where the service is.
        name: of the service.
        folder: for the trace and the records.
        until: the fixture.
    """
    trace, out = folder / "load.parquet", folder / "load"
    synthesize = [str(_BIN / "goodput"), "trace", "synthesize", "--out", str(trace)]
    subprocess.run([*synthesize, *_SHAPE], capture_output=True, check=True)
    before = _answers(installed, name)
    replay = installed.replaying(name, out, "--trace", str(trace))

    def begins() -> bool:
        return _answers(installed, name) > before or replay.poll() is not None

    try:
        until(begins, "the first answer")
        begun = time.monotonic()
        yield
        lasted_s = time.monotonic() - begun
    finally:
        ended_early = replay.poll() is not None
        replay.send_signal(signal.SIGINT)
        said, _ = replay.communicate(timeout=60)
        assert not ended_early, said
    assert replay.returncode == ExitCode.INTERRUPTED, said
    records = [judged.record for judged in read_judged(out)]
    ended = [record for record in records if record.detail != "the run was stopped"]
    assert {record.outcome for record in ended} == {"ok"}, said
    # They come as they come: a few seconds may bring half of what is usual.
    assert len(ended) > lasted_s * _PER_S / 4, "requests were sent all the time"


def _answers(installed: Installed, name: str) -> float:
    """How many the routers count."""
    count = 0.0
    for pod in installed.pods(name, "router"):
        url = f"http://{pod['status']['podIP']}:{ADMIN_PORT}{PATH_METRICS}"
        asked = installed.own.inside("curl", "--silent", "--max-time", "5", url)
        text = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
        of_requests = (line for line in text.splitlines() if line.startswith(METRIC_REQUESTS))
        count += sum(float(line.rpartition(" ")[2]) for line in of_requests)
    return count

"""Clients of services in a cluster: port forwards, streamed completions, and a replay as load."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

from tools.cluster.handle import wait_for

from goodput_core.contract import METRIC_REQUESTS, PATH_METRICS, PATH_MODELS
from goodput_core.errors import ExitCode
from goodput_replay.runs.record_rows import read_judged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.cluster.handle import ClusterHandle
    from tools.e2e.installation import ChartRelease

__all__ = ["CompletionStreams", "PortForward", "PortForwards", "replay_load"]

_LOAD_PER_S = 3


class PortForward:
    """A `kubectl port-forward` from this machine to one pod of a service.

    Args:
        cluster: cluster of the service.
        namespace: namespace of the service.
        service: name of the service; requests go to its port 80.

    Raises:
        AssertionError: kubectl failed; the text is its output.
    """

    def __init__(self, cluster: ClusterHandle, namespace: str, service: str) -> None:
        words = ("port-forward", "-n", namespace, f"service/{service}", ":80")
        self._process = subprocess.Popen(
            [cluster.binaries / "kubectl", *words],
            env=cluster.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        first_line = self._output.readline()
        # kubectl prints a line for each connection and blocks when the pipe is full.
        self._reader = threading.Thread(target=self._output.read)
        self._reader.start()
        address = re.search(r"127\.0\.0\.1:\d+", first_line)
        if address is None:
            self.close()
            raise AssertionError(first_line)
        self.url = f"http://{address[0]}"

    def responds(self) -> bool:
        """True if a request succeeds; the forward may outlive its pod."""
        try:
            with urlopen(f"{self.url}{PATH_MODELS}", timeout=5):
                return True
        except OSError:
            return False

    def close(self) -> None:
        """Stop kubectl."""
        self._process.terminate()
        self._process.wait(timeout=30)
        self._reader.join()
        self._output.close()


class PortForwards:
    """Port forwards to the services of a namespace, one for each service.

    Args:
        cluster: cluster of the services.
        namespace: namespace of the services.
    """

    def __init__(self, cluster: ClusterHandle, namespace: str) -> None:
        self._cluster, self._namespace = cluster, namespace
        self._forwards: dict[str, PortForward] = {}

    def url(self, service: str) -> str:
        """Return the URL of a service on this machine."""
        forward = self._forwards.get(service)
        if forward is not None and not forward.responds():
            self._forwards.pop(service).close()
        if service not in self._forwards:
            self._forwards[service] = PortForward(self._cluster, self._namespace, service)
        return self._forwards[service].url

    def close(self) -> None:
        """Close all forwards."""
        for forward in self._forwards.values():
            forward.close()
        self._forwards.clear()


class CompletionStreams:
    """Streamed completions of a `client_process.py burst`.

    Args:
        process: the client process.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._outcomes: list[str] = []

    def wait_for_first_tokens(self, count: int) -> None:
        """Wait until each of `count` requests has its first token or has ended."""
        assert self._process.stdout is not None
        begun: set[int] = set()
        while len(begun) < count:
            event = json.loads(self._process.stdout.readline())
            begun.add(event["request"])
            self._outcomes += [event["outcome"]] if "outcome" in event else []

    def outcomes(self, timeout_s: float = 120) -> list[str]:
        """Wait for the end of all requests; each outcome is `done` or an error code."""
        output, _ = self._process.communicate(timeout=timeout_s)
        events = [json.loads(line) for line in output.splitlines()]
        return self._outcomes + [event["outcome"] for event in events if "outcome" in event]

    def running(self) -> bool:
        """True if a request has not ended."""
        return self._process.poll() is None


@contextmanager
def replay_load(
    installation: ChartRelease,
    name: str,
    folder: Path,
    *,
    rate_per_s: int = _LOAD_PER_S,
    lengths: tuple[int, int] | None = None,
) -> Iterator[None]:
    """Replay a constant load against a service during the block; every request must succeed.

    Args:
        installation: installation of the service.
        name: name of the service.
        folder: folder for the trace and the run.
        rate_per_s: mean requests per second.
        lengths: prompt and output tokens of each request; None for a synthesized trace with
            sessions and two classes.
    """
    out = folder / "load"
    span = ("--duration", "20m", "--rate")
    if lengths is None:
        trace = str(folder / "load.parquet")
        goodput = str(Path(sys.executable).parent / "goodput")
        subprocess.run(
            [
                *(goodput, "trace", "synthesize", "--out", trace),
                *(*span, str(rate_per_s), "--burst-factor", "1"),
            ],
            capture_output=True,
            check=True,
        )
        load = ["--trace", trace]
    else:
        prompt, output = map(str, lengths)
        load = [*span, f"{rate_per_s}/s", "--input-tokens", prompt, "--output-tokens", output]
    before = _counted_requests(installation, name)
    replay = installation.start_replay(name, out, *load)
    try:
        wait_for(
            lambda: _counted_requests(installation, name) > before or replay.poll() is not None,
            "the first response",
        )
        begun = time.monotonic()
        yield
        lasted_s = time.monotonic() - begun
    finally:
        ended_early = replay.poll() is not None
        replay.send_signal(signal.SIGINT)
        output, _ = replay.communicate(timeout=120)
        assert not ended_early, output
    assert replay.returncode == ExitCode.INTERRUPTED, output
    records = [judged.record for judged in read_judged(out)]
    ended = [record for record in records if record.detail != "the run was stopped"]
    assert {record.outcome for record in ended} == {"ok"}, output
    # Arrivals are random: a few seconds may have half of the mean rate.
    sent = sum(record.sent_ns is not None for record in records)
    assert sent > lasted_s * rate_per_s / 4, "requests were sent all the time"


def _counted_requests(installation: ChartRelease, name: str) -> float:
    """Return the requests that the routers have counted."""
    count = 0.0
    for pod in installation.pods(name, "router"):
        try:
            metrics = installation.read_admin(pod, PATH_METRICS)
        except subprocess.CalledProcessError:  # the router starts or stops
            continue
        lines = (line for line in metrics.splitlines() if line.startswith(METRIC_REQUESTS))
        count += sum(float(line.rpartition(" ")[2]) for line in lines)
    return count

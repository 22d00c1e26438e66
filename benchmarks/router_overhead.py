"""The cost of the router: added latency and CPU seconds per 1,000 streamed requests.

    python benchmarks/router_overhead.py            # 50, 200 and 400 requests/s, 10 s each
    python benchmarks/router_overhead.py --policy prefix-affinity

A mock replica streams 16 tokens per response at fixed times. An open loop sends the same requests
directly and through `goodput router`, which runs in a separate process. The differences of TTFT and
E2E latency are the router's overhead. All processes share this machine's cores, so a busy machine
raises both latencies.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import psutil
import uvloop

HERE = Path(__file__).parent
MANIFEST = HERE.parent / "examples" / "chat.yaml"
TOKENS = 16
REQUEST_BODY = json.dumps({"model": "mock", "prompt": "word " * 200, "stream": True}).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Results of one rate; milliseconds are the difference between routed and direct requests."""

    requests_per_s: int
    requests: int
    failed: int
    added_ttft_p50_ms: float
    added_ttft_p99_ms: float
    added_e2e_p50_ms: float
    added_e2e_p99_ms: float
    cpu_s_per_1000: float
    rss_mib: float


class Connection(asyncio.Protocol):
    """One connection of the client; it times the first byte and the end of a response."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._transport: asyncio.Transport | None = None
        self._due = 0.0
        self._first = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports implement asyncio.Transport without being subclasses.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, _error: Exception | None) -> None:
        if self._due:
            self._load.failed += 1
            self._load.finished()
        self._transport = None

    @property
    def usable(self) -> bool:
        return self._transport is not None

    def send(self, due: float, request: bytes) -> None:
        self._due, self._first = due, 0.0
        assert self._transport is not None
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self._first:
            self._first = now
            if not data.startswith(b"HTTP/1.1 200"):
                self._load.failed += 1
        if data.endswith(b"0\r\n\r\n"):
            self._load.ttft.append(self._first - self._due)
            self._load.e2e.append(now - self._due)
            self._due = 0.0
            self._load.idle.append(self)
            self._load.finished()


class Load:
    """An open loop at one rate: sends do not wait for responses."""

    def __init__(self, url: str, body: bytes = REQUEST_BODY) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._host, self._port = host, int(port)
        self._request = (
            b"POST /v1/completions HTTP/1.1\r\nHost: mock\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body)
        ) + body
        self.idle: deque[Connection] = deque()
        self.ttft: list[float] = []
        self.e2e: list[float] = []
        self.failed = 0
        self._left = 0
        self._done = asyncio.Event()

    def finished(self) -> None:
        self._left -= 1
        if not self._left:
            self._done.set()

    async def run(self, requests_per_s: int, requests: int) -> None:
        self._left = requests
        self._done.clear()
        start = time.perf_counter() + 0.05
        opening = set()
        for number in range(requests):
            due = start + number / requests_per_s
            await asyncio.sleep(due - time.perf_counter())
            while self.idle and not self.idle[-1].usable:
                self.idle.pop()
            if self.idle:
                self.idle.pop().send(due, self._request)
            else:
                task = asyncio.create_task(self._open(due))
                opening.add(task)
                task.add_done_callback(opening.discard)
        async with asyncio.timeout(60):
            await self._done.wait()

    async def _open(self, due: float) -> None:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: Connection(self), self._host, self._port
        )
        connection.send(due, self._request)


def start_process(command: list[str]) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    return process, str(json.loads(process.stdout.readline())["url"])


async def until_ready(url: str) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    for _ in range(200):
        await asyncio.sleep(0.05)
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
        except ConnectionRefusedError:
            continue
        writer.write(b"GET /health/ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        response = await reader.read()
        writer.close()
        if response.startswith(b"HTTP/1.1 200"):
            return
    raise SystemExit(f"{url} did not become ready")


async def measure(mock: str, router: str, pid: int, rate: int, seconds: float) -> Row:
    requests = int(rate * seconds)
    process = psutil.Process(pid)
    direct, routed = Load(mock), Load(router)
    # The first requests open the connections and are not measured.
    for load in (direct, routed):
        await load.run(rate, max(1, rate // 2))
        load.ttft.clear()
        load.e2e.clear()
        load.failed = 0
    await direct.run(rate, requests)
    before = process.cpu_times()
    await routed.run(rate, requests)
    after = process.cpu_times()
    cpu_s = after.user + after.system - before.user - before.system

    def added(a: list[float], b: list[float], share: float) -> float:
        return round((at(b, share) - at(a, share)) * 1000, 3)

    return Row(
        requests_per_s=rate,
        requests=requests,
        failed=direct.failed + routed.failed,
        added_ttft_p50_ms=added(direct.ttft, routed.ttft, 0.50),
        added_ttft_p99_ms=added(direct.ttft, routed.ttft, 0.99),
        added_e2e_p50_ms=added(direct.e2e, routed.e2e, 0.50),
        added_e2e_p99_ms=added(direct.e2e, routed.e2e, 0.99),
        cpu_s_per_1000=round(cpu_s * 1000 / requests, 3),
        rss_mib=round(process.memory_info().rss / 2**20, 1),
    )


def at(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def run(options: argparse.Namespace) -> list[Row]:
    mock, mock_url = start_process(
        [str(HERE / "stand_ins" / "mock_server.py"), "--tokens", str(TOKENS)]
    )
    command = ["-m", "goodput_core", "router", "-f", str(MANIFEST), "--port", "0", "--json"]
    router, router_url = start_process(
        [*command, "--policy", options.policy, "--upstream", f"mock={mock_url}"]
    )
    try:
        await until_ready(router_url)
        return [
            await measure(mock_url, router_url, router.pid, rate, options.seconds)
            for rate in options.rates
        ]
    finally:
        for process in (router, mock):
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=30)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=int, nargs="+", default=[50, 200, 400])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--policy", default="least-loaded", help="placement (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one rate, two seconds")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.rates, options.seconds = [100], 2.0
    rows = uvloop.run(run(options))
    if options.json:
        print(json.dumps({"cores": os.cpu_count(), "rows": [asdict(r) for r in rows]}, indent=2))
        return 0
    print(
        f"{TOKENS} tokens per response, {os.cpu_count()} cores shared with the client and the mock"
    )
    print("   req/s  failed  added TTFT p50/p99 ms  added E2E p50/p99 ms  CPU s/1,000  RSS MiB")
    for row in rows:
        print(
            f"{row.requests_per_s:8d}{row.failed:8d}"
            f"{row.added_ttft_p50_ms:14.2f}/{row.added_ttft_p99_ms:<9.2f}"
            f"{row.added_e2e_p50_ms:12.2f}/{row.added_e2e_p99_ms:<9.2f}"
            f"{row.cpu_s_per_1000:11.3f}{row.rss_mib:9.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

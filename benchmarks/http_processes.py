"""Tokens per second of an engine whose HTTP processes, one or several, are full.

    python -m benchmarks.http_processes                    # one and two processes, three repeats
    python -m benchmarks.http_processes --processes 1,2,4 --seconds 10

The emulated device takes one millisecond for every step, so the streams of a full batch need more
tokens per second than one HTTP process can write. A client keeps the batch full and reads what
arrives. It runs on the same machine, as does the core, so the machine needs more cores than HTTP
processes and these two. The table has the CPU time of each, and with it the rate at which an HTTP
process would use one core completely.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import psutil
import uvloop
import yaml
from benchmarks.router_overhead import MANIFEST, start_process, until_ready
from benchmarks.streams import cpu_s

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """One run; CPU times are microseconds per token.

    Args:
        processes: number of HTTP processes.
        tokens_per_s: tokens that the client received per second.
        busiest: share of the tokens' HTTP processing time of the busiest process.
        http_us: CPU time of all HTTP processes.
        core_us: CPU time of the core process.
        client_us: CPU time of the client.
    """

    processes: int
    tokens_per_s: float
    busiest: float
    http_us: float
    core_us: float
    client_us: float


class _Stream(asyncio.Protocol):
    """A connection that requests the next stream when one has ended."""

    def __init__(self, request: bytes) -> None:
        self.ended = 0
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports implement asyncio.Transport without being subclasses.
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if data.endswith(b"0\r\n\r\n"):
            self.ended += 1
            self._transport.write(self._request)


async def _measure(processes: int, options: argparse.Namespace, folder: Path) -> Throughput:
    service = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))
    service["spec"]["engine"] = {"policy": "sarathi", "maxNumSeqs": options.streams}
    manifest = folder / "chat.yaml"
    manifest.write_text(yaml.safe_dump(service), encoding="utf-8")
    process, url = start_process(
        [
            *("-m", "goodput_core", "engine", "-f", str(manifest), "--device", "unit"),
            *("--port", "0", "--json", "--http-processes", f"{processes}"),
        ]
    )
    try:
        await until_ready(url)
        leader = psutil.Process(process.pid)
        children = leader.children()
        core = [one for one in children if "goodput_engine.core.process" in one.cmdline()]
        http = [leader, *(one for one in children if one not in core)]
        client = [psutil.Process()]
        body = {"model": "chat", "prompt": "x", "stream": True}
        body |= {"max_tokens": options.tokens, "ignore_eos": True}
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        request = head.encode() + data
        host, _, port = url.removeprefix("http://").partition(":")
        loop = asyncio.get_running_loop()
        pairs = [
            await loop.create_connection(lambda: _Stream(request), host, int(port))
            for _ in range(options.streams)
        ]

        def counters() -> tuple[float, int, list[float], float, float]:
            ended = sum(stream.ended for _, stream in pairs)
            each = [cpu_s([one]) for one in http]
            return time.monotonic(), ended, each, cpu_s(core), cpu_s(client)

        await asyncio.sleep(options.seconds / 4)
        began_s, ended, http_s, core_s, client_s = counters()
        await asyncio.sleep(options.seconds)
        now_s, now_ended, now_http_s, now_core_s, now_client_s = counters()
        for transport, _ in pairs:
            transport.abort()
        tokens = (now_ended - ended) * options.tokens
        used = [new - old for new, old in zip(now_http_s, http_s, strict=True)]
        return Throughput(
            processes=processes,
            tokens_per_s=round(tokens / (now_s - began_s)),
            busiest=round(max(used) / sum(used), 2),
            http_us=round(sum(used) * 1e6 / tokens, 2),
            core_us=round((now_core_s - core_s) * 1e6 / tokens, 2),
            client_us=round((now_client_s - client_s) * 1e6 / tokens, 2),
        )
    finally:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table of medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", default="1,2", help="numbers, with commas (%(default)s)")
    parser.add_argument("--streams", type=int, default=100, help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="of a stream (%(default)s)")
    parser.add_argument("--seconds", type=float, default=5, help="of a run (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one repeat of one second")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all runs as JSON")
    options = parser.parse_args(argv)
    if options.quick:
        options.seconds, options.repeats = 1, 1
    numbers = [int(one) for one in options.processes.split(",")]
    runs: list[Throughput] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in numbers * options.repeats:
            runs += [uvloop.run(_measure(number, options, Path(folder)))]
    if options.json is not None:
        document = {"cores": os.cpu_count(), "runs": [asdict(one) for one in runs]}
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    print("processes  tokens/s     min     max  busiest  us/token: http  core  client")
    for number in numbers:
        group = [one for one in runs if one.processes == number]
        rates = sorted(one.tokens_per_s for one in group)

        def median(name: str, group: list[Throughput] = group) -> float:
            return float(statistics.median(getattr(one, name) for one in group))

        print(
            f"{number:9}{statistics.median(rates):10,.0f}{rates[0]:8,.0f}{rates[-1]:8,.0f}"
            f"{median('busiest'):9.2f}{median('http_us'):16.2f}{median('core_us'):6.2f}"
            f"{median('client_us'):8.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

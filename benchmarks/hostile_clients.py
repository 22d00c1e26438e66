"""Normal clients of a real model beside thousands of idle, half-sent and unread connections.

A service is started with `goodput up` from a manifest with `file://`. The same load is replayed to
its router twice: alone, and while hostile clients keep connections open. Three of five of these
connections never send a byte, one of five stops within the head of a request, and one within its
body. Connections that the router closes are opened again. Further clients start long streams and
never read them: they are requests like others for the model, and begin before the load.

The benchmark fails if the normal clients do not keep the objective of the manifest beside the
hostile ones.

    make smollm2
    python -m benchmarks.hostile_clients
    python -m benchmarks.hostile_clients --quick    # 500 connections, one short load
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import psutil
from benchmarks.comparison.arguments import positive_count
from benchmarks.model_servers import MANIFEST, RunningServer, measure
from tools.smollm2 import model_folder

from goodput_core.process import raise_open_files
from goodput_core.slo.record import Outcome
from goodput_replay.runs.summary import read_summary
from goodput_replay.sending.local_service import running_service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from benchmarks.model_servers import ServedRun

MODEL: Final = "smollm2"
HALF_HEAD: Final = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le"
HALF_BODY: Final = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b'Content-Length: 1000\r\n\r\n{"model": "smollm2", "prompt": "'
)
SENT: Final = (b"", b"", b"", HALF_HEAD, HALF_BODY)
"""Bytes that a connection sends, by its number."""
OPENED_TOGETHER: Final = 100
CHECKED_S: Final = 1.0
UNREAD_BYTES: Final = 2048
"""Receive buffer of a client that never reads."""
OTHER_FILES: Final = 256


@dataclass(slots=True)
class HostileCounts:
    """Numbers of hostile connections.

    Args:
        opened: those that were opened, also again.
        closed: those that the router closed.
        refused: those that could not be opened.
        least_open: the smallest number that was open at a check.
    """

    opened: int = 0
    closed: int = 0
    refused: int = 0
    least_open: int = 0


class _Connection(asyncio.Protocol):
    """A connection that sends a part of a request, and ignores what it receives."""

    def __init__(self, sent: bytes, counts: HostileCounts) -> None:
        self._sent, self._counts = sent, counts
        self.transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.transport = transport
        self._counts.opened += 1
        if self._sent:
            transport.write(self._sent)

    def connection_lost(self, _error: Exception | None) -> None:
        self._counts.closed += self.transport is not None
        self.transport = None

    def close(self) -> None:
        transport, self.transport = self.transport, None
        if transport is not None:
            transport.close()


class HostileClients:
    """Connections that are kept open.

    Args:
        host: host of the router.
        port: its port.
        count: number of connections.
        reopened_per_s: connections that are opened again in a second, at most.
    """

    def __init__(self, host: str, port: int, *, count: int, reopened_per_s: int) -> None:
        self._address = host, port
        self._reopened = reopened_per_s
        self.counts = HostileCounts()
        self._all = [_Connection(SENT[at % len(SENT)], self.counts) for at in range(count)]

    async def open(self) -> None:
        """Open every connection once."""
        for at in range(0, len(self._all), OPENED_TOGETHER):
            await self._connect(self._all[at : at + OPENED_TOGETHER])
        self.counts.least_open = self._open()

    async def keep(self) -> None:
        """Open closed connections again, until this task is cancelled."""
        while True:
            await asyncio.sleep(CHECKED_S)
            self.counts.least_open = min(self.counts.least_open, self._open())
            closed = [one for one in self._all if one.transport is None]
            for at in range(0, min(len(closed), self._reopened), OPENED_TOGETHER):
                await self._connect(closed[at : min(at + OPENED_TOGETHER, self._reopened)])

    def close(self) -> None:
        """Close every connection."""
        for one in self._all:
            one.close()

    def _open(self) -> int:
        return sum(one.transport is not None for one in self._all)

    async def _connect(self, some: Sequence[_Connection]) -> None:
        loop = asyncio.get_running_loop()
        results = await asyncio.gather(
            *(loop.create_connection(lambda one=one: one, *self._address) for one in some),  # type: ignore[misc]
            return_exceptions=True,
        )
        self.counts.refused += sum(isinstance(result, OSError) for result in results)


def open_unread_stream(host: str, port: int, number: int, tokens: int) -> socket.socket:
    """Start a stream whose response is never read.

    Each event has the alternatives of its token, so that the buffers of the connection fill soon.
    """
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UNREAD_BYTES)
    client.connect((host, port))
    body = json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"Tell me {number} stories."}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "logprobs": True,
            "top_logprobs": 20,
            "stream": True,
        }
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    return client


@asynccontextmanager
async def hostile(url: str, options: argparse.Namespace) -> AsyncIterator[HostileCounts]:
    """Keep hostile clients connected to a router within the block."""
    address = urlsplit(url)
    host, port = address.hostname or "", address.port or 0
    clients = HostileClients(
        host, port, count=options.connections, reopened_per_s=options.reopened_per_s
    )
    unread = [
        open_unread_stream(host, port, at, options.unread_tokens) for at in range(options.unread)
    ]
    try:
        await clients.open()
        keeping = asyncio.ensure_future(clients.keep())
        try:
            yield clients.counts
        finally:
            keeping.cancel()
    finally:
        clients.close()
        for client in unread:
            client.close()


async def compare(options: argparse.Namespace) -> tuple[ServedRun, ServedRun, bool, HostileCounts]:
    """Replay the load alone and beside hostile clients.

    Returns:
        Both results, True if the objective was kept in the second, and the counts.
    """
    with tempfile.TemporaryDirectory() as temporary:
        where = Path(temporary)
        async with AsyncExitStack() as stack:
            running = await stack.enter_async_context(
                running_service(
                    MANIFEST,
                    device=None,
                    log=where / "log",
                    decisions=where / "decisions",
                    report=print,
                )
            )
            (process,) = psutil.Process().children()
            server = RunningServer(url=running.url, model=MODEL, process=process)
            results: list[ServedRun] = []
            for name in ("alone", "beside hostile clients"):
                if results:
                    counts = await stack.enter_async_context(hostile(running.url, options))
                results.append(
                    await asyncio.to_thread(
                        measure, name, server, options.rate, options, where / name.split()[0]
                    )
                )
        overall = read_summary(where / "beside").overall
        alone, beside = results
        return alone, beside, overall.good * 100 >= options.objective * overall.total, counts


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a table."""
    options = _parser().parse_args(argv)
    if find_spec("torch") is None or not model_folder().exists():
        print("not run: torch or the model is missing; `make smollm2` installs both")
        return 0
    if options.quick:
        options.connections, options.seconds, options.unread = 500, 10, 2
    needed, limit = options.connections + options.unread + OTHER_FILES, raise_open_files()
    if limit < needed:
        print(f"--connections: they need {needed} open files, but the hard limit is {limit}")
        return 64
    alone, beside, kept, counts = asyncio.run(compare(options))
    print(
        "| normal clients | good | other outcomes | TTFT p50, ms | TTFT p99, ms | TPOT p50, ms "
        "| CPU s of the service | memory, MiB |\n"
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |"
    )
    for run in (alone, beside):
        print(_row(run))
    print(
        f"hostile connections: {counts.opened:,} opened, {counts.closed:,} closed by the router, "
        f"{counts.refused:,} refused, at least {counts.least_open:,} open; "
        f"{options.unread} streams never read"
    )
    return 0 if kept else 1


def _row(run: ServedRun) -> str:
    others = [f"{count} {name}" for name, count in run.outcomes.items() if name != Outcome.OK]
    times = [
        "–" if value is None else f"{value:,.0f}"
        for value in (run.ttft_p50_ms, run.ttft_p99_ms, run.tpot_p50_ms)
    ]
    cells = [
        run.server,
        f"{run.good} of {run.requests}",
        ", ".join(others) or "none",
        *times,
        f"{run.cpu_s:.1f}",
        f"{run.memory_mib:,.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--connections", type=positive_count, default=10_000, help="that send no request (10000)"
    )
    parser.add_argument(
        "--reopened-per-s", type=positive_count, default=200, metavar="N",
        help="closed connections that are opened again in a second (200)",
    )  # fmt: skip
    parser.add_argument(
        "--unread", type=positive_count, default=4, help="streams that are never read (4)"
    )
    parser.add_argument(
        "--unread-tokens", type=positive_count, default=2000, help="of each such stream (2000)"
    )
    parser.add_argument("--rate", default="40/m", help="of the normal requests (40/m)")
    parser.add_argument("--seconds", type=positive_count, default=90, help="of each load (90)")
    parser.add_argument(
        "--objective", type=int, default=95, help="per cent of the normal requests (95)"
    )
    parser.add_argument("--input-tokens", default="64~60%", help="(64~60%%)")
    parser.add_argument("--output-tokens", default="16~60%", help="(16~60%%)")
    parser.add_argument("--quick", action="store_true", help="500 connections, one short load")
    return parser


if __name__ == "__main__":
    sys.exit(main())

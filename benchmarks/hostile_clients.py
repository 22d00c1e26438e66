"""Normal clients of a real model beside hostile connections, and beside bad requests.

A service is started with `goodput up` from a manifest with `file://`. The same load is replayed to
its router three times:

- *alone*;
- *beside bad requests*, each of which must be rejected: malformed, too large, with unknown fields,
  wrong types, or a `response_format` that cannot be compiled. The kinds are sent in turn at a fixed
  rate that does not depend on the responses;
- *beside hostile connections*, which are kept open. Three of five never send a byte, one of five
  stops within the head of a request, and one within its body. Connections that the router closes
  are opened again. Further clients start long streams and never read them: they are requests like
  others for the model, and begin before the load.

The benchmark fails if the normal clients do not keep the objective of the manifest beside the
others, or if a bad request gets another status than the expected one.

    make smollm2
    python -m benchmarks.hostile_clients
    python -m benchmarks.hostile_clients --quick    # 500 connections, short loads
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import socket
import sys
import tempfile
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import psutil
from benchmarks.comparison.arguments import positive_count
from benchmarks.model_servers import MANIFEST, RunningServer, ServedRun, measure
from tools.smollm2 import model_folder

from goodput_core.process import raise_open_files
from goodput_core.slo.record import Outcome
from goodput_replay.runs.summary import read_summary
from goodput_replay.sending.local_service import running_service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

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
NO_STATUS: Final = "closed"
BAD_TIMEOUT_S: Final = 60
PIECE_BYTES: Final = 1 << 16
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRequest:
    """A request that must be rejected.

    Args:
        kind: the reason.
        body: its body.
        status: the expected status.
        chunked: True to send the body in chunks, so that its length is not announced.
    """

    kind: str
    body: bytes
    status: int = 400
    chunked: bool = False

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of the request."""
        length = "Transfer-Encoding: chunked"
        if not self.chunked:
            length = f"Content-Length: {len(self.body)}"
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json"
        yield f"{head}\r\n{length}\r\n\r\n".encode()
        for at in range(0, len(self.body), PIECE_BYTES):
            piece = self.body[at : at + PIECE_BYTES]
            yield b"%x\r\n%b\r\n" % (len(piece), piece) if self.chunked else piece
        if self.chunked:
            yield b"0\r\n\r\n"


@dataclass(slots=True)
class BadResponses:
    """The responses to one kind of bad requests.

    Args:
        statuses: number of responses by status; `NO_STATUS` without a response.
        slowest_s: time of the slowest one.
    """

    statuses: Counter[int | str] = field(default_factory=Counter)
    slowest_s: float = 0


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


def bad_requests(model: str) -> list[BadRequest]:
    """Return one request of each kind for a chat model."""

    def body(content: str = "Hello", **fields: Any) -> bytes:
        chat = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 4}
        return json.dumps(chat | fields).encode()

    def of_schema(schema: dict[str, Any]) -> bytes:
        described = {"name": "x", "schema": schema}
        return body(response_format={"type": "json_schema", "json_schema": described})

    many: dict[str, Any] = {
        f"p{at}": {"type": "string", "pattern": f"(a|b)*c(a|b){{{at}}}"} for at in range(1000)
    }
    return [
        BadRequest(kind="truncated JSON", body=body()[:-1]),
        BadRequest(kind="no object: 100,000 opening brackets", body=b"[" * 100_000),
        BadRequest(kind="invalid UTF-8", body=body("?").replace(b"?", b"\xff")),
        BadRequest(kind="40 MiB", body=body("x" * (40 * MIB)), status=413),
        BadRequest(
            kind="40 MiB, length not announced",
            body=body("x" * (40 * MIB)),
            status=413,
            chunked=True,
        ),
        BadRequest(kind="4 MiB", body=body("x" * (4 * MIB)), status=413),
        BadRequest(kind="20,000 words", body=body("word " * 20_000)),
        BadRequest(kind="unknown field", body=body(temprature=1)),
        BadRequest(kind="wrong type", body=body(max_tokens="ten")),
        BadRequest(kind="NaN as the temperature", body=body(temperature=float("nan"))),
        BadRequest(kind="1,000 stop strings", body=body(stop=[str(at) for at in range(1000)])),
        BadRequest(kind="unknown model", body=body(model="other"), status=404),
        BadRequest(
            kind="`response_format` of the type `xml`", body=body(response_format={"type": "xml"})
        ),
        BadRequest(
            kind="schema with a reference that does not exist",
            body=of_schema({"$ref": "#/nowhere"}),
        ),
        BadRequest(
            kind="schema with an invalid pattern",
            body=of_schema({"type": "string", "pattern": "("}),
        ),
        BadRequest(
            kind="schema of 60 KB with an invalid pattern at its end",
            body=of_schema({"properties": many | {"x": {"type": "string", "pattern": "("}}}),
        ),
    ]


class BadClient:
    """Sends bad requests in turn, each on a connection of its own.

    Args:
        host: host of the router.
        port: its port.
        per_s: requests in a second.
        model: name of the model.

    Attributes:
        responses: those to each kind of requests.
    """

    def __init__(self, host: str, port: int, *, per_s: int, model: str = MODEL) -> None:
        self._address = host, port
        self._per_s = per_s
        self._requests = bad_requests(model)
        self.responses = {one.kind: BadResponses() for one in self._requests}

    async def send(self) -> None:
        """Send requests at a fixed rate, until this task is cancelled."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        async with asyncio.TaskGroup() as tasks:
            for number in itertools.count():
                await asyncio.sleep(began_s + number / self._per_s - loop.time())
                tasks.create_task(self._exchange(self._requests[number % len(self._requests)]))

    def unexpected(self) -> list[str]:
        """Return the kinds that got another status than the expected one, or no response."""
        return [
            one.kind
            for one in self._requests
            if set(self.responses[one.kind].statuses) != {one.status}
        ]

    async def _exchange(self, request: BadRequest) -> None:
        began_s = asyncio.get_running_loop().time()
        status: int | str = NO_STATUS
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(BAD_TIMEOUT_S):
                status = await self._status(request)
        responses = self.responses[request.kind]
        responses.statuses[status] += 1
        took_s = asyncio.get_running_loop().time() - began_s
        responses.slowest_s = max(responses.slowest_s, took_s)

    async def _status(self, request: BadRequest) -> int | str:
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            line = asyncio.ensure_future(reader.readline())
            with suppress(ConnectionError):
                for piece in request.pieces():
                    if line.done():
                        break
                    writer.write(piece)
                    await writer.drain()
            words = (await line).split()
            return int(words[1]) if len(words) > 1 else NO_STATUS
        finally:
            writer.transport.abort()


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


@asynccontextmanager
async def bad(url: str, options: argparse.Namespace) -> AsyncIterator[BadClient]:
    """Send bad requests to a router within the block."""
    address = urlsplit(url)
    client = BadClient(address.hostname or "", address.port or 0, per_s=options.bad_per_s)
    sending = asyncio.ensure_future(client.send())
    try:
        yield client
    finally:
        sending.cancel()
        await asyncio.wait([sending])
    if not sending.cancelled():
        sending.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRuns:
    """The results.

    Args:
        runs: the load alone, beside bad requests, and beside hostile connections.
        kept: True if the objective was kept in the last two.
        bad: client that sent the bad requests.
        connections: counts of the hostile connections.
    """

    runs: list[ServedRun]
    kept: bool
    bad: BadClient
    connections: HostileCounts


async def compare(options: argparse.Namespace) -> ComparedRuns:
    """Replay the load alone, beside bad requests, and beside hostile connections."""
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

            async def replayed(name: str) -> ServedRun:
                folder = where / name.replace(" ", "-")
                return await asyncio.to_thread(measure, name, server, options.rate, options, folder)

            runs = [await replayed("alone")]
            async with bad(running.url, options) as client:
                runs.append(await replayed("beside bad requests"))
            async with hostile(running.url, options) as counts:
                runs.append(await replayed("beside hostile connections"))
        summaries = [read_summary(where / run.server.replace(" ", "-")) for run in runs[1:]]
        kept = all(
            one.overall.good * 100 >= options.objective * one.overall.total for one in summaries
        )
        return ComparedRuns(runs=runs, kept=kept, bad=client, connections=counts)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print the tables."""
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
    result = asyncio.run(compare(options))
    print(
        "| normal clients | good | other outcomes | TTFT p50, ms | TTFT p99, ms | TPOT p50, ms "
        "| CPU s of the service | memory, MiB |\n"
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |"
    )
    for run in result.runs:
        print(_row(run))
    print("\n| bad request | sent | status | slowest response, ms |\n| --- | ---: | --- | ---: |")
    for kind, one in result.bad.responses.items():
        statuses = ", ".join(f"{status}" for status in one.statuses)
        print(f"| {kind} | {one.statuses.total()} | {statuses} | {one.slowest_s * 1000:,.0f} |")
    counts = result.connections
    print(
        f"\nhostile connections: {counts.opened:,} opened, {counts.closed:,} closed by the router, "
        f"{counts.refused:,} refused, at least {counts.least_open:,} open; "
        f"{options.unread} streams never read"
    )
    unexpected = result.bad.unexpected()
    if unexpected:
        print(f"another status than the expected one: {', '.join(unexpected)}")
    return 0 if result.kept and not unexpected else 1


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
    parser.add_argument(
        "--bad-per-s", type=positive_count, default=16, metavar="N",
        help="bad requests in a second, of each kind in turn (16)",
    )  # fmt: skip
    parser.add_argument("--rate", default="40/m", help="of the normal requests (40/m)")
    parser.add_argument("--seconds", type=positive_count, default=90, help="of each load (90)")
    parser.add_argument(
        "--objective", type=int, default=95, help="per cent of the normal requests (95)"
    )
    parser.add_argument("--input-tokens", default="64~60%", help="(64~60%%)")
    parser.add_argument("--output-tokens", default="16~60%", help="(16~60%%)")
    parser.add_argument("--quick", action="store_true", help="500 connections, short loads")
    return parser


if __name__ == "__main__":
    sys.exit(main())

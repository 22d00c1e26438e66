"""A router in the test's event loop, in front of replicas that may violate HTTP in any way."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest
from tests.builders.http import PATIENCE_S
from yarl import URL

from goodput_core.contract import ENV_REPLICA
from goodput_core.slo.targets import SLOClass
from goodput_core.spec.choices import RouterPolicy
from goodput_core.units import NS_PER_S
from goodput_engine.router.service import RouterService
from goodput_engine.router.settings import ProbeSettings, RouterSettings
from goodput_engine.router.upstreams import Upstream

if TYPE_CHECKING:
    import ssl

MANIFEST = Path(__file__).parents[3] / "examples" / "chat.yaml"
TOKEN = b'data: {"choices":[{"index":0,"text":"x","finish_reason":null}]}\n\n'
END = b'data: {"choices":[{"index":0,"text":"","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


@dataclass
class Call:
    """One request at a replica, and the methods to respond to it."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    writer: asyncio.StreamWriter
    connection: int
    hung_up: asyncio.Event

    def header(self, name: str) -> str | None:
        return next((v for k, v in self.headers if k.lower() == name.lower()), None)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self, status: str = "200 OK", *headers: str) -> None:
        lines = [f"HTTP/1.1 {status}", *headers]
        await self.send("\r\n".join(lines).encode() + b"\r\n\r\n")

    async def stream_head(self) -> None:
        await self.head("200 OK", "Content-Type: text/event-stream", "Transfer-Encoding: chunked")

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def end(self) -> None:
        await self.send(b"0\r\n\r\n")

    async def whole(
        self, status: str, body: bytes, *headers: str, content_type: str = "application/json"
    ) -> None:
        await self.head(
            status, f"Content-Type: {content_type}", f"Content-Length: {len(body)}", *headers
        )
        await self.send(body)

    def reset(self) -> None:
        self.writer.transport.abort()


Behaviour = Callable[[Call], Awaitable[None]]


def stream(*steps: bytes | asyncio.Event) -> Behaviour:
    """Send a stream of these chunks; wait at an event until it is set."""

    async def behave(call: Call) -> None:
        await call.stream_head()
        for step in steps:
            if isinstance(step, asyncio.Event):
                await step.wait()
            else:
                await call.chunk(step)
        await call.end()

    return behave


def respond(
    status: str, body: bytes, *headers: str, content_type: str = "application/json"
) -> Behaviour:
    """Send a response that is not streamed."""
    return lambda call: call.whole(status, body, *headers, content_type=content_type)


async def hang(_: Call) -> None:
    """Never respond."""
    await asyncio.Event().wait()


class FakeReplica:
    """A replica made of plain sockets; `behave` responds to completions."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.behave: Behaviour = stream(TOKEN, TOKEN, TOKEN, END)
        self.ready = True
        self.silent = False
        self.state: bytes = b"{}"
        # Closed, so that a test's first request opens a connection of its own.
        self.probe_headers = ["Connection: close"]
        self.may_report = asyncio.Event()
        self.may_report.set()
        self.state_requests = 0
        self.calls: list[Call] = []
        self.arrived: asyncio.Queue[Call] = asyncio.Queue()
        self._server: asyncio.Server | None = None
        self._connections = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.tls: ssl.SSLContext | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def upstream(self) -> Upstream:
        return Upstream(self.name, self.url, self.url)

    async def start(self) -> None:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, limit=64 << 20, ssl=self.tls
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def refuse(self) -> None:
        """Stop listening, so that connections are refused."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._connections += 1
        try:
            await self._connection(reader, writer, self._connections)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
            method, path, _ = first.split(" ")
            headers = [
                (k.strip(), v.strip()) for k, _, v in (line.partition(":") for line in lines)
            ]
            lengths = [int(v) for k, v in headers if k.lower() == "content-length"]
            body = await reader.readexactly(lengths[0]) if lengths else b""
            call = Call(method, path, headers, body, writer, number, asyncio.Event())
            if self.silent and path in {"/health/ready", "/control/state"}:
                await reader.read()  # until the prober closes the connection
                return
            if path == "/health/ready":
                status = "200 OK" if self.ready else "503 Service Unavailable"
                await call.whole(status, b"{}", *self.probe_headers)
                return
            if path == "/control/state":
                state = self.state
                self.state_requests += 1
                await self.may_report.wait()
                await call.whole("200 OK", state, *self.probe_headers)
                return
            await self._behave(call, reader)

    async def _behave(self, call: Call, reader: asyncio.StreamReader) -> None:
        self.calls.append(call)
        self.arrived.put_nowait(call)
        behaving = asyncio.ensure_future(self.behave(call))
        # The router sends nothing before the response, so an end here means that it disconnected.
        hanging_up = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({behaving, hanging_up}, return_when=asyncio.FIRST_COMPLETED)
            if not behaving.done():
                call.hung_up.set()
                raise ConnectionResetError
            await behaving
            if hanging_up.done() or call.writer.transport.is_closing():
                raise ConnectionResetError
        finally:
            behaving.cancel()
            hanging_up.cancel()
            await asyncio.gather(behaving, hanging_up, return_exceptions=True)


INTERACTIVE = SLOClass(name="interactive", ttft_ms=5_000, tpot_ms=5_000)
BATCH = SLOClass(name="batch", ttft_ms=60_000, tpot_ms=60_000)
QUIET = ProbeSettings(interval_ns=3_600 * NS_PER_S, retry_ns=3_600 * NS_PER_S)
SETTINGS = RouterSettings(
    llmservice="chat",
    policy=RouterPolicy.ROUND_ROBIN,
    classes={c.name: c for c in (INTERACTIVE, BATCH)},
    default_class="interactive",
    probe=QUIET,
)


def started(
    stack: ExitStack, name: str, *arguments: str, variables: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Run `goodput ARGUMENTS` until the stack closes; return the line printed when it listens.

    Args:
        stack: ends the process.
        name: name of the replica.
        arguments: the command.
        variables: further environment variables.
    """
    always = ("-f", str(MANIFEST), "--json", "--port", "0", "--admin-port", "0")
    process = subprocess.Popen(
        [sys.executable, "-m", "goodput_core", *arguments, *always, "--exit-with-parent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, ENV_REPLICA: name, **(variables or {})},
    )
    stack.enter_context(process)
    stack.callback(process.terminate)
    assert process.stdout is not None
    event: dict[str, str] = json.loads(process.stdout.readline())
    return event


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds for which there is no event."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.001)


@dataclass
class RouterBench:
    """A router with its replicas and a client."""

    router: RouterService
    replicas: list[FakeReplica]
    client: aiohttp.ClientSession

    async def post(
        self, body: bytes = b'{"prompt":"x"}', /, *, path: str = "/v1/completions", **headers: str
    ) -> tuple[int, bytes]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        url = URL(self.router.url + path, encoded=True)
        async with self.client.post(url, data=io.BytesIO(body), headers=named) as response:
            return response.status, await response.read()

    def complete(self, **options: Any) -> aiohttp.client._RequestContextManager:
        """Send a completion; await it or enter it to get the response."""
        return self.client.post(self.router.url + "/v1/completions", **{"data": b"{}", **options})

    async def state(self, **query: str) -> dict[str, Any]:
        url = self.router.admin_url + "/control/state"
        async with self.client.get(url, params=query) as response:
            decoded: dict[str, Any] = msgspec.json.decode(await response.read())
            return decoded

    async def metrics(self) -> str:
        async with self.client.get(self.router.admin_url + "/metrics") as response:
            return await response.text()

    async def settled(self) -> dict[str, int]:
        """Return the outcomes of the default class, without zeros, once no request is in flight."""
        async with asyncio.timeout(PATIENCE_S):
            await self.router.outcomes.idle.wait()
        return self.outcomes()

    def outcomes(self, slo_class: str = "interactive") -> dict[str, int]:
        counts = self.router.outcomes.by_class()[slo_class]
        return {name: count for name, count in counts.items() if count}


class StartBench:
    """Starts routers, each with fake replicas that all are ready; the stack ends them."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def __call__(
        self,
        replicas: int = 1,
        *,
        interactive: SLOClass = INTERACTIVE,
        clock: Callable[[], int] = time.monotonic_ns,
        **settings: Any,
    ) -> RouterBench:
        """Start a router; `settings` replace those of `SETTINGS`."""
        fakes = [FakeReplica(f"r{i}") for i in range(replicas)]
        for fake in fakes:
            await fake.start()
            self._stack.push_async_callback(fake.refuse)
        classes = {c.name: c for c in (interactive, BATCH)}
        router = await self._stack.enter_async_context(
            RouterService(
                replace(SETTINGS, classes=classes, **settings),
                clock=clock,
                upstreams=[f.upstream for f in fakes],
            )
        )
        client = await self._stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )
        await until(lambda: all(r.ready for r in router.replicas))
        return RouterBench(router, fakes, client)


@pytest.fixture
async def start() -> AsyncIterator[StartBench]:
    async with AsyncExitStack() as stack:
        yield StartBench(stack)


@pytest.fixture(scope="session")
def fake_replica() -> type[FakeReplica]:
    """The class itself, for tests that run a separate event loop."""
    return FakeReplica

"""Scripted servers, requests and traces."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest
from tests.builders.traces import write_rows
from tests.replay.sending.builders import make_planned

from goodput_replay.sending.body import PreparedRequest
from goodput_traces.format.schema import Clock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from pathlib import Path

    from tests.replay.sending.builders import Planned, Prepared, Script, Serve, WriteTrace

    from goodput_traces.format.schema import TraceRow

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Start a server that passes each complete request to a script; returns its URL."""
    async with AsyncExitStack() as stack:

        async def start(script: Script) -> str:
            async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                try:
                    while True:
                        head = await reader.readuntil(b"\r\n\r\n")
                        length = _LENGTH.search(head)
                        body = await reader.readexactly(int(length[1]) if length else 0)
                        await script(head + body, writer)
                except (asyncio.IncompleteReadError, ConnectionError):
                    pass
                finally:
                    writer.close()

            server = await asyncio.start_server(connected, "127.0.0.1", 0)
            stack.push_async_callback(_stop, server)
            return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

        yield start


async def _stop(server: asyncio.Server) -> None:
    server.close()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.sleep(0)


@pytest.fixture
def planned() -> Planned:
    """Make small planned requests."""
    return make_planned


@pytest.fixture
def prepared() -> Prepared:
    """Make small prepared requests."""

    def make(number: int = 0, scheduled_ns: int = 0, **changes: object) -> PreparedRequest:
        request = make_planned(number, scheduled_ns, **changes)
        return PreparedRequest(planned=request, body=b'{"stream":true}', input_tokens=8, headers={})

    return make


@pytest.fixture
def trace_of(tmp_path: Path) -> WriteTrace:
    """Write rows into a trace file."""

    def write(rows: Iterable[TraceRow], *, clock: Clock = Clock.TRACE_RELATIVE) -> Path:
        return write_rows(tmp_path / "trace.parquet", rows, clock)

    return write

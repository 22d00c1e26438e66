"""A server that streams responses at fixed times and logs the arrival of each request.

It replaces an engine in benchmarks of clients, so it does little work: one protocol class on
uvloop, responses rendered at start, no routing and no JSON parsing.

    python benchmarks/stand_ins/mock_server.py --port 0 --log arrivals.csv

prints one JSON line with its URL, and at SIGTERM writes one line per request into the log: request
id, arrival on the wall clock in nanoseconds, `max_tokens`, and 1 if the response was sent to its
end. Id and `max_tokens` are empty if the request has none. The arrival is the time at which the
last byte of the request was read. The length of a response does not depend on `max_tokens`, so that
this number can identify the rows of a trace for clients that send no ids.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import uvloop

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_ID = re.compile(rb"\r\nx-request-id: *([^\r]*)\r\n", re.IGNORECASE)
_MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens": *(\d+)')
_MODELS = json.dumps({"object": "list", "data": [{"id": "mock", "owned_by": "goodput"}]}).encode()
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def _event(value: dict[str, object] | None) -> bytes:
    data = b"[DONE]" if value is None else json.dumps(value, separators=(",", ":")).encode()
    text = b"data: %s\n\n" % data
    return b"%x\r\n%s\r\n" % (len(text), text)


class StreamTemplate:
    """The bytes of a response, token by token."""

    def __init__(self, tokens: int) -> None:
        head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "mock"}

        def chunk(reason: str | None) -> bytes:
            choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": reason}
            return _event({**head, "choices": [choice]})

        usage = {"prompt_tokens": 8, "completion_tokens": tokens, "total_tokens": tokens + 8}
        end = _event({**head, "choices": [], "usage": usage}) + _event(None) + b"0\r\n\r\n"
        self.pieces = [chunk(None) for _ in range(tokens - 1)] + [chunk("length") + end]
        self.pieces[0] = _STREAM_HEAD + self.pieces[0]


@dataclass(slots=True)
class Arrival:
    """A request, and True if its response was sent to its end."""

    request_id: str
    at_ns: int
    max_tokens: str
    complete: bool = False


class Connection(asyncio.Protocol):
    """One connection; its requests are sequential."""

    def __init__(self, server: MockServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports implement asyncio.Transport without being subclasses.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head_end = self._buffer.find(b"\r\n\r\n")
        if head_end < 0:
            return
        head = self._buffer[: head_end + 2]
        match = _LENGTH.search(head)
        size = head_end + 4 + (int(match[1]) if match else 0)
        if len(self._buffer) < size:
            return
        body = self._buffer[head_end + 4 : size]
        self._buffer = self._buffer[size:]
        assert self._transport is not None
        if head.startswith(b"GET "):
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                % (len(_MODELS), _MODELS)
            )
            return
        at_ns = time.time_ns()
        found, length = _ID.search(head), _MAX_TOKENS.search(body)
        arrival = Arrival(
            found[1].decode() if found else "", at_ns, length[1].decode() if length else ""
        )
        self._server.arrived(arrival, self)

    def write(self, data: bytes) -> bool:
        """Send data; return False if the client has disconnected."""
        if self._transport is None or self._transport.is_closing():
            return False
        self._transport.write(data)
        return True


class MockServer:
    """Times the pieces of all responses, and lists the arrivals."""

    def __init__(self, *, tokens: int, ttft_s: float, gap_s: float) -> None:
        self._pieces = StreamTemplate(tokens).pieces
        self._ttft_s = ttft_s
        self._gap_s = gap_s
        self._loop = asyncio.get_running_loop()
        self.arrivals: list[Arrival] = []

    def arrived(self, arrival: Arrival, connection: Connection) -> None:
        self.arrivals.append(arrival)
        self._loop.call_later(self._ttft_s, self._piece, arrival, connection, 0)

    def _piece(self, arrival: Arrival, connection: Connection, number: int) -> None:
        if not connection.write(self._pieces[number]):
            return
        if number + 1 < len(self._pieces):
            self._loop.call_later(self._gap_s, self._piece, arrival, connection, number + 1)
        else:
            arrival.complete = True


async def serve(options: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    mock = MockServer(
        tokens=options.tokens, ttft_s=options.ttft_ms / 1000, gap_s=options.gap_ms / 1000
    )
    server = await loop.create_server(
        lambda: Connection(mock), "127.0.0.1", options.port, backlog=4096
    )
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    port = server.sockets[0].getsockname()[1]
    print(json.dumps({"event": "listening", "url": f"http://127.0.0.1:{port}"}), flush=True)
    await stopped.wait()
    server.close()
    if options.log is not None:
        lines = (
            f"{one.request_id},{one.at_ns},{one.max_tokens},{one.complete:d}\n"
            for one in mock.arrivals
        )
        options.log.write_text("".join(lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--log", type=Path, help="write arrivals here at SIGTERM")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--ttft-ms", type=float, default=50.0)
    parser.add_argument("--gap-ms", type=float, default=10.0)
    uvloop.run(serve(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Servers that stream as foreign servers do, with all their deviations from OpenAI's API.

Each is a real HTTP server on loopback. A server is described by the function that makes the pieces
of a response; the pieces are written one by one, so that the network may deliver them apart.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

__all__ = [
    "DONE",
    "Answer",
    "StandIn",
    "delta",
    "event",
    "finish",
    "running",
    "text",
    "tokens",
    "usage",
]


def event(value: object) -> bytes:
    """Return an event with a JSON value, or with bytes as they are."""
    return b"data: %s\n\n" % (value if isinstance(value, bytes) else json.dumps(value).encode())


DONE = event(b"[DONE]")


def text(value: str = " a", reason: str | None = None, **more: object) -> bytes:
    """Return an event of a completion."""
    return event({"choices": [{"index": 0, "text": value, "finish_reason": reason}], **more})


def delta(reason: str | None = None, **fields: object) -> bytes:
    """Return an event of a chat completion."""
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": reason}]})


def finish(reason: str = "length") -> bytes:
    """Return an event without output and with a finish reason."""
    return text("", reason)


def usage(count: object) -> bytes:
    """Return the event of `include_usage`."""
    return event({"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": count}})


def tokens(count: int, *, per_event: int = 1) -> Iterator[bytes]:
    """Yield the events of so many tokens."""
    for first in range(0, count, per_event):
        yield text(" a" * min(per_event, count - first))


Answer = Callable[[int], Iterable[bytes]]
"""Makes the pieces of a response from `max_tokens`."""


@dataclass(frozen=True, kw_only=True)
class StandIn:
    """A server.

    Args:
        answer: makes the pieces of every response.
        content_type: content type of the responses.
        compressed: True to compress the responses with gzip.
        keeps_open: True to keep a response open after its last piece.
        pause_s: time between two pieces.
        model: name of the served model.
    """

    answer: Answer
    content_type: str = "text/event-stream"
    compressed: bool = False
    keeps_open: bool = False
    pause_s: float = 0.0
    model: str = "m"

    async def list_models(self, _request: web.Request) -> web.Response:
        models: dict[str, Any] = {"object": "list", "data": [{"id": self.model}]}
        return web.json_response(models)

    async def respond(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        headers = {"Content-Type": self.content_type}
        if self.compressed:
            headers["Content-Encoding"] = "gzip"
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        for piece in self.answer(body["max_tokens"]):
            await response.write(gzip.compress(piece) if self.compressed else piece)
            if self.pause_s:
                await asyncio.sleep(self.pause_s)
        if self.keeps_open:
            # The handler is cancelled when the client closes the connection.
            await asyncio.Event().wait()
        return response


@asynccontextmanager
async def running(server: StandIn, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Run a server on loopback during the block, with TLS or without; yields its URL."""
    app = web.Application()
    for prefix in ("", "/a", "/b"):
        app.router.add_get(f"{prefix}/v1/models", server.list_models)
        app.router.add_post(f"{prefix}/v1/completions", server.respond)
        app.router.add_post(f"{prefix}/v1/chat/completions", server.respond)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()

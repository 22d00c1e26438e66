"""The connections under one exchange: refused, exhausted, used again, and what they carry."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

from yarl import URL

from goodput_core.slo.record import Outcome
from goodput_core.units import NS_PER_S
from goodput_replay.sending.body import PreparedRequest
from goodput_replay.sending.client.connection import open_session
from goodput_replay.sending.client.exchange import Exchange

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable

    import pytest

    from goodput_core.slo.record import RequestRecord

    Script = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]
    Serve = Callable[[Script], Awaitable[str]]
    Prepared = Callable[..., PreparedRequest]

EVENTS = (
    b'data: {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
)
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%s" % (
    len(EVENTS),
    EVENTS,
)


async def send(url: str, request: PreparedRequest) -> RequestRecord:
    async with open_session({}) as session:
        exchange = Exchange(session, URL(url), timeout_ns=60 * NS_PER_S, pinned=True)
        return await exchange.run(request, time.monotonic_ns())


async def test_a_target_that_refuses_connections_is_an_error(prepared: Prepared) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    record = await send(f"http://127.0.0.1:{port}", prepared())
    assert record.outcome is Outcome.ERROR
    assert record.detail.startswith("could not connect: ")
    assert record.sent_ns is None


async def test_running_out_of_files_is_the_clients_own_failure(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_session({}) as session:

        def no_files(*_args: object, **_kwargs: object) -> None:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(session, "post", no_files)
        exchange = Exchange(session, URL("http://127.0.0.1:1/"), timeout_ns=NS_PER_S, pinned=True)
        record = await exchange.run(prepared(), time.monotonic_ns())
    assert record.outcome is Outcome.UNSENT
    assert record.detail == "this machine could not send it: Too many open files"


async def test_connections_are_used_again(serve: Serve, prepared: Prepared) -> None:
    connections = set()

    async def script(_request: bytes, writer: asyncio.StreamWriter) -> None:
        connections.add(writer.get_extra_info("peername"))
        writer.write(ANSWER)

    url = await serve(script)
    async with open_session({}) as session:
        exchange = Exchange(session, URL(f"{url}/x"), timeout_ns=60 * NS_PER_S, pinned=False)
        for number in range(5):
            record = await exchange.run(prepared(number), time.monotonic_ns())
            assert record.outcome is Outcome.OK
            assert record.pinned_output_tokens is None
    assert len(connections) == 1


async def test_the_body_arrives_whole_and_once(serve: Serve, prepared: Prepared) -> None:
    seen: list[bytes] = []

    async def script(request: bytes, writer: asyncio.StreamWriter) -> None:
        seen.append(request)
        writer.write(ANSWER)

    small = prepared()
    request = PreparedRequest(
        planned=small.planned,
        body=b"[" + b"1," * 3_000_000 + b"1]",
        input_tokens=1,
        headers={"X-Request-Id": "row-0"},
    )
    record = await send(await serve(script), request)
    head, _, body = seen[0].partition(b"\r\n\r\n")
    assert record.outcome is Outcome.OK
    assert body == request.body
    assert b"X-Request-Id: row-0" in head
    assert b"Content-Type: application/json" in head

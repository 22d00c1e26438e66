"""Responses of replicas that the router's own HTTP connections must understand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.engine.router.conftest import END, TOKEN, respond

if TYPE_CHECKING:
    from tests.engine.router.conftest import Behaviour, Call, StartBench


async def interim(call: Call) -> None:
    await call.send(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n")
    await call.whole("200 OK", b'{"ok":1}')


async def until_close(call: Call) -> None:
    await call.head("200 OK", "Content-Type: application/json")
    await call.send(b'{"ok":1}')
    call.writer.close()


async def byte_by_byte(call: Call) -> None:
    response = (
        b'HTTP/1.1 200 Fine\r\nContent-Type: application/json\r\nContent-Length: 8\r\n\r\n{"ok":1}'
    )
    for at in range(len(response)):
        await call.send(response[at : at + 1])


async def closing(call: Call) -> None:
    await call.whole("200 OK", b'{"ok":1}', "Connection: close")


@pytest.mark.parametrize(
    "behave",
    [
        pytest.param(interim, id="interim response"),
        pytest.param(until_close, id="end of the body by end of the connection"),
        pytest.param(byte_by_byte, id="byte by byte"),
        pytest.param(closing, id="connection that is not kept"),
    ],
)
async def test_a_valid_response_is_forwarded(start: StartBench, behave: Behaviour) -> None:
    bench = await start()
    bench.replicas[0].behave = behave
    for _ in range(3):
        assert await bench.post() == (200, b'{"ok":1}')
    assert await bench.settled() == {"unjudged": 3}


async def split_tokens(call: Call) -> None:
    await call.stream_head()
    await call.send(b"".join(b"1\r\n%c\r\n" % byte for byte in TOKEN * 3 + END))
    await call.end()


async def test_chunks_need_not_match_events(start: StartBench) -> None:
    bench = await start()
    bench.replicas[0].behave = split_tokens
    assert await bench.post() == (200, TOKEN * 3 + END)
    assert await bench.settled() == {"attained": 1}


async def endless_head(call: Call) -> None:
    await call.send(b"HTTP/1.1 200 OK\r\n")
    for _ in range(1000):
        await call.send(b"X-Padding: %b\r\n" % (b"x" * 1000))


async def two_responses(call: Call) -> None:
    await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}" * 2)


async def switching(call: Call) -> None:
    await call.send(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n"
    )


@pytest.mark.parametrize(
    "behave",
    [pytest.param(endless_head, id="endless head"), pytest.param(switching, id="another protocol")],
)
async def test_an_invalid_response_counts_as_a_lost_replica(
    start: StartBench, behave: Behaviour
) -> None:
    bench = await start()
    bench.replicas[0].behave = behave
    status, body = await bench.post()
    assert status == 502
    assert b"replica_lost" in body
    assert await bench.settled() == {"error": 1}


async def test_a_second_response_is_not_taken_for_that_of_the_next_request(
    start: StartBench,
) -> None:
    bench = await start()
    replica = bench.replicas[0]
    replica.behave = two_responses
    await bench.post()
    replica.behave = respond("200 OK", b'{"next":1}')
    assert await bench.post() == (200, b'{"next":1}')
    assert replica.calls[0].connection != replica.calls[1].connection


async def test_head_is_answered_without_a_body(start: StartBench) -> None:
    bench = await start()
    bench.replicas[0].behave = respond("200 OK", b'{"ok":1}')
    for _ in range(2):
        async with bench.client.head(bench.router.url + "/v1/models") as response:
            assert response.status == 200
            assert await response.read() == b""

"""One request over HTTP: every behaviour of a server ends in a record."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import os
import re
import socket
import ssl
import struct
import time
from typing import TYPE_CHECKING

import pytest
from tests.replay.sending.builders import http_response
from tests.replay.sending.stand_ins import StandIn, running
from yarl import URL

from goodput_core.contract import HEADER_REPLICA
from goodput_core.slo.conformance import Deviation
from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_replay.sending.body import PreparedRequest
from goodput_replay.sending.client.connection import open_session
from goodput_replay.sending.client.request import RequestClient, SendingPolicy

if TYPE_CHECKING:
    from pathlib import Path

    from tests.replay.sending.builders import Prepared, Script, Serve


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
UNTIL_CLOSED = HEAD + b"Connection: close\r\n\r\n"
LAST = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: object) -> bytes:
    return b"data: %s\n\n" % (value if isinstance(value, bytes) else json.dumps(value).encode())


def token(text: str = "a", reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": reason}]})


def delta(**fields: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": None}]})


def usage(tokens: int, cached: int | None = None) -> bytes:
    details = None if cached is None else {"cached_tokens": cached}
    counts = {
        "prompt_tokens": 8,
        "completion_tokens": tokens,
        "prompt_tokens_details": details,
    }
    return event({"choices": [], "usage": counts})


DONE = event(b"[DONE]")


def says(*pieces: bytes, close: bool = False, pause_s: float = 0.0) -> Script:
    """Make a server that writes these pieces, and closes or keeps the connection.

    With a pause, the client reads each piece on its own.
    """

    async def script(_request: bytes, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
        if close:
            writer.close()

    return script


async def send(
    url: str,
    request: PreparedRequest,
    *,
    timeout_ns: int = 60 * NS_PER_S,
    lag_ns: int = 0,
    pinned: bool = True,
) -> RequestRecord:
    async with open_session({}) as session:
        client = RequestClient(
            session,
            [URL(f"{url}/v1/completions")],
            SendingPolicy(timeout_ns=timeout_ns, pinned=pinned),
        )
        return await client.run(request, time.monotonic_ns() - lag_ns)


async def test_a_stream_has_token_times_and_counts(serve: Serve, prepared: Prepared) -> None:
    head = CHUNKED.replace(b"\r\n\r\n", f"\r\n{HEADER_REPLICA}: chat-0\r\n\r\n".encode())
    body = chunk(token()) + chunk(token()) + chunk(token("a", "stop"))
    url = await serve(says(head + body, chunk(usage(3, 5) + DONE) + LAST))
    record = await send(url, prepared())
    assert (record.outcome, record.status, record.detail) == (Outcome.OK, 200, "")
    assert (record.output_tokens, record.pinned_output_tokens, record.input_tokens) == (3, 3, 8)
    assert (record.replica, record.cached_tokens) == ("chat-0", 5)
    assert record.sent_ns is not None
    assert record.first_token_ns is not None
    assert record.last_token_ns is not None
    assert record.end_ns is not None
    assert 0 <= record.sent_ns <= record.first_token_ns <= record.last_token_ns <= record.end_ns
    assert len(record.gaps_us) == 2


async def test_a_response_may_have_headers_of_64_kib(serve: Serve, prepared: Prepared) -> None:
    head = CHUNKED.replace(b"\r\n\r\n", b"\r\nSet-Cookie: %b\r\n\r\n" % (b"x" * 60_000))
    url = await serve(says(head, chunk(token() * 2 + token("a", "stop") + DONE) + LAST))
    record = await send(url, prepared())
    assert (record.outcome, record.output_tokens) == (Outcome.OK, 3), record.detail


@pytest.mark.parametrize("coding", [b"identity", b"Identity", b" identity ", b"", b"identity,"])
async def test_a_response_without_a_coding_is_not_compressed(
    serve: Serve, prepared: Prepared, coding: bytes
) -> None:
    head = CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Encoding: %b\r\n\r\n" % coding)
    url = await serve(says(head, chunk(token("a", "stop") + DONE) + LAST))
    record = await send(url, prepared())
    assert (record.outcome, record.output_tokens) == (Outcome.OK, 1), record.detail


async def test_send_lag_is_part_of_the_ttft(serve: Serve, prepared: Prepared) -> None:
    url = await serve(says(CHUNKED, chunk(token("a", "stop") + DONE) + LAST))
    record = await send(url, prepared(), lag_ns=7 * NS_PER_S)
    assert record.lag_ns is not None
    assert record.ttft_ns is not None
    assert record.ttft_from_send_ns is not None
    assert record.lag_ns >= 7 * NS_PER_S
    assert record.ttft_ns == record.lag_ns + record.ttft_from_send_ns


TOKENS = {
    "an empty text before the first token or at the end is no token": (
        token("") + token("a") + token("", "stop"),
        1,
    ),
    "an empty text after the first token is a token": (token("a") + token("") + token("b"), 3),
    "so is an empty content": (delta(content="a") + delta(content=""), 2),
    "and an empty reasoning": (delta(reasoning="a") + delta(reasoning=""), 2),
    "a role alone is no token": (delta(role="assistant") + delta(content="a"), 1),
    "reasoning counts": (
        delta(reasoning_content="a") + delta(reasoning="b") + delta(content="c"),
        3,
    ),
    "a refusal counts": (delta(refusal="I") + delta(refusal="can't") + token("", "stop"), 2),
    "usage overrides chunks": (token("two words") + usage(2), 2),
    "without usage each chunk is one": (token("two words") + token(), 2),
    "tool calls count": (
        event({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}) + token("", "tool_calls"),
        1,
    ),
    "no tool calls are no tokens": (
        event({"choices": [{"delta": {"tool_calls": []}}], "error": None}) + token("a", "stop"),
        1,
    ),
    "null usage is no usage": (event({"choices": [{"text": "a"}], "usage": None}), 1),
}


@pytest.mark.parametrize(("body", "tokens"), TOKENS.values(), ids=TOKENS)
async def test_tokens_are_counted_by_rule(
    serve: Serve, prepared: Prepared, body: bytes, tokens: int
) -> None:
    url = await serve(says(CHUNKED, chunk(body + DONE) + LAST))
    record = await send(url, prepared())
    assert (record.outcome, record.output_tokens) == (Outcome.OK, tokens)
    assert record.first_token_ns is not None


async def test_a_token_after_the_finish_reason_is_part_of_the_response(
    serve: Serve, prepared: Prepared
) -> None:
    pieces = [CHUNKED, chunk(token()), chunk(token("a", "stop")), chunk(token()), chunk(DONE)]
    record = await send(await serve(says(*pieces[:-1], LAST, pause_s=0.05)), prepared())
    assert (record.outcome, record.output_tokens) == (Outcome.OK, 3)
    assert record.end_ns == record.last_token_ns
    record = await send(await serve(says(*pieces, LAST, pause_s=0.05)), prepared())
    assert (record.end_ns or 0) > (record.last_token_ns or 0), "[DONE] ends the response"


ENDINGS = {
    "no [DONE] but a finish reason": says(CHUNKED, chunk(token("a", "stop")) + LAST),
    "closed without a length": says(UNTIL_CLOSED, token("a", "stop") + DONE, close=True),
    "cut after [DONE]": says(CHUNKED, chunk(token("a", "stop") + DONE), close=True),
    "kept open after [DONE]": says(CHUNKED, chunk(token("a", "stop") + DONE)),
    "more after [DONE]": says(CHUNKED, chunk(token("a", "stop") + DONE + b"junk") + LAST),
    "cut after the finish reason": says(CHUNKED, chunk(token("a", "stop")), close=True),
    "broken after the finish reason": says(
        CHUNKED, chunk(token("a", "stop")), b"zz\r\n", pause_s=0.1
    ),
    "cut inside the usage": says(CHUNKED, chunk(token("a", "stop") + usage(1)[:9]), close=True),
    "split inside everything": says(
        *(bytes([b]) for b in CHUNKED + chunk(token("a", "stop") + DONE) + LAST)
    ),
}


@pytest.mark.parametrize("script", ENDINGS.values(), ids=ENDINGS)
async def test_a_complete_response_is_ok_regardless_of_its_end(
    serve: Serve, prepared: Prepared, script: Script
) -> None:
    record = await send(await serve(script), prepared())
    assert (record.outcome, record.detail, record.output_tokens) == (Outcome.OK, "", 1)


WITH_LENGTH = HEAD + b"Content-Length: %d\r\n\r\n" % len(token() * 3)
UNFINISHED = {
    "with its last chunk": (says(CHUNKED, chunk(token() * 3) + LAST), True),
    "at its length": (says(WITH_LENGTH, token() * 3), True),
    "early": (says(CHUNKED, chunk(token() * 2) + LAST), False),
    "in an event": (says(CHUNKED, chunk(token() * 3 + b"data: {") + LAST), False),
    "by closing the connection": (says(UNTIL_CLOSED, token() * 3, close=True), False),
    "without its last chunk": (says(CHUNKED, chunk(token() * 3), close=True), False),
    "before its length": (
        says(WITH_LENGTH.replace(b"gth: ", b"gth: 1"), token() * 3, close=True),
        False,
    ),
    "with an error": (says(CHUNKED, chunk(token() * 3 + event({"error": "no"})) + LAST), False),
}


@pytest.mark.parametrize(("script", "in_doubt"), UNFINISHED.values(), ids=UNFINISHED)
async def test_an_output_without_a_finish_reason_may_be_complete_if_its_body_ended(
    serve: Serve, prepared: Prepared, script: Script, in_doubt: bool
) -> None:
    record = await send(await serve(script), prepared(output_tokens=3))
    assert record.outcome is Outcome.ERROR
    assert (Deviation.NO_FINISH_REASON in record.deviations) is in_doubt


async def test_a_reset_after_the_finish_reason_leaves_a_complete_response(
    serve: Serve, prepared: Prepared
) -> None:
    reading = asyncio.Event()

    async def script(_request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + chunk(token()) + chunk(token("a", "length")))
        await writer.drain()
        await reading.wait()
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async with open_session({}) as session:
        url = URL(f"{await serve(script)}/v1/completions")
        policy = SendingPolicy(timeout_ns=60 * NS_PER_S, pinned=True)
        client = RequestClient(session, [url], policy)
        task = asyncio.create_task(client.run(prepared(output_tokens=2), time.monotonic_ns()))
        asyncio.get_running_loop().call_later(0.2, reading.set)
        record = await task
    assert (record.outcome, record.detail, record.output_tokens) == (Outcome.OK, "", 2)
    assert record.deviations == (Deviation.NO_USAGE,)
    assert record.e2e_ns is not None
    assert record.e2e_ns < 200 * NS_PER_MS, "the response ended with its finish reason"


async def test_a_broken_stream_on_a_reused_connection_ends_the_right_request(
    serve: Serve, prepared: Prepared
) -> None:
    bodies = iter([chunk(token("a", "stop") + DONE) + LAST, chunk(token()) + b"zz\r\n"])

    async def script(_request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + next(bodies))
        await writer.drain()

    async with open_session({}) as session:
        url = URL(f"{await serve(script)}/v1/completions")
        policy = SendingPolicy(timeout_ns=60 * NS_PER_S, pinned=True)
        client = RequestClient(session, [url], policy)
        first = await client.run(prepared(), time.monotonic_ns())
        second = await client.run(prepared(), time.monotonic_ns())
    assert (first.outcome, second.outcome) == (Outcome.OK, Outcome.ERROR)


DROPPED = {"type": "rate_limit_error", "param": None, "code": "rate_limit_exceeded"}
FAILURES = {
    "500": (
        says(http_response(b'{"error":{"message":"boom"}}', "500 Internal Server Error")),
        Outcome.ERROR,
        "HTTP 500: boom",
    ),
    "500 with HTML": (
        says(http_response(b"<html>\n oops </html>", "500 Internal Server Error", "text/html")),
        Outcome.ERROR,
        "HTTP 500: <html> oops </html>",
    ),
    "500 without a body": (says(http_response(b"", "500 No")), Outcome.ERROR, "HTTP 500"),
    "429": (
        says(http_response(b'{"error":{"message":"queue full"}}', "429 Too Many Requests")),
        Outcome.SHED,
        "HTTP 429: queue full",
    ),
    "503": (says(http_response(b"busy", "503 Unavailable")), Outcome.SHED, "HTTP 503: busy"),
    "404": (
        says(http_response(b'{"message":"no model"}', "404 No")),
        Outcome.ERROR,
        "HTTP 404: no model",
    ),
    "a redirect is not followed": (
        says(http_response(b"", "307 Elsewhere\r\nLocation: http://192.0.2.1/")),
        Outcome.ERROR,
        "HTTP 307, a redirect to http://192.0.2.1/, which is not followed",
    ),
    "a redirect to nowhere": (says(http_response(b"", "307 Elsewhere")), Outcome.ERROR, "HTTP 307"),
    "compressed": (
        says(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n",
            chunk(gzip.compress(token("a", "stop") + DONE)) + LAST,
        ),
        Outcome.ERROR,
        "the response is compressed (gzip), which was not requested",
    ),
    "an endless error body": (
        says(b"HTTP/1.1 500 No\r\nConnection: close\r\n\r\n", b"x" * 10_000_000, close=True),
        Outcome.ERROR,
        "HTTP 500: xxx",
    ),
    "HTML": (
        says(http_response(b"<html>login</html>", kind="text/html")),
        Outcome.ERROR,
        "the response is text/html, not an event stream",
    ),
    "JSON instead of a stream": (
        says(http_response(b"{}")),
        Outcome.ERROR,
        "the response is application/json, not an event stream",
    ),
    "half an event": (
        says(UNTIL_CLOSED, token() + b'data: {"choi', close=True),
        Outcome.ERROR,
        "the stream ended in the middle of an event",
    ),
    "ends without finishing": (
        says(CHUNKED, chunk(token()) + LAST),
        Outcome.ERROR,
        "the stream ended before the response was complete",
    ),
    "an empty stream": (
        says(CHUNKED, LAST),
        Outcome.ERROR,
        "the stream ended before the response was complete",
    ),
    "closes mid-stream": (
        says(CHUNKED, chunk(token()), close=True),
        Outcome.ERROR,
        "the connection closed mid-stream",
    ),
    "closes before the first token": (
        says(CHUNKED, close=True),
        Outcome.ERROR,
        "the connection closed before the first token",
    ),
    "closes without an answer": (
        says(close=True),
        Outcome.ERROR,
        "the connection closed before a response",
    ),
    "a 10 MB line": (
        says(CHUNKED, chunk(token()), chunk(b"data: " + b"x" * 10_000_000), chunk(b"\n\n") + LAST),
        Outcome.ERROR,
        "line too long",
    ),
    "not JSON": (
        says(CHUNKED, chunk(event(b"{'a': 1}")) + LAST),
        Outcome.ERROR,
        "malformed chunk",
    ),
    "another shape of JSON": (
        says(CHUNKED, chunk(event({"choices": "a"})) + LAST),
        Outcome.ERROR,
        "malformed chunk",
    ),
    "not UTF-8": (says(CHUNKED, chunk(event(b'"\xff\xfe"')) + LAST), Outcome.ERROR, "malformed"),
    "an error in the stream": (
        says(CHUNKED, chunk(token() + event({"error": {"message": "out of memory"}})) + LAST),
        Outcome.ERROR,
        "the stream reported: out of memory",
    ),
    "a request that was dropped after its first token": (
        says(CHUNKED, chunk(token() + event({"error": {**DROPPED, "message": "late"}})) + LAST),
        Outcome.SHED,
        "the stream reported: late",
    ),
    "not HTTP": (says(b"SSH-2.0-OpenSSH_9.6\r\n\r\n", close=True), Outcome.ERROR, "not an HTTP"),
    "a broken chunk size": (
        says(CHUNKED + b"zz\r\nabc\r\n", close=True),
        Outcome.ERROR,
        "not an HTTP response",
    ),
    "a broken chunk size after a token": (
        says(CHUNKED + chunk(token()), b"zz\r\nabc\r\n", pause_s=0.1),
        Outcome.ERROR,
        "the connection closed mid-stream: the response was truncated or malformed",
    ),
    "a broken chunk size before a token": (
        says(CHUNKED, b"-5\r\nabc\r\n", pause_s=0.1),
        Outcome.ERROR,
        "the connection closed before the first token: the response was truncated or malformed",
    ),
    "a chunk longer than its size": (
        says(CHUNKED + chunk(token()), b"3\r\nabcdef\r\n", pause_s=0.1),
        Outcome.ERROR,
        "the connection closed mid-stream: the response was truncated or malformed",
    ),
    "a header of a megabyte": (
        says(b"HTTP/1.1 200 OK\r\nX-Long: " + b"a" * (1 << 20) + b"\r\n\r\n", close=True),
        Outcome.ERROR,
        "not an HTTP response",
    ),
}


@pytest.mark.parametrize(("script", "outcome", "detail"), FAILURES.values(), ids=FAILURES)
async def test_a_failure_of_the_server_is_an_outcome_with_a_message(
    serve: Serve, prepared: Prepared, script: Script, outcome: Outcome, detail: str
) -> None:
    record = await send(await serve(script), prepared())
    assert record.outcome is outcome
    assert record.detail.startswith(detail)
    assert len(record.detail) <= 200
    assert "\n" not in record.detail
    assert not re.search(r"[A-Z]\w+Error|b'|message=", record.detail), "no text of a library"
    assert record.sent_ns is not None
    assert record.end_ns is not None


@pytest.mark.parametrize(
    "pieces",
    [(), (CHUNKED,), (CHUNKED, chunk(token()))],
    ids=["no answer", "headers only", "a token and then nothing"],
)
async def test_a_timeout_counts_from_the_scheduled_arrival(
    serve: Serve, prepared: Prepared, pieces: tuple[bytes, ...]
) -> None:
    url = await serve(says(*pieces))
    # 150 ms are left of the time limit.
    record = await send(url, prepared(), lag_ns=60 * NS_PER_S - 150 * NS_PER_MS)
    assert record.outcome is Outcome.TIMEOUT
    assert record.detail == "nothing complete within 60 s"
    assert record.output_tokens == (1 if len(pieces) == 2 else 0)


async def test_a_request_is_cancelled_at_the_time_in_the_trace(
    serve: Serve, prepared: Prepared
) -> None:
    closed = asyncio.Event()

    async def script(_request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + chunk(token()))
        await writer.drain()
        await writer.wait_closed()
        closed.set()

    request = prepared(cancel_after_ns=100 * NS_PER_MS)
    record = await send(await serve(script), request)
    assert (record.outcome, record.output_tokens) == (Outcome.CANCELLED, 1)
    assert record.cancel_after_ns == 100 * NS_PER_MS
    assert record.detail == ""


async def test_a_request_in_flight_is_recorded_when_the_run_stops(
    serve: Serve, prepared: Prepared
) -> None:
    answering = asyncio.Event()

    async def script(_request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + chunk(token()))
        await writer.drain()
        answering.set()

    task = asyncio.ensure_future(send(await serve(script), prepared()))
    await answering.wait()
    task.cancel()
    record = await task
    assert (record.outcome, record.detail) == (Outcome.CANCELLED, "the run was stopped")
    assert record.sent_ns is not None


EVENTS = token("a", "stop") + DONE
RESPONSE = HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(EVENTS), EVENTS)


async def test_a_refused_connection_is_an_error(prepared: Prepared) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    record = await send(f"http://127.0.0.1:{port}", prepared())
    assert record.outcome is Outcome.ERROR
    assert record.detail.startswith("could not connect: ")
    assert record.sent_ns is None


async def test_a_name_that_this_machine_cannot_resolve_is_unsent(prepared: Prepared) -> None:
    record = await send("http://target.invalid", prepared())
    assert (record.outcome, record.sent_ns) == (Outcome.UNSENT, None)
    assert record.detail.startswith("this machine could not connect: ")


async def test_a_certificate_that_this_machine_does_not_trust_is_unsent(
    prepared: Prepared, certificate: Path
) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    async with running(StandIn(answer=lambda _: ()), tls) as url:
        record = await send(url, prepared())
    assert record.outcome is Outcome.UNSENT
    assert "certificate is not trusted: self-signed certificate" in record.detail


async def test_a_request_without_a_free_file_is_unsent(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_session({}) as session:

        def no_files(*_args: object, **_kwargs: object) -> None:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(session, "post", no_files)
        client = RequestClient(
            session, [URL("http://127.0.0.1:1/")], SendingPolicy(timeout_ns=NS_PER_S, pinned=True)
        )
        record = await client.run(prepared(), time.monotonic_ns())
    assert record.outcome is Outcome.UNSENT
    assert record.detail == "this machine could not send the request: Too many open files"


@pytest.mark.parametrize("number", [errno.ENETUNREACH, errno.ENETDOWN, errno.EACCES, errno.ENOMEM])
async def test_a_request_that_this_machine_cannot_connect_is_unsent(
    number: int, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_network(*_args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", no_network)
    record = await send("http://127.0.0.1:1", prepared())
    assert record.outcome is Outcome.UNSENT
    assert record.detail == f"this machine could not send the request: {os.strerror(number)}"


@pytest.mark.parametrize("number", [errno.EHOSTUNREACH, errno.ECONNREFUSED, errno.EPERM])
async def test_a_service_that_cannot_be_reached_is_an_error(
    number: int, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unreachable(*_args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", unreachable)
    record = await send("http://127.0.0.1:1", prepared())
    assert (record.outcome, record.sent_ns) == (Outcome.ERROR, None)


def answer(_request: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(CHUNKED + b"".join(chunk(token()) for _ in range(3)) + chunk(DONE) + LAST)


async def test_a_service_that_accepts_connections_late_is_no_send_lag(prepared: Prepared) -> None:
    """Linux drops connections beyond the backlog, and the client tries them again after 1 s."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer(await reader.readuntil(b"\r\n\r\n"), writer)
        await writer.drain()
        writer.close()

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with asyncio.TaskGroup() as tasks:
            sent = [tasks.create_task(send(url, prepared())) for _ in range(8)]
            await asyncio.sleep(0.3)
            server = await asyncio.start_server(respond, sock=listener)
        server.close()
    records = [one.result() for one in sent]
    assert {one.outcome for one in records} == {Outcome.OK}
    assert max(one.ttft_ns or 0 for one in records) > 900 * NS_PER_MS
    assert max(one.lag_ns or 0 for one in records) < 400 * NS_PER_MS


async def test_retries_until_a_connection_opens_are_no_send_lag(prepared: Prepared) -> None:
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer(await reader.readuntil(b"\r\n\r\n"), writer)
        await writer.drain()
        writer.close()

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    policy = SendingPolicy(timeout_ns=60 * NS_PER_S, pinned=True, retries=8)
    async with open_session({}) as session:
        client = RequestClient(session, [URL(f"http://127.0.0.1:{port}/v1/completions")], policy)
        run = asyncio.create_task(client.run(prepared(), time.monotonic_ns()))
        await asyncio.sleep(0.5)
        async with await asyncio.start_server(respond, "127.0.0.1", port):
            record = await run
    assert (record.outcome, record.retries > 0) == (Outcome.OK, True)
    assert (record.ttft_ns or 0) > 500 * NS_PER_MS
    assert (record.lag_ns or 0) < 100 * NS_PER_MS


async def test_connections_are_reused(serve: Serve, prepared: Prepared) -> None:
    connections = set()

    async def script(_request: bytes, writer: asyncio.StreamWriter) -> None:
        connections.add(writer.get_extra_info("peername"))
        writer.write(RESPONSE)

    url = await serve(script)
    async with open_session({}) as session:
        client = RequestClient(
            session, [URL(f"{url}/x")], SendingPolicy(timeout_ns=60 * NS_PER_S, pinned=False)
        )
        for number in range(5):
            record = await client.run(prepared(number), time.monotonic_ns())
            assert record.outcome is Outcome.OK
            assert record.pinned_output_tokens is None
    assert len(connections) == 1


async def test_the_body_is_sent_completely_and_once(serve: Serve, prepared: Prepared) -> None:
    seen: list[bytes] = []

    async def script(request: bytes, writer: asyncio.StreamWriter) -> None:
        seen.append(request)
        writer.write(RESPONSE)

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

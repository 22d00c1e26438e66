"""Answers one request: reads it, hands it to the core, and writes what comes back.

The head of an answer is sent with its first token, so until then a refusal is still a status
and a router may try elsewhere. A client that reads slowly delays nobody: its tokens wait as a
number and go out together; one that leaves has its request cancelled.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from aiohttp import web

from goodput_core.contract import (
    HEADER_REPLICA,
    HEADER_REQUEST_ID,
    HEADER_REVISION,
    HEADER_TIMINGS,
)
from goodput_engine.server.answer import DONE, Answer, EventForm, timings, usage, whole_body
from goodput_engine.server.load import LoadHeader
from goodput_engine.server.reading import Reading
from goodput_engine.server.refusals import (
    bad_request,
    draining,
    error_json,
    overloaded,
    too_long,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from concurrent.futures import Executor

    from goodput_engine.core_client import CoreClient, RequestStream
    from goodput_engine.messages import Rejected
    from goodput_engine.server.front import Front
    from goodput_engine.server.intake import Call, Intake
    from goodput_engine.server.refusals import Refusal

__all__ = ["Answering"]

_MAX_RETRY_AFTER_S: Final = 60
_EVENTS_AT_ONCE: Final = 64
_SLICE_BYTES: Final = 64 * 1024


class Answering:
    """The handlers of both completion endpoints.

    Args:
        front: the front's state.
        readers: where long bodies are read.
    """

    def __init__(self, front: Front, readers: Executor) -> None:
        self._front = front
        self._reading = Reading(front.settings.clients, readers)
        self._load = LoadHeader(front)
        names = front.settings.names
        self._headers = {HEADER_REPLICA: names.replica, HEADER_REVISION: names.revision}
        self._stream_headers = {
            **self._headers,
            "Content-Type": "text/event-stream",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
        }

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`."""
        return await self._answer(request, chat=False)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        return await self._answer(request, chat=True)

    async def _answer(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        arrival_ns = time.monotonic_ns()
        with self._front.counted():
            core, intake = self._front.admitting()
            call = await self._read(request, intake, chat=chat, arrival_ns=arrival_ns)
            stream = core.submit(call.submit, each=call.stream or bool(call.stops))
            try:
                await stream.more(0)
                if stream.rejected is not None:
                    raise _refused(stream.rejected)
                if stream.lost:
                    raise self._front.why_not()
                if call.stream:
                    return await self._streamed(request, call, core, stream)
                return await self._whole(request, call, core, stream)
            finally:
                core.release(call.submit.rid)

    async def _read(
        self, request: web.Request, intake: Intake, *, chat: bool, arrival_ns: int
    ) -> Call:
        def read(body: bytes | bytearray) -> Call:
            rid = self._front.next_rid()
            return intake.read(body, request.headers, chat=chat, rid=rid, arrival_ns=arrival_ns)

        return await self._reading.look(request, read)

    async def _streamed(
        self, request: web.Request, call: Call, core: CoreClient, stream: RequestStream
    ) -> web.StreamResponse:
        answer_id = _answer_id(call)
        answer = Answer(call)
        form = EventForm(
            call,
            answer_id=answer_id,
            created=int(time.time()),
            model=self._front.settings.names.llmservice,
        )
        response = web.StreamResponse(
            headers={
                **self._stream_headers,
                **self._load.headers(),
                HEADER_REQUEST_ID: call.request_id or answer_id,
            }
        )
        await response.prepare(request)
        reason = None
        while True:
            if stream.tokens > answer.tokens or stream.finish_reason is not None:
                events, reason = self._events(request, form, answer, stream)
                if events:
                    await self._write(request, response, events)
            if reason is not None:
                break
            if answer.tokens == stream.tokens:
                if stream.lost:
                    refusal = self._front.why_not()
                    await self._finish(request, response, b"data: %b\n\n" % error_json(refusal))
                    return response
                await stream.more(answer.tokens)
        core.release(call.submit.rid)
        self._count(call, answer, stream)
        tail = form.usage_event(usage(call, answer, stream)) if call.include_usage else b""
        await self._finish(request, response, tail + DONE)
        return response

    def _count(self, call: Call, answer: Answer, stream: RequestStream) -> None:
        self._front.answered.add(
            input_tokens=call.submit.input_tokens,
            cached_tokens=stream.cached_tokens,
            output_tokens=answer.tokens,
        )

    def _events(
        self, request: web.Request, form: EventForm, answer: Answer, stream: RequestStream
    ) -> tuple[bytes, str | None]:
        """Events of what came, and the reason if they end the answer.

        One for each token, also where several came at once; one for all of them where the client
        has not yet taken what was written before.
        """
        transport = request.transport
        behind = transport is not None and transport.get_write_buffer_size() > 0
        most = self._front.settings.clients.event_tokens
        each = most if behind else 1
        goal = min(stream.tokens, answer.tokens + (most if behind else _EVENTS_AT_ONCE))
        events: list[bytes] = []
        while True:
            count = min(each, goal - answer.tokens)
            last = stream.finish_reason is not None and answer.tokens + count == stream.tokens
            text = answer.take(count, last=last)
            reason = "stop" if answer.stopped else stream.finish_reason if last else None
            if text or reason is not None:
                events.append(form.event(text, reason))
            if reason is not None or answer.tokens >= goal:
                return b"".join(events), reason

    async def _write(self, request: web.Request, response: web.StreamResponse, data: bytes) -> None:
        transport = request.transport
        if transport is None or not transport.get_write_buffer_size():
            await response.write(data)
            return
        async with self._patience(request):
            await response.write(data)

    async def _finish(
        self, request: web.Request, response: web.StreamResponse, data: bytes
    ) -> None:
        async with self._patience(request):
            await response.write(data)
            await response.write_eof()

    @asynccontextmanager
    async def _patience(self, request: web.Request) -> AsyncIterator[None]:
        """Write to a client, unless it takes nothing for too long: then it cannot be told either.

        Raises:
            ConnectionResetError: it took nothing.
        """
        try:
            async with asyncio.timeout(self._front.settings.clients.stall_s):
                yield
        except TimeoutError as error:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client stopped reading") from error

    async def _whole(
        self, request: web.Request, call: Call, core: CoreClient, stream: RequestStream
    ) -> web.StreamResponse:
        answer = Answer(call)
        parts: list[str] = []
        while True:
            count = stream.tokens - answer.tokens
            parts.append(answer.take(count, last=stream.finish_reason is not None))
            if answer.stopped or stream.finish_reason is not None:
                break
            if stream.lost:
                raise self._front.why_not()
            await stream.more(answer.tokens)
        core.release(call.submit.rid)
        self._count(call, answer, stream)
        answer_id = _answer_id(call)
        body = whole_body(
            call,
            "".join(parts),
            answer_id=answer_id,
            created=int(time.time()),
            model=self._front.settings.names.llmservice,
            finish_reason="stop" if answer.stopped else stream.finish_reason or "stop",
            used=usage(call, answer, stream),
        )
        headers = {
            **self._headers,
            **self._load.headers(),
            HEADER_REQUEST_ID: call.request_id or answer_id,
            HEADER_TIMINGS: timings(call, answer, stream),
        }
        response = web.StreamResponse(headers=headers)
        response.content_type = "application/json"
        response.content_length = len(body)
        await response.prepare(request)
        # In slices, because a client has to take something now and then, not everything soon.
        last = (len(body) - 1) // _SLICE_BYTES * _SLICE_BYTES
        for at in range(0, last, _SLICE_BYTES):
            await self._write(request, response, body[at : at + _SLICE_BYTES])
        await self._finish(request, response, body[last:])
        return response


def _answer_id(call: Call) -> str:
    kind = "chatcmpl" if call.chat else "cmpl"
    return f"{kind}-{secrets.token_hex(12)}"


def _refused(rejected: Rejected) -> Refusal:
    if rejected.reason == "too_long":
        return too_long(rejected.detail)
    if rejected.reason == "draining":
        return draining()
    if rejected.retry_after_s:
        return overloaded(rejected.detail, max(1, min(rejected.retry_after_s, _MAX_RETRY_AFTER_S)))
    return bad_request(rejected.detail)

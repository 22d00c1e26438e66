"""The handlers of both completion endpoints: parse, submit to the core, write the response.

The head of a response is sent with its first token. So an error before the first token has its own
HTTP status code, and a router can retry the request on another replica. A client that reads slowly
does not delay others: its unsent tokens are kept only as a number, and are sent together when it
reads again. If a client disconnects, its request is cancelled.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import HttpVersion11, web

from goodput_core.contract import (
    HEADER_REPLICA,
    HEADER_REQUEST_ID,
    HEADER_REVISION,
    HEADER_TIMINGS,
)
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.http_server import StreamedResponse
from goodput_engine.openai.bodies import response_body, tool_call_object, usage_object
from goodput_engine.openai.errors import APIError, error_event, overloaded
from goodput_engine.openai.rejections import rejection_error
from goodput_engine.openai.sse_writer import DONE_EVENT, EventWriter
from goodput_engine.request_bodies import read_body
from goodput_engine.server.metrics import LoadHeader
from goodput_engine.server.output_logprobs import OutputLogprobs
from goodput_engine.server.output_text import CompletionText, EmulatedText, ModelText, NoText
from goodput_engine.text.tool_calls import ToolCallParser

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from goodput_engine.core_client import CoreConnection, RequestStream
    from goodput_engine.server.output_text import TextSource
    from goodput_engine.server.parsers import Parsers
    from goodput_engine.server.requests import CompletionRequest, RequestParser
    from goodput_engine.server.state import ServerState
    from goodput_engine.text.tool_calls import ToolCall

__all__ = ["CompletionHandlers"]

_MAX_EVENTS: Final = 64
# Tokens with log-probabilities in an event of a slow client; an entry can have some kilobytes.
_MAX_LOGPROB_TOKENS: Final = 64
# A body that the tokenizer of a model encodes within a millisecond or two.
_INLINE_TEXT_BYTES: Final = 2 << 10
_SLICE_BYTES: Final = 64 << 10
_CONTENT_ENCODINGS: Final = frozenset({"identity", "gzip", "deflate", "br", "zstd"})


class CompletionHandlers:
    """Handlers of `/v1/completions` and `/v1/chat/completions`.

    Args:
        state: state of the HTTP process.
        parsers: threads that parse requests.
    """

    def __init__(self, state: ServerState, parsers: Parsers) -> None:
        self._state = state
        self._parsers = parsers
        self._load = LoadHeader(state)
        identity = state.settings.identity
        self._headers = {HEADER_REPLICA: identity.replica, HEADER_REVISION: identity.revision}
        self._stream_headers = {
            **self._headers,
            "Content-Type": "text/event-stream",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
        }

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Handle `POST /v1/completions`."""
        return await self._handle(request, chat=False)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """Handle `POST /v1/chat/completions`."""
        return await self._handle(request, chat=True)

    async def _handle(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        arrival_ns = time.monotonic_ns()
        with self._state.count_request():
            parser = self._state.require_admission()
            with self._state.count_reading():
                call = await self._parse(request, parser, chat=chat, arrival_ns=arrival_ns)
                core = self._state.core_of_admitted()
                stream = core.submit(call.submit, each=call.stream or bool(call.stops))
            try:
                await stream.more(0)
                error = self._end_error(stream)
                if error is not None:
                    raise error
                if call.stream:
                    return await self._stream(request, call, core, stream)
                return await self._respond(request, call, core, stream)
            finally:
                core.release(call.submit.rid)

    def _end_error(self, stream: RequestStream) -> APIError | None:
        """Return the error of a request that was rejected, removed or lost; else None."""
        if stream.rejected is not None:
            return rejection_error(stream.rejected)
        return self._state.lost_error() if stream.lost else None

    async def _parse(
        self, request: web.Request, parser: RequestParser, *, chat: bool, arrival_ns: int
    ) -> CompletionRequest:
        encoding = request.headers.get("Content-Encoding", "identity").lower()
        if encoding not in _CONTENT_ENCODINGS:
            raise APIError(
                415,
                f"Content-Encoding {encoding[:40]!r} is not supported; use gzip, deflate, br or "
                "zstd, or send the body uncompressed",
                param="Content-Encoding",
                close=True,
            )
        clients = self._state.settings.clients
        memory = self._state.bodies.reserve()

        def parse(body: bytes) -> CompletionRequest:
            rid = self._state.next_rid()
            return parser.parse(body, request.headers, chat=chat, rid=rid, arrival_ns=arrival_ns)

        def parse_chat(body: bytes, last_ns: int) -> CompletionRequest:
            if time.monotonic_ns() > last_ns:
                raise overloaded("the chat template is behind with chats; retry later", 1)
            return parse(body)

        try:
            body = await read_body(
                request,
                limit_bytes=self._state.body_bytes,
                timeout_s=clients.body_s,
                memory=memory,
            )
            # A schema is compiled, which takes longer than its length suggests.
            is_long = len(body) > clients.inline_bytes or b'"response_format"' in body
            loop = asyncio.get_running_loop()
            if chat and self._state.tokenizer is not None:
                thread = self._parsers.long_chats if is_long else self._parsers.chats
                last_ns = time.monotonic_ns() + round(clients.chat_wait_s * NS_PER_S)
                return await loop.run_in_executor(thread, parse_chat, body, last_ns)
            if is_long:
                return await loop.run_in_executor(self._parsers.long_bodies, parse, body)
            if self._state.tokenizer is not None and len(body) > _INLINE_TEXT_BYTES:
                return await loop.run_in_executor(self._parsers.texts, parse, body)
            return parse(body)
        finally:
            memory.release()

    async def _stream(
        self,
        request: web.Request,
        call: CompletionRequest,
        core: CoreConnection,
        stream: RequestStream,
    ) -> web.StreamResponse:
        completion_id = _make_id(call)
        text, logprobs = self._text(call, stream)
        writer = EventWriter(
            chat=call.chat,
            include_usage=call.include_usage,
            completion_id=completion_id,
            created=int(time.time()),
            model=self._state.settings.identity.llmservice,
        )
        response = StreamedResponse(
            headers={
                **self._stream_headers,
                **self._load.headers(),
                HEADER_REQUEST_ID: call.request_id or completion_id,
            }
        )
        await response.prepare(request)
        direct = None
        calls = None if call.tools is None else ToolCallParser(call.tools)
        if logprobs is None and not call.returns_token_ids and calls is None:
            direct = _TokenWriter(request, writer, text, stream)
        while True:
            events, reason = b"", None
            if stream.tokens > text.tokens or stream.finish_reason is not None:
                events, reason = self._events(
                    request, call, writer, text, stream, logprobs=logprobs, calls=calls
                )
            if reason is not None:
                break
            if events:
                await self._write(request, response, events)
            if text.tokens == stream.tokens:
                error = self._end_error(stream)
                if error is not None:
                    await self._finish(request, response, error_event(error))
                    return response
                if direct is None:
                    await stream.more(text.tokens)
                else:
                    await stream.follow(direct.push)
                    if text.stopped:
                        events = writer.event(direct.unsent, "stop")
                        break
        core.release(call.submit.rid)
        usage = self._record_lengths(call, text, stream)
        tail = writer.usage_event(usage) if call.include_usage else b""
        await self._finish(request, response, events + tail + DONE_EVENT)
        return response

    def _text(
        self, call: CompletionRequest, stream: RequestStream
    ) -> tuple[CompletionText, OutputLogprobs | None]:
        """Return the text of a response, and its log-probabilities if they are requested."""
        source: TextSource = EmulatedText()
        if self._state.tokenizer is not None:
            detokenizer = self._state.tokenizer.detokenizer(continues=not call.chat)
            source = ModelText(detokenizer, stream.token_ids)
        elif self._state.configure.model is not None:
            source = NoText()
        count = call.submit.executor.sampling.logprobs
        logprobs = None
        if count is not None:
            source = logprobs = OutputLogprobs(
                source,
                stream.token_ids,
                stream.logprobs,
                self._state.tokenizer,
                chat=call.chat,
                count=count,
            )
        return CompletionText(source, call.stops, min_tokens=call.min_tokens), logprobs

    def _record_lengths(
        self, call: CompletionRequest, text: CompletionText, stream: RequestStream
    ) -> dict[str, object]:
        """Record the lengths of a finished request and return its usage object."""
        input_tokens, cached_tokens = call.submit.input_tokens, stream.cached_tokens
        self._state.lengths.add(
            input_tokens=input_tokens, cached_tokens=cached_tokens, output_tokens=text.tokens
        )
        return usage_object(
            prompt_tokens=input_tokens, cached_tokens=cached_tokens, output_tokens=text.tokens
        )

    def _events(
        self,
        request: web.Request,
        call: CompletionRequest,
        writer: EventWriter,
        text: CompletionText,
        stream: RequestStream,
        *,
        logprobs: OutputLogprobs | None,
        calls: ToolCallParser | None,
    ) -> tuple[bytes, str | None]:
        """Return the events of the new tokens, and the finish reason if the output ends with them.

        Each token is one event, also if its text is held back, so that the times of the events are
        those of the tokens. If the client has not yet read the earlier events, all new tokens are
        one event, up to a limit.
        """
        transport = request.transport
        is_slow = transport is not None and transport.get_write_buffer_size() > 0
        slow_tokens = self._state.settings.clients.event_tokens
        if logprobs is not None:
            slow_tokens = min(slow_tokens, _MAX_LOGPROB_TOKENS)
        per_event = slow_tokens if is_slow else 1
        end = min(stream.tokens, text.tokens + (slow_tokens if is_slow else _MAX_EVENTS))
        events: list[bytes] = []
        while True:
            start = text.tokens
            count = min(per_event, end - start)
            last = stream.finish_reason is not None and start + count == stream.tokens
            piece = text.take(count, last=last)
            reason = "stop" if text.stopped else stream.finish_reason if last else None
            ids = stream.token_ids[start : text.tokens] if call.returns_token_ids else None
            entries = []
            if logprobs is not None:
                entries = logprobs.send(piece, complete=last and not text.stopped)
            found: list[ToolCall] = []
            if calls is not None:
                known = calls.count
                piece, found = calls.feed(piece, last=reason is not None)
                if found:
                    events.append(writer.tool_calls(_tool_calls(found), known))
                if reason == "stop" and calls.count:
                    reason = "tool_calls"
            if piece or ids or entries or reason is not None or not found:
                encoded = b"null" if logprobs is None or not entries else logprobs.encode(entries)
                # After the event of a call, an empty text would be one more token.
                content = None if found and not piece else piece
                events.append(writer.event(content, reason, ids, encoded))
            if reason is not None or text.tokens >= end:
                return b"".join(events), reason

    async def _respond(
        self,
        request: web.Request,
        call: CompletionRequest,
        core: CoreConnection,
        stream: RequestStream,
    ) -> web.StreamResponse:
        text, logprobs = self._text(call, stream)
        pieces: list[str] = []
        while True:
            count = stream.tokens - text.tokens
            pieces.append(text.take(count, last=stream.finish_reason is not None))
            if text.stopped or stream.finish_reason is not None:
                break
            error = self._end_error(stream)
            if error is not None:
                raise error
            await stream.more(text.tokens)
        core.release(call.submit.rid)
        completion_id = _make_id(call)
        output, encoded = "".join(pieces), b"null"
        reason = "stop" if text.stopped else stream.finish_reason or "stop"
        if logprobs is not None:
            encoded = await asyncio.get_running_loop().run_in_executor(
                self._parsers.logprobs,
                partial(logprobs.encode_all, output, complete=not text.stopped),
            )
        found: list[ToolCall] = []
        if call.tools is not None:
            output, found = ToolCallParser(call.tools).feed(output, last=True)
            if found and reason == "stop":
                reason = "tool_calls"
        body = response_body(
            output,
            chat=call.chat,
            completion_id=completion_id,
            created=int(time.time()),
            model=self._state.settings.identity.llmservice,
            finish_reason=reason,
            usage=self._record_lengths(call, text, stream),
            token_ids=stream.token_ids[: text.tokens] if call.returns_token_ids else None,
            logprobs=encoded,
            tool_calls=_tool_calls(found),
        )
        headers = {
            **self._headers,
            **self._load.headers(),
            HEADER_REQUEST_ID: call.request_id or completion_id,
            HEADER_TIMINGS: _encode_timings(call, text, stream),
        }
        response = web.StreamResponse(headers=headers)
        response.content_type = "application/json"
        response.content_length = len(body)
        await response.prepare(request)
        # Write in slices, because the stall timeout applies to each write.
        last = (len(body) - 1) // _SLICE_BYTES * _SLICE_BYTES
        for at in range(0, last, _SLICE_BYTES):
            await self._write(request, response, body[at : at + _SLICE_BYTES])
        await self._finish(request, response, body[last:])
        return response

    async def _write(self, request: web.Request, response: web.StreamResponse, data: bytes) -> None:
        transport = request.transport
        if transport is None or not transport.get_write_buffer_size():
            await response.write(data)
            return
        async with self._stall_timeout(request):
            await response.write(data)

    async def _finish(
        self, request: web.Request, response: web.StreamResponse, data: bytes
    ) -> None:
        async with self._stall_timeout(request):
            await response.write_eof(data)

    @asynccontextmanager
    async def _stall_timeout(self, request: web.Request) -> AsyncIterator[None]:
        """Disconnect a client that reads nothing for too long.

        Raises:
            ConnectionResetError: the client was disconnected.
        """
        try:
            async with asyncio.timeout(self._state.settings.clients.stall_s):
                yield
        except TimeoutError as error:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client stopped reading") from error


class _TokenWriter:
    """Writes the event of a token directly to the client's connection: the hot path.

    Args:
        request: the client's request, whose response has begun.
        events: builds the events.
        text: the text of the response.
        stream: the tokens.

    Attributes:
        unsent: text before a stop string, which `push` did not write.
    """

    __slots__ = ("_chunked", "_events", "_stream", "_text", "_transport", "unsent")

    def __init__(
        self, request: web.Request, events: EventWriter, text: CompletionText, stream: RequestStream
    ) -> None:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client disconnected")
        self._transport = transport
        self._chunked = request.version >= HttpVersion11
        self._events = events
        self._text = text
        self._stream = stream
        self.unsent = ""

    def push(self) -> bool:
        """Write the event of one new token.

        Returns:
            False if the caller has to continue: after more than one new token, at a stop string,
            or if the client has not read the previous events.
        """
        text, transport = self._text, self._transport
        if self._stream.tokens != text.tokens + 1 or transport.get_write_buffer_size():
            return False
        piece = text.take(1, last=False)
        if text.stopped:
            self.unsent = piece
            return False
        if not transport.is_closing():
            event = self._events.token(piece)
            transport.write(b"%x\r\n%b\r\n" % (len(event), event) if self._chunked else event)
        return True


def _tool_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    return [
        tool_call_object(f"call_{secrets.token_hex(12)}", call.name, call.arguments)
        for call in calls
    ]


def _encode_timings(call: CompletionRequest, text: CompletionText, stream: RequestStream) -> str:
    """Return the engine's timings of a complete response, as the JSON of `X-Goodput-Timings`.

    Times are milliseconds since the arrival at this process. The time of a token is the time at
    which its step's results were ready. `tpot_ms` is null for a single token.
    """
    arrived, first, last = stream.arrival_ns, stream.first_token_ns, stream.last_token_ns
    gaps = stream.tokens - 1
    return msgspec.json.encode(
        {
            "queue_ms": _to_ms(stream.first_scheduled_ns - arrived),
            "ttft_ms": _to_ms(first - arrived),
            "tpot_ms": _to_ms((last - first) / gaps) if gaps > 0 else None,
            "e2e_ms": _to_ms(last - arrived),
            "prompt_tokens": call.submit.input_tokens,
            "cached_tokens": stream.cached_tokens,
            "output_tokens": text.tokens,
        }
    ).decode()


def _to_ms(ns: float) -> float:
    return round(ns / NS_PER_MS, 3)


def _make_id(call: CompletionRequest) -> str:
    kind = "chatcmpl" if call.chat else "cmpl"
    return f"{kind}-{secrets.token_hex(12)}"

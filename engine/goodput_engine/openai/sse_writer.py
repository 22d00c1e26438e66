"""Writes the server-sent events of a streamed response, once per token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DONE_EVENT", "EventWriter"]

DONE_EVENT: Final = b"data: [DONE]\n\n"
_encode_text: Final = msgspec.json.Encoder().encode


class EventWriter:
    """Builds the events of one streamed response; the constant parts are encoded once.

    Args:
        chat: True for the chat endpoint.
        include_usage: True if the stream ends with a `usage_event`.
        completion_id: the response's `id`.
        created: Unix seconds.
        model: the served name.
    """

    __slots__ = ("_begin", "_end", "_end_of_text", "_first", "_head", "_plain_end")

    def __init__(
        self, *, chat: bool, include_usage: bool, completion_id: str, created: int, model: str
    ) -> None:
        kind = "chat.completion.chunk" if chat else "text_completion"
        head = msgspec.json.encode(
            {"id": completion_id, "object": kind, "created": created, "model": model}
        )
        self._head = b"data: " + head[:-1]
        choice = self._head + b',"choices":[{"index":0,'
        self._begin = choice + (b'"delta":{"content":' if chat else b'"text":')
        # The first event of a chat names the role.
        self._first = choice + b'"delta":{"role":"assistant","content":' if chat else self._begin
        self._end_of_text = b"}" if chat else b""
        self._end = b"}]" + (b',"usage":null' if include_usage else b"") + b"}\n\n"
        self._plain_end = self._end_of_text + b',"logprobs":null,"finish_reason":null' + self._end

    def token(self, text: str) -> bytes:
        """Return an event with nothing but text: the usual one, on the hot path."""
        begin, self._first = self._first, self._begin
        return begin + _encode_text(text) + self._plain_end

    def event(
        self,
        text: str | None,
        finish_reason: str | None,
        token_ids: Sequence[int] | None = None,
        logprobs: bytes = b"null",
    ) -> bytes:
        """Return one event.

        Args:
            text: the next text; empty for tokens whose text is held back. None if another event has
                the output of the same tokens.
            finish_reason: the finish reason if this is the last text; None otherwise.
            token_ids: ids of the tokens since the previous event; None to send no ids.
            logprobs: log-probabilities to send with the text, as JSON.
        """
        begin, self._first = self._first, self._begin
        ids = b"" if token_ids is None else b',"token_ids":' + msgspec.json.encode(token_ids)
        reason = b'"%b"' % finish_reason.encode() if finish_reason else b"null"
        rest = b'%b,"logprobs":%b,"finish_reason":%b' % (ids, logprobs, reason)
        return begin + _encode_text(text) + self._end_of_text + rest + self._end

    def tool_calls(self, calls: Sequence[dict[str, Any]], first: int) -> bytes:
        """Return an event with complete calls of tools.

        Args:
            calls: calls; see `tool_call_object`.
            first: index of the first of them in the response.
        """
        begin, self._first = self._first, self._begin
        rows = [{"index": first + at, **call} for at, call in enumerate(calls)]
        encoded = msgspec.json.encode(rows)
        rest = b'null,"tool_calls":%b},"logprobs":null,"finish_reason":null' % encoded
        return begin + rest + self._end

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """Return the event of `stream_options.include_usage`, which has no choices."""
        return self._head + b',"choices":[],"usage":' + msgspec.json.encode(usage) + b"}\n\n"

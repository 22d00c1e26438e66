"""Events of an OpenAI stream, decoded for counting tokens. No text is kept.

The token count of a response is taken from the last `usage`, if the server sends one. Otherwise
each chunk with text, reasoning, a refusal or a tool call counts as one token. The router counts in
the same way, so that the router and the replayer judge a response alike.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from goodput_engine.openai.errors import is_overload

__all__ = [
    "DONE",
    "CompletionChunk",
    "MalformedChunkError",
    "decode_chunk",
    "error_sentence",
    "status_sentence",
]

DONE: Final = b"[DONE]"
_MAX_DETAIL: Final = 160


class MalformedChunkError(ValueError):
    """An event is not a chunk of an OpenAI stream."""


# Limited, so that every count that a server reports fits into the columns of a record.
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class _PromptDetails(msgspec.Struct):
    cached_tokens: _Tokens | None = None


class Usage(msgspec.Struct):
    """Token counts reported by the server."""

    prompt_tokens: _Tokens | None = None
    completion_tokens: _Tokens | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class CompletionChunk(msgspec.Struct):
    """An event of a stream of completions or chat completions."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw()

    @property
    def has_token(self) -> bool:
        """True if a choice contains output of the model."""
        for choice in self.choices:
            if choice.text:
                return True
            delta = choice.delta
            if delta is not None and (
                delta.content
                or delta.reasoning_content
                or delta.reasoning
                or delta.refusal
                or _present(delta.tool_calls)
            ):
                return True
        return False

    @property
    def failed(self) -> bool:
        """True if the event reports an error."""
        return _present(self.error)

    @property
    def shed(self) -> bool:
        """True if the event reports that the request was dropped because of load."""
        return self.failed and is_overload(self.error)

    @property
    def finished(self) -> bool:
        """True if a choice has a finish reason."""
        return any(choice.finish_reason for choice in self.choices)


def _present(raw: msgspec.Raw) -> bool:
    """True if the undecoded JSON is present and neither null nor an empty list."""
    return bytes(raw) not in {b"", b"null", b"[]"}


class _ErrorBody(msgspec.Struct):
    message: str = ""


class _ErrorResponse(msgspec.Struct):
    error: _ErrorBody | str = ""
    message: str = ""


_CHUNK: Final = msgspec.json.Decoder(CompletionChunk)
_ERROR: Final = msgspec.json.Decoder(_ErrorResponse)


def decode_chunk(data: bytes) -> CompletionChunk:
    """Decode one event.

    Raises:
        MalformedChunkError: the event is not JSON, or does not have the form of a chunk.
    """
    try:
        return _CHUNK.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedChunkError(f"malformed chunk: {error}"[:_MAX_DETAIL]) from error


def status_sentence(status: int, location: str | None, body: bytes) -> str:
    """Describe a response with a status other than 200: its redirect or its error message.

    Args:
        status: HTTP status.
        location: `Location` header; redirects are not followed.
        body: first bytes of the response body.
    """
    if location is not None and 300 <= status < 400:
        where = " ".join(location.split())[:_MAX_DETAIL]
        return f"HTTP {status}, a redirect to {where}, which is not followed"
    return f"HTTP {status}: {error_sentence(body)}".rstrip(": ")


def error_sentence(body: bytes) -> str:
    """Return the message of an OpenAI error, else the body; truncated, on one line."""
    try:
        response = _ERROR.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = body.decode("utf-8", "replace")
    else:
        error = response.error
        text = (error if isinstance(error, str) else error.message) or response.message
    return " ".join(text.split())[:_MAX_DETAIL]

"""Events of an OpenAI stream, decoded for counting tokens. No text is kept.

Each event with text, token ids, reasoning, a refusal or a tool call counts as one event with
output. A later event with an empty text is the event of a token whose text the server holds back.
The number of tokens follows from these events and from the last `usage`, by the rule in
`goodput_core.slo.conformance`.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

__all__ = [
    "DONE",
    "CompletionChunk",
    "MalformedChunkError",
    "Usage",
    "decode_chunk",
    "decode_usage",
    "error_sentence",
    "has_empty_text",
    "has_output",
    "status_sentence",
]

DONE: Final = b"[DONE]"
_MAX_DETAIL: Final = 160


class MalformedChunkError(ValueError):
    """An event is not a chunk of an OpenAI stream."""


# Limited, so that every count that a server reports fits into the columns of a record.
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_ABSENT: Final = msgspec.Raw(b"")
_NULL: Final = msgspec.Raw(b"null")
_EMPTY_TEXT: Final = msgspec.Raw(b'""')


class _PromptDetails(msgspec.Struct):
    cached_tokens: _Tokens | None = None


class Usage(msgspec.Struct):
    """Token counts reported by the server."""

    prompt_tokens: _Tokens | None = None
    completion_tokens: _Tokens | None = None
    prompt_tokens_details: _PromptDetails | None = None


# Raw fields accept any JSON, so output counts even if a server sends a list where OpenAI sends a
# string. They also avoid building strings.
class _Delta(msgspec.Struct, gc=False):
    content: msgspec.Raw = _ABSENT
    reasoning_content: msgspec.Raw = _ABSENT
    reasoning: msgspec.Raw = _ABSENT
    refusal: msgspec.Raw = _ABSENT
    tool_calls: msgspec.Raw = _ABSENT


class _Choice(msgspec.Struct, gc=False):
    text: msgspec.Raw = _ABSENT
    token_ids: msgspec.Raw = _ABSENT
    delta: _Delta | None = None
    finish_reason: str | None = None


class CompletionChunk(msgspec.Struct, gc=False):
    """An event of a stream of completions or chat completions.

    Args:
        choices: choices, of which only the output and the finish reason are read.
        usage: undecoded token counts; `decode_usage` reads them.
    """

    choices: list[_Choice] | None = None
    usage: msgspec.Raw = _ABSENT

    @property
    def has_usage(self) -> bool:
        """True if the server reports token counts."""
        return len(self.usage) > 0 and self.usage != _NULL


def has_output(choice: _Choice) -> bool:
    """Return True if a choice contains output of the model."""
    if _is_filled(choice.text) or _is_filled(choice.token_ids):
        return True
    delta = choice.delta
    return delta is not None and (
        _is_filled(delta.content)
        or _is_filled(delta.reasoning_content)
        or _is_filled(delta.reasoning)
        or _is_filled(delta.refusal)
        or _is_filled(delta.tool_calls)
    )


def has_empty_text(choice: _Choice) -> bool:
    """Return True if a choice contains a text of no characters."""
    delta = choice.delta
    return choice.text == _EMPTY_TEXT or (
        delta is not None
        and _EMPTY_TEXT in (delta.content, delta.reasoning_content, delta.reasoning)
    )


def _is_filled(raw: msgspec.Raw) -> bool:
    """True if a field is neither absent, nor null, nor an empty string, list or object."""
    return len(raw) > 2 and raw != _NULL


class _ErrorBody(msgspec.Struct):
    message: str = ""
    detail: str = ""


class _ErrorResponse(msgspec.Struct):
    error: _ErrorBody | str = ""
    message: str = ""
    detail: str = ""


_CHUNK: Final = msgspec.json.Decoder(CompletionChunk)
_USAGE: Final = msgspec.json.Decoder(Usage)
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


def decode_usage(raw: msgspec.Raw) -> Usage:
    """Decode token counts; counts out of bounds or of another type are 0 output tokens."""
    try:
        return _USAGE.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Usage(completion_tokens=0)


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
    text = ""
    try:
        response = _ERROR.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    else:
        error = response.error
        text = error if isinstance(error, str) else error.message or error.detail
        text = text or response.message or response.detail
    text = text or body.decode("utf-8", "replace")
    return " ".join(text.split())[:_MAX_DETAIL]

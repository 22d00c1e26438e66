"""What one event of an OpenAI stream says about tokens. No text is kept.

A chunk counts as the tokens that its own `usage` accounts for, where a server sends usage with
every chunk; else a chunk with any text, reasoning, refusal or tool call is one token. (The
router counts so too, or the two would judge one answer differently.)
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

__all__ = [
    "DONE",
    "Chunk",
    "MalformedChunkError",
    "decode_chunk",
    "error_sentence",
    "refusal_sentence",
]

DONE: Final = b"[DONE]"
_MAX_DETAIL: Final = 160


class MalformedChunkError(ValueError):
    """An event that is no chunk of an OpenAI stream."""


# A server may claim anything; what it claims must fit the columns of a record.
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class _PromptDetails(msgspec.Struct):
    cached_tokens: _Tokens | None = None


class Usage(msgspec.Struct):
    """Token counts as the server accounts for them."""

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


class Chunk(msgspec.Struct):
    """One event of a stream of completions or of chat completions."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw()

    @property
    def has_token(self) -> bool:
        """Whether any choice carries something a model produced."""
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
        """Whether it reports an error in place of tokens."""
        return _present(self.error)

    @property
    def finished(self) -> bool:
        """Whether a choice says that it ended."""
        return any(choice.finish_reason for choice in self.choices)


def _present(raw: msgspec.Raw) -> bool:
    """Whether undecoded JSON was there at all, and more than null or an empty list."""
    return bytes(raw) not in {b"", b"null", b"[]"}


class _ErrorBody(msgspec.Struct):
    message: str = ""


class _ErrorAnswer(msgspec.Struct):
    error: _ErrorBody | str = ""
    message: str = ""


_CHUNK: Final = msgspec.json.Decoder(Chunk)
_ERROR: Final = msgspec.json.Decoder(_ErrorAnswer)


def decode_chunk(data: bytes) -> Chunk:
    """Decode one event.

    Raises:
        MalformedChunkError: not JSON, or not the shape of a chunk.
    """
    try:
        return _CHUNK.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedChunkError(f"malformed chunk: {error}"[:_MAX_DETAIL]) from error


def refusal_sentence(status: int, location: str | None, body: bytes) -> str:
    """What an answer other than 200 says: its status, and where it points to or its error.

    Args:
        status: of HTTP.
        location: its `Location` header; redirects are not followed.
        body: its first bytes.
    """
    if location is not None and 300 <= status < 400:
        where = " ".join(location.split())[:_MAX_DETAIL]
        return f"HTTP {status}, a redirect to {where}, which is not followed"
    return f"HTTP {status}: {error_sentence(body)}".rstrip(": ")


def error_sentence(body: bytes) -> str:
    """The message of an OpenAI error, else the body's first line; bounded, on one line."""
    try:
        answer = _ERROR.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = body.decode("utf-8", "replace")
    else:
        text = answer.error if isinstance(answer.error, str) else answer.error.message
        text = text or answer.message
    return " ".join(text.split())[:_MAX_DETAIL]

"""The log-probabilities of output tokens: the fields that request them, and OpenAI's two forms.

A token is labelled by its bytes. A token without text, such as the end of the output, has a name
instead and no bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import msgspec

from goodput_engine.openai.bodies import ChatBody, decode_field
from goodput_engine.openai.errors import bad_request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_engine.openai.bodies import CompletionBody

__all__ = ["TokenEntry", "chat_logprobs", "completion_logprobs", "read_logprobs"]

MAX_COMPLETION_LOGPROBS: Final = 5
MAX_CHAT_LOGPROBS: Final = 20
# OpenAI's value for a token that is very unlikely; JSON has no infinite numbers.
_LEAST: Final = -9999.0

_COUNT: Final = msgspec.json.Decoder(
    Annotated[int, msgspec.Meta(ge=0, le=MAX_COMPLETION_LOGPROBS)] | bool | None
)
_TOP_COUNT: Final = msgspec.json.Decoder(
    Annotated[int, msgspec.Meta(ge=0, le=MAX_CHAT_LOGPROBS)] | None
)
_FLAG: Final = msgspec.json.Decoder(bool | None)


class TokenEntry(NamedTuple):
    """One output token and its log-probabilities.

    Args:
        label: bytes of the token, or the name of a token without text.
        logprob: log-probability of the token.
        top: labels and log-probabilities of the most probable tokens, in descending order.
        offset: number of characters of the output before the token.
    """

    label: bytes | str
    logprob: float
    top: Sequence[tuple[bytes | str, float]]
    offset: int


def read_logprobs(body: CompletionBody | ChatBody) -> int | None:
    """Return the requested number of most probable tokens; None without log-probabilities.

    Raises:
        APIError: 400 naming the field that is invalid.
    """
    if isinstance(body, ChatBody):
        top = (
            decode_field(body.top_logprobs, _TOP_COUNT, "top_logprobs") if body.top_logprobs else 0
        )
        if body.logprobs and decode_field(body.logprobs, _FLAG, "logprobs"):
            return top or 0
        if top:
            raise bad_request("top_logprobs requires logprobs: true", "top_logprobs")
        return None
    count = decode_field(body.logprobs, _COUNT, "logprobs") if body.logprobs else None
    if count is True:
        raise bad_request(
            f"logprobs: must be a number of tokens from 0 to {MAX_COMPLETION_LOGPROBS}, not true; "
            "only a chat has a boolean here",
            "logprobs",
        )
    return None if count is False else count


def chat_logprobs(entries: Sequence[TokenEntry]) -> dict[str, Any]:
    """Return `logprobs` of a choice of a chat."""
    return {
        "content": [
            {
                **_chat_token(entry.label, entry.logprob),
                "top_logprobs": [_chat_token(*one) for one in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def completion_logprobs(entries: Sequence[TokenEntry], *, count: int) -> dict[str, Any]:
    """Return `logprobs` of a choice of a completion; for `count`, see `read_logprobs`.

    The output token is among the most probable ones, even if it is less probable.
    """
    tokens = [_text(entry.label, "bytes:") for entry in entries]
    tops: list[dict[str, float]] = []
    for token, entry in zip(tokens, entries, strict=True):
        top: dict[str, float] = {}
        for label, logprob in entry.top:
            # Of several tokens with equal text, the most probable one is first.
            top.setdefault(_text(label, "bytes:"), max(logprob, _LEAST))
        top.setdefault(token, max(entry.logprob, _LEAST))
        tops.append(top)
    return {
        "tokens": tokens,
        "token_logprobs": [max(entry.logprob, _LEAST) for entry in entries],
        "top_logprobs": tops if count else None,
        "text_offset": [entry.offset for entry in entries],
    }


def _chat_token(label: bytes | str, logprob: float) -> dict[str, Any]:
    return {
        "token": _text(label, ""),
        "logprob": max(logprob, _LEAST),
        "bytes": None if isinstance(label, str) else list(label),
    }


def _text(label: bytes | str, prefix: str) -> str:
    """Return a label as text; the bytes of an incomplete character are written as hex digits."""
    if isinstance(label, str):
        return label
    try:
        return label.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in label)

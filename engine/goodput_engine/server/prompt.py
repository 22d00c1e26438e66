"""From a body's prompt to what the scheduler sees: a length and the hashes of its blocks.

A long prompt takes milliseconds to decode, count and hash. This module is synchronous and
knows nothing of asyncio, so the caller decides where that time is spent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from goodput_core.placement.blockhash import block_hashes
from goodput_engine import tokens
from goodput_engine.server.refusals import bad_request, too_long

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_engine.server.body import Message

__all__ = ["Prompt", "PromptLimits", "chat_prompt", "completion_prompt"]

_TEXT: Final = msgspec.json.Decoder(str)
_IDS: Final = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]])
_PROMPTS: Final = msgspec.json.Decoder(list[str | list[msgspec.Raw]])
_RAWS: Final = msgspec.json.Decoder(list[msgspec.Raw])


class PromptLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the device takes.

    Args:
        vocab_size: token ids are below this.
        max_model_tokens: prompt and answer together.
        block_size: tokens per KV block.
    """

    vocab_size: int
    max_model_tokens: int
    block_size: int


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that fits.

    Args:
        input_tokens: its length.
        block_hashes: of its full blocks, in order.
    """

    input_tokens: int
    block_hashes: list[int]


def completion_prompt(raw: msgspec.Raw, limits: PromptLimits) -> Prompt:
    """The prompt of `/v1/completions`: a text, a list of token ids, or a list of one of these.

    Raises:
        Refusal: 400 for anything else, or a prompt that is empty or too long.
    """
    data = bytes(raw)
    try:
        return _fitting(_completion_ids(data, limits), limits, "prompt")
    except msgspec.DecodeError as error:
        raise bad_request(f"prompt must be a text or a list of token ids: {error}", "prompt") from (
            error
        )


def chat_prompt(messages: Sequence[Message], limits: PromptLimits) -> Prompt:
    """The prompt of `/v1/chat/completions`.

    Raises:
        Refusal: 400, the chat is too long.
    """
    chat = [(message.role, message.text) for message in messages]
    return _fitting(tokens.encode_chat(chat, limit=limits.max_model_tokens), limits, "messages")


def _completion_ids(data: bytes, limits: PromptLimits) -> list[int]:
    if data[:1] == b'"':
        return tokens.encode(_TEXT.decode(data), limit=limits.max_model_tokens)
    try:
        return _checked_ids(data, limits)
    except msgspec.ValidationError:
        # Only after the fast way failed: is it a list of prompts?
        only = _only_prompt(data)
        if only is None:
            raise
    if only[:1] == b'"':
        return tokens.encode(_TEXT.decode(only), limit=limits.max_model_tokens)
    return _checked_ids(only, limits)


def _checked_ids(data: bytes, limits: PromptLimits) -> list[int]:
    ids = _IDS.decode(data)
    if ids and max(ids) >= limits.vocab_size:
        raise bad_request(
            f"prompt holds the token id {max(ids)}; this model's are below {limits.vocab_size}",
            "prompt",
        )
    return ids


def _only_prompt(data: bytes) -> bytes | None:
    """The one prompt of a list of prompts; None: it is no such list."""
    try:
        prompts = _PROMPTS.decode(data)
    except msgspec.ValidationError:
        return None
    if len(prompts) != 1:
        raise bad_request("prompt holds several prompts; send one request for each", "prompt")
    (only,) = _RAWS.decode(data)
    return bytes(only)


def _fitting(ids: list[int], limits: PromptLimits, param: str) -> Prompt:
    if not ids:
        raise bad_request(f"{param} holds no tokens; send at least one", param)
    if len(ids) >= limits.max_model_tokens:
        raise too_long(
            f"{param} has {len(ids)} tokens or more; this model's context of "
            f"{limits.max_model_tokens} must hold the prompt and at least one token of the answer",
            param,
        )
    return Prompt(input_tokens=len(ids), block_hashes=list(block_hashes(ids, limits.block_size)))

"""The keys by which placement recognises the prefix of a prompt.

Token ids are hashed as in the engine. If the router has the tokenizer of the replicas, it converts
a text to token ids first. Otherwise it hashes the bytes of the JSON, because a request that repeats
the messages of the previous request repeats their bytes. Only the part of a prompt that yields keys
is read. An invalid body has no keys; the engine reports the error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from goodput_core.placement import MAX_KEYS
from goodput_core.placement.blockhash import block_hashes, byte_block_hashes
from goodput_engine import tokens

__all__ = ["BYTES_PER_BLOCK", "PromptForm", "prompt_keys"]

BYTES_PER_BLOCK: Final = 256
"""Bytes per key of a text whose tokenizer the router lacks: about 60 tokens of English."""

_MAX_BODY_BYTES: Final = 4 << 20
"""A larger body has no keys, because reading it takes milliseconds. No model has such a context."""

_MAX_ID_BYTES: Final = 16
"""Upper bound of the bytes of a token id with its comma and spaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptForm:
    """The form in which replicas hold prompts: their tokenizer and their block size.

    Args:
        block_size: tokens per KV block.
        counts_words: True if the tokenizer is that of emulated devices (`goodput_engine.tokens`).
            The router has no other tokenizer.
    """

    block_size: int = 16
    counts_words: bool = False


class _PromptFields(msgspec.Struct):
    prompt: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")


class _PromptPart(msgspec.Struct):
    text: str = ""


class _PromptMessage(msgspec.Struct):
    role: str = ""
    content: str | list[_PromptPart] | None = None


_PROMPT_FIELDS: Final = msgspec.json.Decoder(_PromptFields)
_IDS: Final = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]])
_TEXT: Final = msgspec.json.Decoder(str | list[str])
_CHAT: Final = msgspec.json.Decoder(list[_PromptMessage])


def prompt_keys(body: bytes, form: PromptForm) -> tuple[int, ...]:
    """Return the keys of a request's prompt, at most `MAX_KEYS`; none if it is invalid.

    Args:
        body: the request's body, not compressed.
        form: form of the replicas' prompts.
    """
    if len(body) > _MAX_BODY_BYTES:
        return ()
    try:
        fields = _PROMPT_FIELDS.decode(body)
        if len(fields.messages):
            return _chat_keys(memoryview(fields.messages), form)
        return _completion_keys(memoryview(fields.prompt), form)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ()


def _chat_keys(raw: memoryview, form: PromptForm) -> tuple[int, ...]:
    if not form.counts_words:
        return _byte_keys(raw)
    chat = [(message.role, _content(message)) for message in _CHAT.decode(raw)]
    return _token_keys(tokens.encode_chat(chat, limit=MAX_KEYS * form.block_size), form)


def _completion_keys(raw: memoryview, form: PromptForm) -> tuple[int, ...]:
    if bytes(raw[:1]) == b"[":
        try:
            return _token_keys(_first_ids(raw, MAX_KEYS * form.block_size), form)
        except msgspec.MsgspecError:
            pass  # a list of texts
    if not form.counts_words:
        return _byte_keys(raw)
    text = _TEXT.decode(raw)
    first = text if isinstance(text, str) else text[0] if text else ""
    return _token_keys(tokens.encode(first, limit=MAX_KEYS * form.block_size), form)


def _first_ids(raw: memoryview, count: int) -> list[int]:
    """Return the first ids of a list, without reading the rest."""
    if len(raw) <= count * _MAX_ID_BYTES:
        return _IDS.decode(raw)
    head = bytes(raw[: count * _MAX_ID_BYTES])
    return _IDS.decode(head[: head.rfind(b",")] + b"]")


def _content(message: _PromptMessage) -> str:
    content = message.content
    if isinstance(content, list):
        return "".join(part.text for part in content)
    return content or ""


def _token_keys(ids: list[int], form: PromptForm) -> tuple[int, ...]:
    return block_hashes(ids[: MAX_KEYS * form.block_size], form.block_size)


def _byte_keys(raw: memoryview) -> tuple[int, ...]:
    return byte_block_hashes(bytes(raw[: MAX_KEYS * BYTES_PER_BLOCK]), BYTES_PER_BLOCK)

"""Prompts with exact token counts that share prefixes as the trace's prompts did.

Token n of the block with hash h is a function of (salt, h, n). Equal hashes therefore give equal
tokens in every row, and a run with a new salt has no hits in a server's prefix cache. Tokens beyond
the trace's hashes are a function of (salt, request id). Rendering is stateless.

The text of each token has a fixed width. A prompt is therefore rendered by one table look-up with
random numbers, which directly gives the JSON value for the request's body.
"""

from __future__ import annotations

from hashlib import shake_128
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from goodput_core.spec.choices import Endpoint
from goodput_replay.runs.prompt_kind import PromptKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from goodput_replay.plan import PromptKey

__all__ = [
    "FIRST_TOKEN_ID",
    "NUM_TOKEN_IDS",
    "PromptRenderer",
    "TokenIdPrompts",
    "WordPrompts",
    "make_prompts",
]

# Ids of plain text tokens in every vocabulary since GPT-2.
FIRST_TOKEN_ID: Final = 10_000
NUM_TOKEN_IDS: Final = 1 << 14
_CONSONANTS: Final = "bcdfghklmnprstvz"
_VOWELS: Final = "aeiou"


def make_prompts(
    form: PromptKind,
    endpoint: Endpoint,
    salt: str,
    words: Sequence[str] | None = None,
    overhead_tokens: int = 0,
) -> PromptRenderer:
    """Return the renderer of a run.

    Args:
        form: form of the prompts.
        endpoint: the API to call.
        salt: separates this run's prompts from those of other runs.
        words: words of the tokenizer; None for other forms.
        overhead_tokens: tokens that the target adds to a text of these words.
    """
    if form is PromptKind.TOKEN_IDS:
        return TokenIdPrompts(salt.encode())
    if words is None and endpoint is Endpoint.CHAT:
        from goodput_engine.tokens import CHAT_MESSAGE_TOKENS, CHAT_REPLY_TOKENS  # noqa: PLC0415

        overhead_tokens = CHAT_MESSAGE_TOKENS + CHAT_REPLY_TOKENS
    return WordPrompts(salt.encode(), words=words, overhead_tokens=overhead_tokens)


class PromptRenderer(Protocol):
    """Renders a prompt as the JSON value of a request's body."""

    def tokens(self, key: PromptKey) -> int:
        """Return the number of tokens that the server counts for `key`."""
        ...

    def render(self, key: PromptKey) -> bytes:
        """Return the JSON bytes of the prompt of `key`."""
        ...


def token_numbers(salt: bytes, key: PromptKey) -> NDArray[np.uint16]:
    """Return the prompt as numbers in 0 … NUM_TOKEN_IDS − 1, shape `[input_tokens]`."""
    remaining, parts = key.input_tokens, []
    for block_hash in key.hashes:
        if remaining <= 0:
            break
        count = min(key.block_size, remaining)
        parts.append(_hash_stream(salt, b"block", str(block_hash).encode(), count))
        remaining -= count
    if remaining > 0:
        parts.append(_hash_stream(salt, b"row", key.request_id.encode(), remaining))
    joined = b"".join(parts)
    numbers: NDArray[np.uint16] = np.frombuffer(joined, dtype=np.dtype("<u2"))
    return numbers & np.uint16(NUM_TOKEN_IDS - 1)


def _hash_stream(salt: bytes, kind: bytes, name: bytes, count: int) -> bytes:
    """Return two bytes per token; a shorter stream is a prefix of a longer one."""
    return shake_128(b"%d:%s%s:%s" % (len(salt), salt, kind, name)).digest(2 * count)


class TokenIdPrompts:
    """Prompts as lists of token ids, for completions; their length is exact on every server.

    Args:
        salt: separates this run's prompts from those of other runs.
    """

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        ids = range(FIRST_TOKEN_ID, FIRST_TOKEN_ID + NUM_TOKEN_IDS)
        self._table = np.array([b"%d," % i for i in ids], dtype="S6")

    def tokens(self, key: PromptKey) -> int:
        """Return the prompt length of the row."""
        return key.input_tokens

    def render(self, key: PromptKey) -> bytes:
        """Return a JSON list of `input_tokens` ids."""
        text = self._table[token_numbers(self._salt, key)].tobytes()
        return b"[" + text[:-1] + b"]"


class WordPrompts:
    """Prompts as text of words that are one token each.

    Args:
        salt: separates this run's prompts from those of other runs.
        words: ASCII words of equal length; their number is a power of two, at most
            `NUM_TOKEN_IDS`. None for invented words, which are one token each for emulated devices.
        overhead_tokens: tokens that a server adds around the text, such as a chat template. The
            text is shorter by this number of tokens, but at least one word long.
    """

    def __init__(
        self, salt: bytes, *, words: Sequence[str] | None = None, overhead_tokens: int = 0
    ) -> None:
        self._salt = salt
        self._overhead = overhead_tokens
        if words is None:
            words = _invent_words()
        self._table = np.array([f" {word}".encode() for word in words])
        self._mask = np.uint16(len(words) - 1)

    def tokens(self, key: PromptKey) -> int:
        """Return the prompt length of the row, at least the overhead and one word."""
        return max(key.input_tokens, self._overhead + 1)

    def render(self, key: PromptKey) -> bytes:
        """Return a JSON string of `input_tokens - overhead_tokens` words."""
        count = max(1, key.input_tokens - self._overhead)
        numbers = token_numbers(self._salt, key)[:count] & self._mask
        text: bytes = self._table[numbers].tobytes()
        return b'"' + text[1:] + b'"'


def _invent_words() -> list[str]:
    words = (
        f"{a}{b}{c}{d}"
        for a in _CONSONANTS
        for b in _VOWELS
        for c in _CONSONANTS
        for d in _CONSONANTS
    )
    return list(islice(words, NUM_TOKEN_IDS))

"""Prompts of an exact token count that share prefixes exactly where the trace's prompts did.

Token n of the block with hash h is a function of (salt, h, n): equal hashes give equal tokens
in every row, and a new salt gives a run that finds nothing of an earlier one in a server's
cache. Tokens beyond the trace's hashes are a function of (salt, request id). Nothing is kept
between prompts.

Each token is written at a fixed width, so that a prompt is one table look-up over random
numbers, and the text is the JSON that goes into a body.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import shake_128
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "FIRST_TOKEN_ID",
    "NUM_TOKEN_IDS",
    "PromptKey",
    "Prompts",
    "TokenIdPrompts",
    "WordPrompts",
]

# Ids that exist, as plain text tokens, in every vocabulary from GPT-2's on.
FIRST_TOKEN_ID: Final = 10_000
NUM_TOKEN_IDS: Final = 1 << 14
_CONSONANTS: Final = "bcdfghklmnprstvz"
_VOWELS: Final = "aeiou"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptKey:
    """What a prompt is a function of, beside the salt.

    Args:
        request_id: names the tokens that belong to this row alone.
        input_tokens: length, at least 1.
        hashes: one per block, in order; empty when nothing is shared.
        block_size: tokens per hash; above 0 where there are hashes.
    """

    request_id: str
    input_tokens: int
    hashes: Sequence[int] = ()
    block_size: int = 0


class Prompts(Protocol):
    """Renders a prompt as the JSON value of a request's body."""

    def tokens(self, key: PromptKey) -> int:
        """How many tokens the server will count for `key`."""
        ...

    def render(self, key: PromptKey) -> bytes:
        """The JSON bytes of the prompt of `key`."""
        ...


def token_numbers(salt: bytes, key: PromptKey) -> NDArray[np.uint16]:
    """The prompt as numbers in 0 … NUM_TOKEN_IDS − 1, shape `[input_tokens]`."""
    remaining, parts = key.input_tokens, []
    for block_hash in key.hashes:
        if remaining <= 0:
            break
        count = min(key.block_size, remaining)
        parts.append(_stream(salt, b"block", str(block_hash).encode(), count))
        remaining -= count
    if remaining > 0:
        parts.append(_stream(salt, b"row", key.request_id.encode(), remaining))
    joined = b"".join(parts)
    numbers: NDArray[np.uint16] = np.frombuffer(joined, dtype=np.dtype("<u2"))
    return numbers & np.uint16(NUM_TOKEN_IDS - 1)


def _stream(salt: bytes, kind: bytes, name: bytes, count: int) -> bytes:
    """Two bytes for each of `count` tokens; a shorter stream is a prefix of a longer one."""
    return shake_128(b"%d:%s%s:%s" % (len(salt), salt, kind, name)).digest(2 * count)


class TokenIdPrompts:
    """Prompts as lists of token ids, for completions: exact on every server.

    Args:
        salt: separates this run's prompts from every other run's.
    """

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        ids = range(FIRST_TOKEN_ID, FIRST_TOKEN_ID + NUM_TOKEN_IDS)
        self._table = np.array([b"%d," % i for i in ids], dtype="S6")

    def tokens(self, key: PromptKey) -> int:
        """Exactly what was asked for."""
        return key.input_tokens

    def render(self, key: PromptKey) -> bytes:
        """A JSON list of `input_tokens` ids."""
        text = self._table[token_numbers(self._salt, key)].tobytes()
        return b"[" + text[:-1] + b"]"


class WordPrompts:
    """Prompts as text of short invented words, one token each under the emulated rule.

    Args:
        salt: separates this run's prompts from every other run's.
        overhead_tokens: what a server adds around the text, such as a chat template; a prompt
            is shorter by as much, and at least one word long.
    """

    def __init__(self, salt: bytes, *, overhead_tokens: int = 0) -> None:
        self._salt = salt
        self._overhead = overhead_tokens
        words = (
            f" {a}{b}{c}{d}".encode()
            for a in _CONSONANTS
            for b in _VOWELS
            for c in _CONSONANTS
            for d in _CONSONANTS
        )
        self._table = np.array([w for w, _ in zip(words, range(NUM_TOKEN_IDS), strict=False)])

    def tokens(self, key: PromptKey) -> int:
        """What was asked for, but never fewer than one word and the overhead."""
        return max(key.input_tokens, self._overhead + 1)

    def render(self, key: PromptKey) -> bytes:
        """A JSON string of `input_tokens - overhead_tokens` words."""
        numbers = token_numbers(self._salt, key)
        words = max(1, key.input_tokens - self._overhead)
        return b'"' + self._table[numbers[:words]].tobytes()[1:] + b'"'

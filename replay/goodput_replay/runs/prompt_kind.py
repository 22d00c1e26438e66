"""How prompts are made; apart from the summary, because the options need only it."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["PromptKind"]


class PromptKind(StrEnum):
    """The form of the prompts of a run."""

    TOKEN_IDS = "token_ids"  # noqa: S105 - not a password
    """Lists of token ids, whose length is exact on every server that accepts them."""
    INVENTED_WORDS = "invented_words"
    """Text of invented words, each of them one token for Goodput's emulated devices."""
    TOKENIZER_WORDS = "tokenizer_words"
    """Text of words that are one token each for a given tokenizer."""

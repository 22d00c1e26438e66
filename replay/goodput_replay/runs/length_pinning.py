"""How output lengths reach the server; apart from the summary, because the options need only it."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["LengthPinning"]


class LengthPinning(StrEnum):
    """How the true output length of a row reached the server."""

    HEADER = "header"
    """In a header that only the executor of Goodput's engine reads; hidden from its policies."""
    MAX_TOKENS = "max_tokens"
    """As `max_tokens` with `ignore_eos`, which the server's scheduler can read."""
    LIMIT = "limit"
    """As `max_tokens` alone, for servers that reject `ignore_eos`; the model may end earlier."""
    NONE = "none"
    """Not sent; the model decides where the output ends."""

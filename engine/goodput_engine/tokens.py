"""The tokenizer of an emulated device.

A text is split at ASCII white space into words, and a word is split into pieces of at most
`TOKEN_BYTES` UTF-8 bytes. Each piece is one token, whose id is the CRC-32 of the piece. White
space counts no tokens. English text has about 1.4 tokens per word, similar to the tokenizers of
current models. Equal texts have equal ids. If one text begins with another text and a space, its
ids begin with the ids of the other text, so prefix reuse behaves as on a real engine.

A chat has `CHAT_MESSAGE_TOKENS` additional tokens per message, and `CHAT_REPLY_TOKENS` before the
output. The prompt of the next turn of a conversation therefore begins with exactly the tokens of
the previous prompt and its output.

The output is harmless text with one word per token.

The replayer imports this module to synthesise prompts of an exact length, so the module does not
depend on HTTP. Encoding a long text takes about 30 ms per megabyte. The text is encoded in slices,
so that a thread that encodes does not block the event loop for that time.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "CHAT_MESSAGE_TOKENS",
    "CHAT_REPLY_TOKENS",
    "TOKEN_BYTES",
    "answer_text",
    "count_tokens",
    "encode",
    "encode_chat",
]

TOKEN_BYTES: Final = 6
"""Maximum number of UTF-8 bytes in one token."""

CHAT_MESSAGE_TOKENS: Final = 4
"""Tokens that the chat template adds to a message: start, role, line break and end."""

CHAT_REPLY_TOKENS: Final = 3
"""Tokens that the chat template adds after the last message: start, role and line break."""

_PIECES: Final = re.compile(rb"[^ \t-\r]{1,%d}" % TOKEN_BYTES).findall
_WHITE_SPACE: Final = (b" ", b"\n", b"\t", b"\r", b"\v", b"\f")
_SLICE_BYTES: Final = TOKEN_BYTES * 10_000

# Each mark is longer than a token of a text, so such a token has the same id only by a collision.
_START: Final = crc32(b"<|start|>")
_END: Final = crc32(b"<|end of message|>")
_LINE_BREAK: Final = crc32(b"<|line break|>")

# Each word has at most TOKEN_BYTES ASCII letters, so each is one token.
_WORDS: Final = (
    *("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"),
    *("and", "then", "goes", "home", "for", "some", "tea"),
)


def count_tokens(text: str) -> int:
    """Return the number of tokens of a text."""
    return sum(len(_PIECES(part)) for part in _slices(text))


def encode(text: str, *, limit: int | None = None) -> list[int]:
    """Return the token ids of a text, each below 2**32.

    Args:
        text: any text.
        limit: number of tokens soon after which encoding stops, because the caller rejects longer
            texts; None to encode the complete text.
    """
    ids: list[int] = []
    for part in _slices(text):
        ids.extend(map(crc32, _PIECES(part)))
        if limit is not None and len(ids) > limit:
            break
    return ids


def encode_chat(messages: Iterable[tuple[str, str]], *, limit: int | None = None) -> list[int]:
    """Return the token ids of a chat, up to the start of the output.

    Args:
        messages: role and content, in order.
        limit: see `encode`.
    """
    ids: list[int] = []
    for role, content in messages:
        ids += (_START, _role(role), _LINE_BREAK)
        ids += encode(content, limit=limit)
        ids.append(_END)
        if limit is not None and len(ids) > limit:
            break
    ids += (_START, _role("assistant"), _LINE_BREAK)
    return ids


def answer_text(start: int, count: int) -> str:
    """Return tokens `start` to `start + count` of an output as text.

    Each token is a word, preceded by a space unless it is the first token. However an output is
    split, the parts join to the same text and have the same total number of tokens.
    """
    words = len(_WORDS)
    text = " ".join([_WORDS[i % words] for i in range(start, start + count)])
    return f" {text}" if start and count else text


def _role(role: str) -> int:
    return crc32(b"<|role|>" + role.encode(errors="surrogatepass"))


def _slices(text: str) -> Iterator[bytes]:
    """Yield the text's bytes in slices whose boundaries do not change the tokens."""
    data = text.encode(errors="surrogatepass")
    at, end = 0, len(data)
    while end - at > _SLICE_BYTES:
        limit = at + _SLICE_BYTES
        # Cut after the last white space, or within a word at a multiple of TOKEN_BYTES.
        cut = 1 + max(data.rfind(space, at, limit) for space in _WHITE_SPACE)
        yield data[at : cut or limit]
        at = cut or limit
    yield data[at:]

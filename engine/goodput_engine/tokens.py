"""The tokenizer of an emulated device: a rule simple enough to state in one sentence.

**A text is split at ASCII white space into words, and a word is cut into pieces of at most
`TOKEN_BYTES` UTF-8 bytes; each piece is one token and its id is the piece's CRC-32.** White
space itself is no token. English takes about 1.4 tokens a word, near what it takes with the
tokenizers of current models. Equal texts have equal ids, and a text that continues another
after a space continues its ids, so prefix reuse behaves as on a real engine.

A chat is counted as `encode_chat` builds it: `CHAT_MESSAGE_TOKENS` around every message and
`CHAT_REPLY_TOKENS` that open the answer. The next turn of a conversation begins with exactly
the tokens of the last turn and its answer.

The output is harmless text with one word per token.

The replayer imports this module to synthesise prompts of an exact length, so it knows
nothing of HTTP. Encoding a long text holds the interpreter for about 30 ms per megabyte, in
slices, so that a thread which does it does not stop the event loop for that long.
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
    "count_chat_tokens",
    "count_tokens",
    "encode",
    "encode_chat",
]

TOKEN_BYTES: Final = 6
"""The most UTF-8 bytes of one word in a token."""

CHAT_MESSAGE_TOKENS: Final = 4
"""Tokens that the chat template adds to a message: start, role, line break and end."""

CHAT_REPLY_TOKENS: Final = 3
"""Tokens that the chat template adds after the last message: start, role and line break."""

_PIECES: Final = re.compile(rb"[^ \t-\r]{1,%d}" % TOKEN_BYTES).findall
_WHITE_SPACE: Final = (b" ", b"\n", b"\t", b"\r", b"\v", b"\f")
_SLICE_BYTES: Final = TOKEN_BYTES * 10_000

# Each mark is longer than a token may be, so no text has its id except by a CRC's chance.
_START: Final = crc32(b"<|start|>")
_END: Final = crc32(b"<|end of message|>")
_LINE_BREAK: Final = crc32(b"<|line break|>")

# At most TOKEN_BYTES ASCII letters each: a word of the answer is one token.
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
        limit: stop soon after this many tokens; the caller refuses a longer text.
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
        limit: as of `encode`.
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


def count_chat_tokens(messages: Iterable[tuple[str, str]]) -> int:
    """Return the number of tokens of `encode_chat` for the same messages."""
    return CHAT_REPLY_TOKENS + sum(
        CHAT_MESSAGE_TOKENS + count_tokens(content) for _, content in messages
    )


def answer_text(start: int, count: int) -> str:
    """Return tokens `start` to `start + count` of an output as text.

    Each token is a word, after a space unless it is the first. However an output is cut, its
    parts join to the same text and count to the same number of tokens.
    """
    words = len(_WORDS)
    text = " ".join([_WORDS[i % words] for i in range(start, start + count)])
    return f" {text}" if start and count else text


def _role(role: str) -> int:
    return crc32(b"<|role|>" + role.encode(errors="surrogatepass"))


def _slices(text: str) -> Iterator[bytes]:
    """Yield the text's bytes in slices whose cuts change no token."""
    data = text.encode(errors="surrogatepass")
    at, end = 0, len(data)
    while end - at > _SLICE_BYTES:
        limit = at + _SLICE_BYTES
        # After the last white space; in one endless word, at a multiple of a token's bytes.
        cut = 1 + max(data.rfind(space, at, limit) for space in _WHITE_SPACE)
        yield data[at : cut or limit]
        at = cut or limit
    yield data[at:]

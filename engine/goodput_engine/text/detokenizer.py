"""Text of output tokens, one step after the other, at a cost that depends on the new tokens only.

A decoder of a tokenizer gives each token a text, or in byte-level vocabularies some bytes, that
depends on no other token. Only the first token may differ, because some decoders remove its
leading space. `TokenTexts` finds these bytes once per token and checks on random outputs that they
join to the text that the tokenizer itself decodes. A `Detokenizer` joins them and holds back the
bytes of an incomplete character.

Tokenizers with byte fallback replace a complete run of byte tokens if one of its bytes is invalid.
A stream cannot take back characters that were already sent. There, only the invalid bytes are
replaced.
"""

from __future__ import annotations

import codecs
import json
import random
import re
from typing import TYPE_CHECKING, Any, Final

from goodput_core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tokenizers import Tokenizer

__all__ = ["Detokenizer", "TokenTexts"]

_REPLACEMENT: Final = "�"
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MAX_ANCHORS: Final = 1_000
_CHECKED_OUTPUTS: Final = 16
_CHECKED_TOKENS: Final = 64


class TokenTexts:
    """The bytes of each token of a tokenizer. Special tokens, and unknown ids, have none.

    Args:
        tokenizer: the tokenizer.

    Raises:
        InputError: the text of a token depends on other tokens; one sentence without the file.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        kinds = _decoder_kinds(tokenizer)
        self._byte_level = _byte_level_alphabet() if "ByteLevel" in kinds else None
        self._has_byte_tokens = "ByteFallback" in kinds
        self._special = {
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        self._later: dict[int, bytes] = {}
        self._anchor, self._anchor_text = self._find_anchor()
        self._check()

    def is_shown(self, token_id: int) -> bool:
        """True if the token is part of the text: neither special nor unknown."""
        return token_id not in self._special and self._tokenizer.id_to_token(token_id) is not None

    def first(self, token_id: int) -> bytes:
        """Return the bytes of a token at the start of a text."""
        own = self._own_bytes(token_id)
        if own is not None and (self._byte_level is not None or not own.isascii()):
            return own
        return self._decode([token_id]).encode()

    def later(self, token_id: int) -> bytes:
        """Return the bytes of a token after another token."""
        known = self._later.get(token_id)
        if known is None:
            known = self._later[token_id] = self._find_later(token_id)
        return known

    def _find_later(self, token_id: int) -> bytes:
        own = self._own_bytes(token_id)
        if own is not None:
            return own
        text = self._decode([self._anchor, token_id])
        return text.removeprefix(self._anchor_text).encode()

    def _own_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of a token that may be a part of a character; None for other tokens."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special:
            return b""
        if self._byte_level is not None:
            try:
                return bytes([self._byte_level[character] for character in token])
            except KeyError:  # an added token may have characters outside of the alphabet
                return token.encode()
        match = _BYTE_TOKEN.fullmatch(token) if self._has_byte_tokens else None
        return None if match is None else bytes.fromhex(match[1])

    def _find_anchor(self) -> tuple[int, str]:
        """Return a token with a text of its own, and this text."""
        for token_id in range(min(self._tokenizer.get_vocab_size(), _MAX_ANCHORS)):
            if not self.is_shown(token_id) or (
                self._has_byte_tokens and self._own_bytes(token_id) is not None
            ):
                continue
            text = self._decode([token_id])
            if text.strip() and _REPLACEMENT not in text:
                return token_id, text
        raise InputError("none of its first tokens has a text")

    def _check(self) -> None:
        """Compare joined bytes with the tokenizer's own text, on random outputs."""
        stream = random.Random(0)
        size = self._tokenizer.get_vocab_size()
        for _ in range(_CHECKED_OUTPUTS):
            ids = [stream.randrange(size) for _ in range(_CHECKED_TOKENS)]
            if self._has_byte_tokens:
                ids = [one for one in ids if self._own_bytes(one) in {None, b""}]
            detokenizer = Detokenizer(self)
            if detokenizer.push(ids) + detokenizer.finish() != self._decode(ids):
                raise InputError("the texts of its tokens depend on each other")

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


class Detokenizer:
    """The text of one output.

    Args:
        texts: the bytes of the tokens.
        continues: True if the output continues a text, so that the space at its start is kept.
    """

    __slots__ = ("_at_start", "_decode", "_texts")

    def __init__(self, texts: TokenTexts, *, continues: bool = False) -> None:
        self._texts = texts
        self._at_start = not continues
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens, and return the text that is complete; never a part of a character."""
        texts, later = self._texts, self._texts.later
        if not self._at_start:
            return self._decode(b"".join(map(later, token_ids)))
        pieces: list[bytes] = []
        for token_id in token_ids:
            if self._at_start and texts.is_shown(token_id):
                self._at_start = False
                pieces.append(texts.first(token_id))
            else:
                pieces.append(later(token_id))
        return self._decode(b"".join(pieces))

    def finish(self) -> str:
        """Return the rest of the text; bytes of an incomplete character are replaced."""
        return self._decode(b"", True)


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    """Return the types of a tokenizer's decoder and of its parts."""
    if tokenizer.decoder is None:
        return set()
    kinds: set[str] = set()
    left: list[dict[str, Any]] = [json.loads(tokenizer.decoder.__getstate__())]
    while left:
        decoder = left.pop()
        kinds.add(decoder["type"])
        left += decoder.get("decoders", [])
    return kinds


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character in a byte-level vocabulary.

    Printable Latin-1 characters stand for themselves, the other bytes for characters from 256 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + at): byte for at, byte in enumerate(others)
    }

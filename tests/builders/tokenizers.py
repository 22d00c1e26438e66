"""Real tokenizers of several kinds, trained on the project's documentation."""

from __future__ import annotations

import itertools
import json
import re
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["KINDS", "UNSUITED"]

_ROOT: Final = Path(__file__).resolve().parents[2]
_SIZE: Final = 6000


def _texts() -> Iterator[str]:
    for path in sorted([*_ROOT.glob("*.md"), *_ROOT.glob("docs/**/*.md")]):
        yield path.read_text(encoding="utf-8")


def _trained_once(train: Callable[..., Tokenizer]) -> Callable[..., Tokenizer]:
    """Return a function that trains once and returns a new copy each time, as callers change it."""

    @cache
    def content(**options: int) -> str:
        return train(**options).to_str()

    @wraps(train)
    def copy(**options: int) -> Tokenizer:
        return Tokenizer.from_str(content(**options))

    return copy


@_trained_once
def _byte_level_bpe(*, size: int = _SIZE) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return tokenizer


def _with_prefix_space() -> Tokenizer:
    """Return a tokenizer that adds a space before a text, with special tokens around it."""
    tokenizer = _byte_level_bpe()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    return tokenizer


@_trained_once
def _word_piece() -> Tokenizer:
    """Return an uncased tokenizer as BERT's, whose file truncates and pads texts."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=_SIZE, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(max_length=128)
    tokenizer.enable_padding(length=128)
    return tokenizer


@_trained_once
def _metaspace_bpe() -> Tokenizer:
    """Return a tokenizer as Llama 2's: spaces become characters, and nothing splits a text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=_SIZE, special_tokens=["<unk>", "<s>"], show_progress=False
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


@_trained_once
def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=_SIZE, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return tokenizer


def _merged_words() -> Tokenizer:
    """Return a tokenizer that merges two words of equal length if they are in order."""
    content = json.loads(_byte_level_bpe().to_str())
    content["pre_tokenizer"]["use_regex"] = False
    model = content["model"]
    words = [token for token in model["vocab"] if re.fullmatch("Ġ[a-z]{3,6}", token)]
    for first, second in itertools.product(words, repeat=2):
        if first < second and len(first) == len(second):
            model["merges"].append([first, second])
            model["vocab"].setdefault(first + second, len(model["vocab"]))
    return Tokenizer.from_str(json.dumps(content))


KINDS: Final[dict[str, tuple[Callable[[], Tokenizer], int]]] = {
    "byte-level BPE": (_byte_level_bpe, 0),
    "byte-level BPE with a prefix space and a start token": (_with_prefix_space, 1),
    "WordPiece": (_word_piece, 2),
    "BPE without a pre-tokenizer": (_metaspace_bpe, 1),
    "Unigram": (_unigram, 0),
}
"""Tokenizers by kind, and the special tokens that each adds to a text."""

UNSUITED: Final[dict[str, Callable[[], Tokenizer]]] = {
    "a token for each byte": lambda: _byte_level_bpe(size=257),
    "tokens of several words": _merged_words,
}
"""Tokenizers without words that are one token each in every text, by kind."""

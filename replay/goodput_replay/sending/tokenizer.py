"""Words that are one token each for a given tokenizer; prompts of an exact length consist of them.

A tokenizer splits a text into words, and a word into tokens. A word that is one token, both at the
start of a text and after a space, is therefore one token in every text of such words. Tokenizers
that merge words do not have this property, so texts of the chosen words are counted before they
are used.

Only files of this machine are read. The tokenizer itself is not needed after the words are chosen.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from goodput_core.errors import InputError, UsageError, install_hint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tokenizers import Tokenizer

__all__ = ["TokenizerVocabulary", "find_tokenizer", "read_tokenizer"]

_FILE: Final = "tokenizer.json"
_MODEL_NAME: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]*(?:/[0-9A-Za-z][0-9A-Za-z._-]*)?")
# A vocabulary marks a word after a space with one of these characters, or continued words with ##.
_WORD: Final = re.compile(r"[Ġ▁]?([a-z]{2,12})")
# With fewer words, prompts that should differ would often begin with the same tokens.
_MIN_WORDS: Final = 64
_MAX_WORDS: Final = 1 << 14
_CHECKED_TEXTS: Final = 64
_CHECKED_WORDS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerVocabulary:
    """Words of one tokenizer, all of the same length.

    Args:
        words: lower-case words, most frequent first; their number is a power of two.
        added_tokens: tokens that the tokenizer adds to every text, such as a start token.
        path: file of the tokenizer.
    """

    words: tuple[str, ...]
    added_tokens: int
    path: Path


def find_tokenizer(text: str, environment: Mapping[str, str]) -> Path:
    """Return the `tokenizer.json` of a file, a folder, or a model in the Hugging Face cache.

    Args:
        text: path, or name of a model such as `Qwen/Qwen3-8B`.
        environment: environment variables, of which those of the Hugging Face cache are read.

    Raises:
        InputError: there is no such file.
    """
    path = Path(text)
    if path.is_file():
        return path
    if path.is_dir():
        found = _find_in_folder(path)
        if found is None:
            raise InputError(f"--tokenizer: {path}: the folder has no {_FILE}; give another one")
        return found
    if path.is_absolute() or not _MODEL_NAME.fullmatch(text):
        raise InputError(f"--tokenizer: {path}: no such file; give a {_FILE} or its folder")
    cache = _hub_cache(environment)
    found = _find_in_folder(cache / f"models--{text.replace('/', '--')}")
    if found is None:
        raise InputError(
            f"--tokenizer: {text}: neither a file, nor a model with a {_FILE} in {cache}; download "
            "it first, or give its path"
        )
    return found


def _hub_cache(environment: Mapping[str, str]) -> Path:
    """Return the folder of downloaded models, as Hugging Face's client chooses it."""
    if cache := environment.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := environment.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface" / "hub"


def _find_in_folder(folder: Path) -> Path | None:
    """Return the tokenizer in a folder of files, or of a model in the cache; None if it has none.

    A folder of the cache has its files in `snapshots/REVISION`, and the revision of each branch in
    `refs`. The main branch is preferred, then the revision that was downloaded last.
    """
    if (folder / _FILE).is_file():
        return folder / _FILE
    found = [path for path in folder.glob(f"snapshots/*/{_FILE}") if path.is_file()]
    try:
        main = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        main = ""
    return max(
        found, key=lambda path: (path.parent.name == main, path.stat().st_mtime_ns), default=None
    )


def read_tokenizer(path: Path) -> TokenizerVocabulary:
    """Read a tokenizer and choose its words.

    Args:
        path: a `tokenizer.json` of Hugging Face's tokenizers.

    Raises:
        UsageError: the package `tokenizers` is not installed.
        InputError: the file is not a tokenizer, or has too few words that are one token each.
    """
    tokenizer = _load(path)
    by_length: dict[int, dict[str, int]] = defaultdict(dict)
    for token, number in tokenizer.get_vocab(with_added_tokens=False).items():
        if word := _WORD.fullmatch(token):
            by_length[len(word[1])].setdefault(word[1], number)
    best: list[str] = []
    for _, numbers in sorted(by_length.items()):
        if len(numbers) >= max(_MIN_WORDS, 2 * len(best)):
            ordered = sorted(numbers, key=numbers.__getitem__)
            single = [word for word in ordered if _count(tokenizer, (word, word)) == 2]
            if _power_of_two(len(single)) > len(best):
                best = single[: _power_of_two(len(single))]
    if len(best) < _MIN_WORDS:
        raise InputError(
            f"--tokenizer: {path}: fewer than {_MIN_WORDS} of its words are one token each, so "
            "prompts of an exact length cannot be made of them; use --prompt tokens, or give "
            "another tokenizer"
        )
    _require_additive(tokenizer, best, path)
    added = len(tokenizer.encode("").ids)
    return TokenizerVocabulary(words=tuple(best), added_tokens=added, path=path)


def _load(path: Path) -> Tokenizer:
    try:
        from goodput_engine.text.tokenizer import (  # noqa: PLC0415 - an optional package
            read_tokenizer_file,
        )
    except ImportError as error:
        raise UsageError(
            "--tokenizer: the package tokenizers is not installed; " + install_hint("tokenizer")
        ) from error
    try:
        return read_tokenizer_file(path)
    except InputError as error:
        raise InputError(f"--tokenizer: {error}") from error


def _power_of_two(count: int) -> int:
    """Return the largest power of two that is at most `count` and at most the limit; 0 for 0."""
    return min(1 << count.bit_length() >> 1, _MAX_WORDS)


def _require_additive(tokenizer: Tokenizer, words: Sequence[str], path: Path) -> None:
    """Reject a tokenizer that merges words or splits them in a longer text."""
    generator = random.Random(0)
    for _ in range(_CHECKED_TEXTS):
        text = generator.choices(words, k=_CHECKED_WORDS)
        counted = _count(tokenizer, text)
        if counted != _CHECKED_WORDS:
            raise InputError(
                f"--tokenizer: {path}: a text of {_CHECKED_WORDS} words of one token each has "
                f"{counted} tokens, so prompts of an exact length cannot be made of words; use "
                "--prompt tokens"
            )


def _count(tokenizer: Tokenizer, words: Sequence[str]) -> int:
    return len(tokenizer.encode(" ".join(words), add_special_tokens=False).ids)

"""Words of a tokenizer: texts of them have an exact number of tokens."""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.builders.tokenizers import KINDS, UNSUITED
from tokenizers import Tokenizer

from goodput_core.errors import InputError, UsageError
from goodput_replay.plan import PromptKey
from goodput_replay.sending.prompts import WordPrompts
from goodput_replay.sending.tokenizer import TokenizerVocabulary, find_tokenizer, read_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BLOCK = 16


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that trains a tokenizer once and returns its file."""
    folder = tmp_path_factory.mktemp("tokenizers")

    @cache
    def save(kind: str) -> Path:
        path = folder / f"{len(list(folder.iterdir()))}.json"
        make = KINDS[kind][0] if kind in KINDS else UNSUITED[kind]
        make().save(str(path))
        return path

    return save


@st.composite
def keys(draw: st.DrawFn) -> PromptKey:
    return PromptKey(
        request_id=draw(st.text(min_size=1, max_size=5)),
        input_tokens=draw(st.integers(1, 200)),
        hashes=tuple(draw(st.lists(st.integers(-3, 3), max_size=8))),
        block_size=BLOCK,
    )


def count(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text).ids)


def render(words: TokenizerVocabulary, key: PromptKey, salt: bytes = b"salt") -> str:
    prompts = WordPrompts(salt, words=words.words, overhead_tokens=words.added_tokens)
    text: str = json.loads(prompts.render(key))
    return text


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_has_exactly_the_tokens_of_its_row(saved: Callable[[str], Path], kind: str) -> None:
    words = read_tokenizer(saved(kind))
    assert words.added_tokens == KINDS[kind][1]
    tokenizer = Tokenizer.from_file(str(saved(kind)))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    prompts = WordPrompts(b"salt", words=words.words, overhead_tokens=words.added_tokens)

    @given(keys())
    @settings(max_examples=examples(60), deadline=None)
    def exact(key: PromptKey) -> None:
        counted = count(tokenizer, render(words, key))
        assert counted == prompts.tokens(key) == max(key.input_tokens, words.added_tokens + 1)

    exact()
    # No text is so long that words merge somewhere.
    long = PromptKey(request_id="long", input_tokens=20_000)
    assert count(tokenizer, render(words, long)) == 20_000


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_with_equal_hashes_have_equal_tokens(
    saved: Callable[[str], Path], kind: str
) -> None:
    words = read_tokenizer(saved(kind))
    tokenizer = Tokenizer.from_file(str(saved(kind)))

    def ids(request_id: str, hashes: tuple[int, ...], salt: bytes = b"salt") -> list[int]:
        key = PromptKey(
            request_id=request_id, input_tokens=6 * BLOCK, hashes=hashes, block_size=BLOCK
        )
        text = render(words, key, salt)
        return list(tokenizer.encode(text, add_special_tokens=False).ids)[: 6 * BLOCK]

    one, other, salted = ids("a", (1, 2, 3)), ids("b", (1, 2, 4)), ids("a", (1, 2, 3), b"x")
    assert one[: 2 * BLOCK] == other[: 2 * BLOCK]
    assert one[2 * BLOCK : 3 * BLOCK] != other[2 * BLOCK : 3 * BLOCK]
    assert one[:BLOCK] != salted[:BLOCK]
    assert one == ids("a", (1, 2, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_the_words_are_distinct_and_of_one_length(saved: Callable[[str], Path], kind: str) -> None:
    words = read_tokenizer(saved(kind)).words
    assert len(set(words)) == len(words) >= 64
    assert len(words) & (len(words) - 1) == 0
    assert {len(word) for word in words} == {len(words[0])}
    assert all(word.isascii() and word.isalpha() for word in words)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("a token for each byte", "fewer than 64 of its words are one token each"),
        ("tokens of several words", "prompts of an exact length cannot be made of words"),
    ],
)
def test_a_tokenizer_without_such_words_is_rejected(
    saved: Callable[[str], Path], kind: str, sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        read_tokenizer(saved(kind))


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a tokenizer.json of Hugging Face's tokenizers"),
    "no JSON": (b"\x00\xff model", "not a tokenizer.json of Hugging Face's tokenizers"),
    "a tokenizer_config.json": (
        b'{"tokenizer_class": "LlamaTokenizer"}',
        "not a tokenizer.json of Hugging Face's tokenizers",
    ),
    "deep": (b"[" * 100_000, "not a tokenizer.json of Hugging Face's tokenizers"),
    "no vocabulary": (
        b'{"version":"1.0","model":{"type":"BPE","vocab":{},"merges":[]}}',
        "fewer than 64 of its words are one token each",
    ),
}


@pytest.mark.parametrize(("data", "sentence"), BAD.values(), ids=BAD)
def test_a_file_that_is_no_tokenizer_is_rejected(
    tmp_path: Path, data: bytes, sentence: str
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)
    with pytest.raises(InputError, match=sentence) as caught:
        read_tokenizer(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_of_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with path.open("wb") as file:
        os.truncate(file.fileno(), 1 << 30)
    with pytest.raises(InputError, match="1073741824 bytes are too large for a tokenizer"):
        read_tokenizer(path)


def test_without_the_package_the_error_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "goodput_engine.text.tokenizer", raising=False)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r"pip install '\.\[tokenizer\]'"):
        read_tokenizer(tmp_path / "tokenizer.json")


def write(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    return path


def test_a_file_and_its_folder_are_found(tmp_path: Path) -> None:
    path = write(tmp_path / "model" / "tokenizer.json")
    assert find_tokenizer(str(path), {}) == path
    assert find_tokenizer(str(path.parent), {}) == path


@pytest.mark.parametrize(
    "environment",
    [
        lambda home: {"HF_HUB_CACHE": f"{home}/huggingface/hub"},
        lambda home: {"HF_HOME": f"{home}/huggingface"},
        lambda home: {"XDG_CACHE_HOME": str(home)},
    ],
    ids=["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"],
)
def test_a_model_is_found_in_the_cache(
    tmp_path: Path, environment: Callable[[Path], dict[str, str]]
) -> None:
    model = tmp_path / "huggingface" / "hub" / "models--Qwen--Qwen3-8B"
    older = write(model / "snapshots" / "aaa" / "tokenizer.json")
    newer = write(model / "snapshots" / "bbb" / "tokenizer.json")
    os.utime(older, ns=(1, 1))
    os.utime(newer, ns=(2, 2))
    given = environment(tmp_path)
    assert find_tokenizer("Qwen/Qwen3-8B", given) == newer
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("aaa\n")
    assert find_tokenizer("Qwen/Qwen3-8B", given) == older
    assert find_tokenizer(str(model), {}) == older


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Qwen/Qwen3-8B", "neither a file, nor a model with a tokenizer.json in"),
        ("/no/such/file", "no such file; give a tokenizer.json or its folder"),
        ("../../etc/passwd", "no such file; give a tokenizer.json or its folder"),
        ("a//b", "no such file; give a tokenizer.json or its folder"),
        ("folder", "the folder has no tokenizer.json"),
    ],
)
def test_a_path_without_a_tokenizer_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, sentence: str
) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=sentence):
        find_tokenizer(text, {"HF_HOME": str(tmp_path)})

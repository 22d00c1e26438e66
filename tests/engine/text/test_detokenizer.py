"""A stream of tokens gives the text of the tokenizer, without a part of a character."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.text.conftest import TOKENIZERS, trained
from tokenizers import Tokenizer, decoders

from goodput_core.errors import InputError
from goodput_engine.text.detokenizer import Detokenizer, TokenTexts
from goodput_engine.text.tokenizer import read_tokenizer_file

if TYPE_CHECKING:
    from pathlib import Path

KINDS = sorted(TOKENIZERS)
BYTE_FALLBACK = [kind for kind in KINDS if kind.startswith("byte fallback")]
_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="�"), max_size=40)
_WORDS = st.lists(
    st.sampled_from(
        ["the", "replica", " ", "  ", "naïve", "日本語", "😀", "👩‍👩‍👧", "\n", "don't", ".", "é"]
    ),
    max_size=12,
).map(" ".join)


def stream(texts: TokenTexts, ids: list[int], sizes: list[int], **options: bool) -> list[str]:
    """Push ids in groups of these sizes, and return the pieces of text."""
    detokenizer = Detokenizer(texts, **options)
    pieces: list[str] = []
    at = 0
    for size in [*sizes, len(ids)]:
        pieces.append(detokenizer.push(ids[at : at + size]))
        at += size
    return [*pieces, detokenizer.finish()]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Return the ids of the byte tokens of some bytes."""
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in data]
    return [one for one in ids if one is not None]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


_texts: dict[str, TokenTexts] = {}


def texts_of(kind: str) -> TokenTexts:
    if kind not in _texts:
        _texts[kind] = TokenTexts(trained(kind))
    return _texts[kind]


_SIZES = st.lists(st.integers(0, 5), max_size=30)


@settings(deadline=None)
@given(data=st.data(), sizes=_SIZES)
def test_the_pieces_join_to_the_decoded_text(
    kind: str, data: st.DataObject, sizes: list[int]
) -> None:
    tokenizer = trained(kind)
    # Ids from the size of the vocabulary on are those of padded embeddings.
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=40))
    if kind in BYTE_FALLBACK:  # runs of these are in the tests below
        ids = [one for one in ids if not (tokenizer.id_to_token(one) or "").startswith("<0x")]
    assert "".join(stream(texts_of(kind), ids, sizes)) == tokenizer.decode(ids)


@settings(deadline=None)
@given(text=st.one_of(_TEXT, _WORDS), sizes=_SIZES)
def test_a_text_arrives_without_a_part_of_a_character(
    kind: str, text: str, sizes: list[int]
) -> None:
    tokenizer = trained(kind)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    expected = tokenizer.decode(ids)
    pieces = stream(texts_of(kind), ids, sizes)
    assert "".join(pieces) == expected
    assert "�" not in expected, "the texts are valid"
    assert pieces[-1] == ""


@pytest.mark.parametrize("kind", BYTE_FALLBACK)
@settings(deadline=None)
@given(data=st.lists(st.integers(0, 255), max_size=12), sizes=_SIZES)
def test_invalid_bytes_are_replaced_one_run_at_a_time(
    kind: str, data: list[int], sizes: list[int]
) -> None:
    tokenizer = trained(kind)
    ids = byte_ids(tokenizer, bytes(data))
    expected = bytes(data).decode(errors="replace")
    if kind == "byte fallback" and data[:1] == [0x20]:
        expected = expected[1:]
    assert "".join(stream(texts_of(kind), ids, sizes)) == expected


@settings(deadline=None)
@given(data=st.lists(st.binary(max_size=6), max_size=12), sizes=_SIZES)
def test_any_bytes_of_a_byte_level_vocabulary_are_decoded_as_a_whole(
    data: list[bytes], sizes: list[int]
) -> None:
    tokenizer = trained("byte-level")
    texts = texts_of("byte-level")
    of_byte = {
        texts.later(one): one
        for one in range(tokenizer.get_vocab_size())
        if len(texts.later(one)) == 1
    }
    assert len(of_byte) == 256
    ids = [of_byte[bytes([byte])] for part in data for byte in part]
    pieces = stream(texts, ids, sizes)
    assert "".join(pieces) == tokenizer.decode(ids) == b"".join(data).decode(errors="replace")


def test_a_character_of_several_tokens_is_sent_with_its_last_token() -> None:
    tokenizer = trained("byte fallback")
    ids = byte_ids(tokenizer, "😀é".encode())
    assert stream(texts_of("byte fallback"), ids, [1] * 6) == ["", "", "", "😀", "", "é", "", ""]


def test_an_output_that_ends_within_a_character_ends_with_a_replacement() -> None:
    tokenizer = trained("byte fallback")
    ids = byte_ids(tokenizer, "😀".encode()[:3])
    assert stream(texts_of("byte fallback"), ids, [1, 1, 1]) == ["", "", "", "", "�"]


@settings(deadline=None)
@given(data=st.data())
def test_an_output_that_continues_a_prompt_keeps_its_space(kind: str, data: st.DataObject) -> None:
    tokenizer, texts = trained(kind), texts_of(kind)
    size = tokenizer.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=10))
    if kind in BYTE_FALLBACK:
        ids = [one for one in ids if not (tokenizer.id_to_token(one) or "").startswith("<0x")]
    start = tokenizer.encode("the", add_special_tokens=False).ids
    assert tokenizer.decode(start) + "".join(
        stream(texts, ids, [], continues=True)
    ) == tokenizer.decode([*start, *ids])


class CountingTokenizer:
    """A tokenizer that counts the ids that it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.decoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, ids: list[int], **options: bool) -> str:
        self.decoded += len(ids)
        return str(self._tokenizer.decode(ids, **options))


def test_no_token_is_decoded_twice(kind: str) -> None:
    tokenizer = CountingTokenizer(trained(kind))
    texts = TokenTexts(tokenizer)  # type: ignore[arg-type]
    ids = tokenizer.encode("one replica serves many requests. " * 200).ids
    tokenizer.decoded = 0
    detokenizer = Detokenizer(texts)
    for one in ids:
        detokenizer.push([one])
    assert tokenizer.decoded <= 2 * len(set(ids)) + 1


def test_a_decoder_that_merges_repeated_tokens_is_rejected() -> None:
    tokenizer = TOKENIZERS["metaspace"]()
    tokenizer.decoder = decoders.BPEDecoder(suffix="e")
    with pytest.raises(InputError, match="depend on each other"):
        TokenTexts(tokenizer)


# `make test` runs before the model is downloaded, `make test-torch` after it.
@pytest.mark.torch
@settings(deadline=None)
@given(data=st.data(), sizes=_SIZES)
def test_the_pieces_of_a_real_model_join_to_the_decoded_text(
    smollm2: Path, data: st.DataObject, sizes: list[int]
) -> None:
    if "smollm2" not in _real:
        _real["smollm2"] = read_tokenizer_file(smollm2 / "tokenizer.json")
        _texts["smollm2"] = TokenTexts(_real["smollm2"])
    tokenizer = _real["smollm2"]
    ids = data.draw(
        st.one_of(
            st.lists(st.integers(0, tokenizer.get_vocab_size()), max_size=60),
            _TEXT.map(lambda text: tokenizer.encode(text).ids),
        )
    )
    assert "".join(stream(_texts["smollm2"], ids, sizes)) == tokenizer.decode(ids)


_real: dict[str, Tokenizer] = {}

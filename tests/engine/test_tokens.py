"""The emulated tokenizer: counts that both ends of a replay agree on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.placement.blockhash import block_hashes
from goodput_engine import tokens
from goodput_engine.tokens import (
    CHAT_MESSAGE_TOKENS,
    CHAT_REPLY_TOKENS,
    TOKEN_BYTES,
    answer_text,
    count_tokens,
    encode,
    encode_chat,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        pytest.param("", 0, id="nothing"),
        pytest.param(" \t\r\n\v\f ", 0, id="white space costs nothing"),
        pytest.param("hello", 1, id="a short word"),
        pytest.param("hello world", 2, id="two words"),
        pytest.param("hello   world\n", 2, id="more white space"),
        pytest.param("abcdef", 1, id="a word as long as a token"),
        pytest.param("abcdefg", 2, id="one byte more"),
        pytest.param("internationalization", 4, id="a long word"),
        pytest.param("日本語", 2, id="three bytes a character"),
        pytest.param("a\u00a0b", 1, id="only ASCII white space splits"),
        pytest.param("\ud800", 1, id="half a surrogate pair"),
    ],
)
def test_a_text_counts_to(text: str, count: int) -> None:
    assert count_tokens(text) == count
    assert len(encode(text)) == count


@given(st.text())
def test_ids_are_as_many_as_the_count_and_fit_a_block_hash(text: str) -> None:
    ids = encode(text)
    assert len(ids) == count_tokens(text)
    assert encode(text) == ids
    block_hashes(ids, 1)


@given(st.text(), st.text())
def test_a_text_that_goes_on_after_a_space_keeps_its_tokens(first: str, rest: str) -> None:
    assert encode(f"{first} {rest}") == encode(first) + encode(rest)


@given(st.lists(st.sampled_from(["a", "longer-than-a-token", " ", "\n", "x" * 40]), max_size=60))
def test_slicing_a_long_text_changes_no_token(parts: list[str]) -> None:
    text = "".join(parts)
    whole = [piece for word in text.split() for piece in _cut(word)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "_SLICE_BYTES", 2 * TOKEN_BYTES)
        assert encode(text) == encode(" ".join(whole))
        assert count_tokens(text) == len(whole)


def _cut(word: str) -> list[str]:
    return [word[i : i + TOKEN_BYTES] for i in range(0, len(word), TOKEN_BYTES)]


def test_encoding_stops_soon_after_its_limit() -> None:
    assert 100 < len(encode("word " * 1_000_000, limit=100)) < 20_000


_CHATS = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text()), min_size=1, max_size=6
)


@given(_CHATS)
def test_a_chat_counts_to_its_contents_and_the_templates_share(chat: list[tuple[str, str]]) -> None:
    contents = sum(count_tokens(content) for _, content in chat)
    expected = contents + CHAT_MESSAGE_TOKENS * len(chat) + CHAT_REPLY_TOKENS
    assert len(encode_chat(chat)) == expected


@given(_CHATS, st.integers(1, 40), st.text())
def test_the_next_turn_begins_with_the_last_turn_and_its_answer(
    chat: list[tuple[str, str]], answered: int, question: str
) -> None:
    answer = answer_text(0, answered)
    turn = [*chat, ("assistant", answer), ("user", question)]
    before = encode_chat(chat) + encode(answer)
    assert encode_chat(turn)[: len(before)] == before


def test_roles_are_part_of_the_prompt() -> None:
    assert encode_chat([("user", "x")]) != encode_chat([("system", "x")])


@given(st.lists(st.integers(0, 30), max_size=20))
def test_an_answer_counts_to_its_tokens_however_it_is_cut(sizes: list[int]) -> None:
    parts: list[str] = []
    at = 0
    for size in sizes:
        parts.append(answer_text(at, size))
        at += size
    assert "".join(parts) == answer_text(0, at)
    assert count_tokens("".join(parts)) == at


@given(st.integers(0, 100_000))
def test_every_token_of_an_answer_is_a_non_empty_piece(index: int) -> None:
    assert answer_text(index, 1).strip()
    assert count_tokens(answer_text(index, 1)) == 1

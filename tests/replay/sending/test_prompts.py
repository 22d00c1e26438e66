"""Prompts have exact token counts and share prefixes as their hashes do."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.placement.blockhash import block_hashes
from goodput_engine.tokens import count_tokens, encode, encode_chat
from goodput_replay.plan import PromptKey
from goodput_replay.sending.prompts import (
    FIRST_TOKEN_ID,
    NUM_TOKEN_IDS,
    TokenIdPrompts,
    WordPrompts,
)

BLOCK = 4


@st.composite
def keys(draw: st.DrawFn) -> PromptKey:
    tokens = draw(st.integers(1, 30))
    hashes = draw(st.lists(st.integers(-3, 3), max_size=8))
    return PromptKey(
        request_id=draw(st.text(min_size=1, max_size=5)),
        input_tokens=tokens,
        hashes=tuple(hashes),
        block_size=BLOCK,
    )


def ids(key: PromptKey, salt: bytes = b"salt") -> list[int]:
    decoded: list[int] = json.loads(TokenIdPrompts(salt).render(key))
    return decoded


def words(key: PromptKey, overhead: int = 0) -> str:
    decoded: str = json.loads(WordPrompts(b"salt", overhead_tokens=overhead).render(key))
    return decoded


@given(keys())
def test_token_id_prompts_have_the_exact_length(key: PromptKey) -> None:
    prompt = ids(key)
    assert len(prompt) == key.input_tokens == TokenIdPrompts(b"").tokens(key)
    assert all(FIRST_TOKEN_ID <= token < FIRST_TOKEN_ID + NUM_TOKEN_IDS for token in prompt)


@given(keys(), st.integers(0, 9))
def test_word_prompts_have_the_exact_length_with_the_template(
    key: PromptKey, overhead: int
) -> None:
    prompts = WordPrompts(b"salt", overhead_tokens=overhead)
    counted = count_tokens(words(key, overhead)) + overhead
    assert counted == prompts.tokens(key) == max(key.input_tokens, overhead + 1)


def test_a_chat_of_one_message_has_the_exact_length() -> None:
    key = PromptKey(request_id="a", input_tokens=123)
    assert len(encode_chat([("user", words(key, overhead=7))])) == 123


@given(keys(), keys())
def test_prompts_share_the_blocks_of_equal_hashes_and_no_more(
    one: PromptKey, other: PromptKey
) -> None:
    shared = 0
    for a, b in zip(one.hashes, other.hashes, strict=False):
        if a != b:
            break
        shared += 1
    least = min(shared * BLOCK, one.input_tokens, other.input_tokens)
    mine, theirs = ids(one), ids(other)
    assert mine[:least] == theirs[:least]
    full = least // BLOCK
    blocks, others = block_hashes(mine, BLOCK), block_hashes(theirs, BLOCK)
    assert blocks[:full] == others[:full]
    # A chance equality of four 14-bit tokens would be one in 2**56.
    if one.request_id != other.request_id and min(len(blocks), len(others)) > shared:
        assert blocks[shared] != others[shared]


@given(keys())
def test_word_prompts_share_the_same_prefix_as_token_id_prompts(key: PromptKey) -> None:
    longer = PromptKey(
        request_id="longer",
        input_tokens=key.input_tokens + 9,
        hashes=key.hashes,
        block_size=BLOCK,
    )
    shared = min(len(key.hashes) * BLOCK, key.input_tokens)
    assert encode(words(key))[:shared] == encode(words(longer))[:shared]


@given(keys())
def test_a_prompt_depends_on_the_salt(
    key: PromptKey,
) -> None:
    assert ids(key) == ids(key)
    if key.input_tokens >= 4:
        assert ids(key, b"one") != ids(key, b"two")


@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_the_last_block_may_be_partial(tokens: int) -> None:
    whole = ids(PromptKey(request_id="a", input_tokens=12, hashes=(1, 2, 3), block_size=BLOCK))
    part = PromptKey(request_id="b", input_tokens=tokens, hashes=(1, 2, 3), block_size=BLOCK)
    assert ids(part) == whole[:tokens]


def test_prompts_are_the_same_in_every_process_and_version() -> None:
    key = PromptKey(request_id="row-1", input_tokens=6, hashes=(7,), block_size=BLOCK)
    assert ids(key) == [10904, 21069, 11083, 24074, 23549, 11833]
    assert words(key) == "bomm moft bufr puzp pivt cidn"

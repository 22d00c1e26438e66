"""Hashes of KV blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.placement.blockhash import block_hashes

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=64)
SIZES = st.integers(1, 16)


@given(tokens=TOKENS, size=SIZES)
def test_only_full_blocks_have_a_hash(tokens: list[int], size: int) -> None:
    hashes = block_hashes(tokens, size)
    assert len(hashes) == len(tokens) // size
    assert all(0 <= h < 2**64 for h in hashes)


@given(prefix=TOKENS, one=TOKENS, other=TOKENS, size=SIZES)
def test_equal_prefixes_have_equal_hashes(
    prefix: list[int], one: list[int], other: list[int], size: int
) -> None:
    shared = len(prefix) // size
    assert (
        block_hashes(prefix + one, size)[:shared]
        == block_hashes(prefix + other, size)[:shared]
        == block_hashes(prefix, size)
    )


@given(tokens=st.lists(st.integers(0, 2**32 - 2), min_size=4, max_size=40), data=st.data())
def test_a_changed_token_changes_every_hash_from_its_block_on(
    tokens: list[int], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:place], tokens[place] + 1, *tokens[place + 1 :]]
    before, after = block_hashes(tokens, 4), block_hashes(changed, 4)
    assert before[: place // 4] == after[: place // 4]
    assert all(a != b for a, b in zip(before[place // 4 :], after[place // 4 :], strict=True))


def test_equal_blocks_at_different_places_differ() -> None:
    first, second = block_hashes([7, 7, 7, 7], 2)
    assert first != second


def test_a_salt_separates_caches() -> None:
    assert block_hashes([1, 2], 2, salt=b"tenant") != block_hashes([1, 2], 2)


def test_hashes_are_the_same_on_every_machine() -> None:
    assert block_hashes([1, 2, 3, 4], 2) == (0xC7036499877909A9, 0xC6A6133863D4BF83)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_id_out_of_range_is_rejected(token: int) -> None:
    with pytest.raises(OverflowError):
        block_hashes([token], 1)

"""The pool of KV blocks: counting, reuse and the order of eviction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_engine.kv.blocks import BlockPool


def _pool(total: int = 4) -> BlockPool:
    return BlockPool(total_blocks=total, block_size=16)


def test_lengths_17_31_48_65_waste_31_of_192_slots() -> None:
    lengths = [17, 31, 48, 65]
    slots = sum(_pool().blocks_for(n) * 16 for n in lengths)
    assert (slots, slots - sum(lengths)) == (192, 31)


def test_a_freed_prefix_is_found_again_and_shared() -> None:
    pool = _pool()
    table = pool.allocate(2)
    pool.publish(table, (1, 2))
    pool.release(table)
    assert (pool.free_blocks, pool.cached_blocks) == (4, 2)
    hits = pool.match([1, 2, 3], 9)
    assert hits == table
    assert pool.idle(hits) == 2
    pool.share(hits)
    pool.share(hits)
    assert (pool.free_blocks, pool.cached_blocks, pool.exclusive(hits)) == (2, 0, 0)
    pool.check_integrity([hits, hits])


def test_a_match_ends_at_the_first_unknown_block_and_at_the_limit() -> None:
    pool = _pool()
    table = pool.allocate(3)
    pool.publish(table, (1, 2, 3))
    assert pool.match([1, 9, 3], 9) == table[:1]
    assert pool.match([1, 2, 3], 2) == table[:2]


def test_blank_blocks_go_first_then_the_tail_of_the_prefix_freed_longest_ago() -> None:
    pool = _pool(5)
    old, new = pool.allocate(2), pool.allocate(2)
    pool.publish(old + new, (1, 2, 3, 4))
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1)[0] not in old + new
    assert pool.allocate(3) == [old[1], old[0], new[1]]
    assert pool.match([1], 1) == []
    assert pool.match([3], 1) == [new[0]]


def test_a_second_block_with_the_same_prefix_stays_private() -> None:
    pool = _pool()
    one, two = pool.allocate(1), pool.allocate(1)
    pool.publish(one, [7])
    pool.publish(two, [7])
    assert pool.match([7], 1) == one
    assert pool.writable(two[0])
    pool.release(two)
    assert pool.cached_blocks == 0
    pool.check_integrity([one])


def test_an_empty_pool_gives_nothing() -> None:
    pool = _pool(1)
    assert pool.allocate_one() == 0
    assert pool.allocate_one() is None


def test_an_unknown_block_table_is_detected() -> None:
    pool = _pool()
    pool.allocate(1)
    with pytest.raises(AssertionError, match="counted wrongly"):
        pool.check_integrity([])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=60))
def test_free_live_and_cached_blocks_are_all_there_are(actions: list[tuple[int, int]]) -> None:
    pool = _pool(8)
    tables: list[list[int]] = []
    for action, number in actions:
        if action == 0 and number <= pool.free_blocks:
            tables.append(pool.allocate(number))
        elif action == 1 and tables:
            pool.release(tables.pop(number % len(tables)))
        elif action == 2 and tables:
            table = tables[number % len(tables)]
            pool.publish(table, range(len(table)))
        elif action == 3:
            hits = pool.match(range(number), number)
            pool.share(hits)
            tables.append(hits)
        pool.check_integrity(tables)
    for table in tables:
        pool.release(table)
    assert pool.free_blocks == 8

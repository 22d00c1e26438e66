"""The pools of KV blocks on the device and in host memory.

Device blocks are reference-counted and can be reused by the hash of their prefix. A block is *live*
(in at least one block table), *cached* (in no table, but with a reusable prefix) or *blank*. Cached
and blank blocks are both free. Blank blocks are allocated first, then the cached block that was
freed longest ago.

The pools allocate block numbers; the executor owns the contents. The pools do not handle requests,
steps or time: the scheduler decides when to release a block and when to publish its hash.

Source: Kwon et al., "PagedAttention", SOSP 2023, sections 4.2 and 4.3; prefix reuse by chained
hashes as in vLLM's automatic prefix caching.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from itertools import chain, islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["BlockPool", "HostPool"]


class BlockPool:
    """The device blocks 0 … `total_blocks` − 1.

    Args:
        total_blocks: number of blocks, at least 1.
        block_size: number of tokens per block, at least 1.
    """

    __slots__ = (
        "_blank",
        "_by_hash",
        "_cached",
        "_hashes",
        "_references",
        "block_size",
        "generation",
        "total_blocks",
    )

    def __init__(self, *, total_blocks: int, block_size: int) -> None:
        self.total_blocks = total_blocks
        self.block_size = block_size
        self.generation = 0
        """Counter that increases whenever an allocation or match that failed may now succeed."""
        self._blank = list(range(total_blocks - 1, -1, -1))
        # LRU order; an OrderedDict removes from the middle in O(1).
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * total_blocks
        self._hashes: list[int | None] = [None] * total_blocks
        self._by_hash: dict[int, int] = {}

    @property
    def free_blocks(self) -> int:
        """Number of blocks that can be allocated now, including cached ones."""
        return len(self._blank) + len(self._cached)

    @property
    def cached_blocks(self) -> int:
        """Number of free blocks that still hold a reusable prefix."""
        return len(self._cached)

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks needed for this many tokens."""
        return -(-tokens // self.block_size)

    def match(self, hashes: Sequence[int], limit: int) -> list[int]:
        """Return the blocks of the longest published prefix, in order, without sharing them.

        Args:
            hashes: chained hashes of the full blocks of a prompt.
            limit: maximum number of blocks to return.
        """
        by_hash = self._by_hash
        hits: list[int] = []
        for position in range(min(limit, len(hashes))):
            block = by_hash.get(hashes[position])
            if block is None:
                break
            hits.append(block)
        return hits

    def is_published(self, block_hash: int) -> bool:
        """Return True if a block with this hash can be reused."""
        return block_hash in self._by_hash

    def idle(self, blocks: Iterable[int]) -> int:
        """Return the number of free blocks among these; sharing makes them live."""
        references = self._references
        return sum(not references[block] for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Add these matched blocks to one more block table."""
        references, cached = self._references, self._cached
        for block in blocks:
            if not references[block]:
                del cached[block]
            references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Allocate blocks for one block table; the caller has checked `free_blocks`."""
        blank = self._blank
        blocks = blank[len(blank) - count :][::-1] if count <= len(blank) else blank[::-1]
        del blank[len(blank) - len(blocks) :]
        if len(blocks) < count:
            blocks += self._evict(count - len(blocks))
        references = self._references
        for block in blocks:
            references[block] = 1
        return blocks

    def allocate_one(self) -> int | None:
        """Allocate one block and return it; None if no block is free."""
        if self._blank:
            block = self._blank.pop()
        elif self._cached:
            (block,) = self._evict(1)
        else:
            return None
        self._references[block] = 1
        return block

    def publish(self, blocks: Sequence[int], block_hashes: Sequence[int]) -> None:
        """Allow the reuse, by their hashes, of live blocks that are full and computed.

        A second block with an equal prefix is not published; it becomes blank when it is freed.
        """
        by_hash, hashes = self._by_hash, self._hashes
        previous_count = len(by_hash)
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            if block_hash not in by_hash and hashes[block] is None:
                by_hash[block_hash] = block
                hashes[block] = block_hash
        self.generation += len(by_hash) - previous_count

    def release(self, table: Sequence[int]) -> None:
        """Release the blocks of a table, last first, so that the first blocks are evicted last."""
        references, hashes, blank, cached = (
            self._references,
            self._hashes,
            self._blank,
            self._cached,
        )
        for block in reversed(table):
            references[block] = remaining = references[block] - 1
            if remaining:
                continue
            if hashes[block] is None:
                blank.append(block)
            else:
                cached[block] = None
        self.generation += 1

    def exclusive(self, table: Iterable[int]) -> int:
        """Return the number of blocks that releasing this table would free."""
        references = self._references
        return sum(references[block] == 1 for block in table)

    def writable(self, block: int) -> bool:
        """True if exactly one table holds this block and it has no published hash."""
        return self._references[block] == 1 and self._hashes[block] is None

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the pool agrees with the complete set of tables."""
        occurrences = Counter(chain.from_iterable(tables))
        for block, references in enumerate(self._references):
            assert references == occurrences[block], f"block {block} is counted wrongly"
        free = self._blank + list(self._cached)
        assert len(free) == len(set(free)), "a block is free twice"
        assert not occurrences.keys() & set(free), "a free block is in use"
        assert len(free) + len(occurrences) == self.total_blocks, "a block is lost"
        for block_hash, block in self._by_hash.items():
            assert self._hashes[block] == block_hash, f"block {block} is found by a wrong hash"
        assert all(self._hashes[block] is None for block in self._blank), "a blank block is hashed"
        assert sum(h is not None for h in self._hashes) == len(self._by_hash)

    def _evict(self, count: int) -> list[int]:
        """Evict the cached blocks that were freed longest ago, and return them."""
        cached, by_hash, hashes = self._cached, self._by_hash, self._hashes
        assert count <= len(cached), "more blocks are allocated than are free"
        blocks = list(islice(cached, count))
        for block in blocks:
            del cached[block]
            evicted = hashes[block]
            assert evicted is not None
            del by_hash[evicted]
            hashes[block] = None
        return blocks


class HostPool:
    """The host blocks 0 … `total_blocks` − 1, for copies of device blocks.

    Args:
        total_blocks: number of blocks; 0 to allow no copies.
        ns_per_block: time to copy one block, one way.
    """

    __slots__ = ("_free", "ns_per_block", "total_blocks")

    def __init__(self, *, total_blocks: int, ns_per_block: int) -> None:
        self.total_blocks = total_blocks
        self.ns_per_block = ns_per_block
        self._free = list(range(total_blocks - 1, -1, -1))

    @property
    def free_blocks(self) -> int:
        """Number of blocks that can be allocated."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Allocate blocks for one copy; the caller has checked `free_blocks`."""
        blocks = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Free the blocks of a copy."""
        self._free.extend(blocks)

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless the pool agrees with the complete set of tables."""
        used = [block for table in tables for block in table]
        assert len(used) == len(set(used)), "a host block is used twice"
        assert sorted(used + self._free) == list(range(self.total_blocks))

"""The pool of KV blocks: reference-counted, reusable by prefix hash, evicted least recently used.

It hands out numbers; what a block holds is the executor's. A block is *live* (some table names
it), *cached* (nobody does, but it still holds a known prefix) or *blank*. Cached and blank blocks
are both free: blank ones are handed out first, then the cached one that was freed longest ago.

It must not know of requests, steps or time: when a block may be let go, or its prefix be found
by others, is the scheduler's to say.

Source: Kwon et al., "PagedAttention", SOSP 2023, sections 4.2 and 4.3; prefix reuse by chained
hashes as in vLLM's automatic prefix caching.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from itertools import chain, islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["BlockPool"]


class BlockPool:
    """Blocks 0 … total − 1 of `block_size` tokens each.

    Args:
        total_blocks: at least 1.
        block_size: tokens per block, at least 1.
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
        """Grows whenever an allocation that failed might now succeed."""
        self._blank = list(range(total_blocks - 1, -1, -1))
        # An OrderedDict is a linked list in C with removal from the middle in O(1): the LRU.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * total_blocks
        self._hashes: list[int | None] = [None] * total_blocks
        self._by_hash: dict[int, int] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that can be handed out at once, cached ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def cached_blocks(self) -> int:
        """Free blocks that still hold a reusable prefix."""
        return len(self._cached)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    def match(self, hashes: Sequence[int], limit: int) -> list[int]:
        """The blocks that hold the longest known prefix, in order; nothing is taken yet.

        Args:
            hashes: chained hashes of a prompt's full blocks.
            limit: blocks at most.
        """
        by_hash = self._by_hash
        hits: list[int] = []
        for position in range(min(limit, len(hashes))):
            block = by_hash.get(hashes[position])
            if block is None:
                break
            hits.append(block)
        return hits

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are free now, so that sharing them lowers `free_blocks`."""
        references = self._references
        return sum(not references[block] for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """One more table names these matched blocks."""
        references, cached = self._references, self._cached
        for block in blocks:
            if not references[block]:
                del cached[block]
            references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Blocks for one writer; the caller has looked at `free_blocks`."""
        blank = self._blank
        taken = blank[len(blank) - count :][::-1] if count <= len(blank) else blank[::-1]
        del blank[len(blank) - len(taken) :]
        if len(taken) < count:
            taken += self._evict(count - len(taken))
        references = self._references
        for block in taken:
            references[block] = 1
        return taken

    def allocate_one(self) -> int | None:
        """One block, or None when none is free."""
        if self._blank:
            block = self._blank.pop()
        elif self._cached:
            (block,) = self._evict(1)
        else:
            return None
        self._references[block] = 1
        return block

    def publish(self, blocks: Sequence[int], block_hashes: Sequence[int]) -> None:
        """These live blocks are full and computed: others may find them by their hashes.

        A second block with an equal prefix stays private; it is blank when freed.
        """
        by_hash, hashes = self._by_hash, self._hashes
        before = len(by_hash)
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            if block_hash not in by_hash and hashes[block] is None:
                by_hash[block_hash] = block
                hashes[block] = block_hash
        self.generation += len(by_hash) - before

    def release(self, table: Sequence[int]) -> None:
        """A table lets go of its blocks: last first, so that prefixes survive longest."""
        references, hashes, blank, cached = (
            self._references,
            self._hashes,
            self._blank,
            self._cached,
        )
        for block in reversed(table):
            references[block] = left = references[block] - 1
            if left:
                continue
            if hashes[block] is None:
                blank.append(block)
            else:
                cached[block] = None
        self.generation += 1

    def exclusive(self, table: Iterable[int]) -> int:
        """How many blocks of this table would become free if it were released."""
        references = self._references
        return sum(references[block] == 1 for block in table)

    def writable(self, block: int) -> bool:
        """Whether exactly one table names this block and nobody can find it by hash."""
        return self._references[block] == 1 and self._hashes[block] is None

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the pool and these tables, all there are, agree."""
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
        """Blank the cached blocks that were freed longest ago; there are as many."""
        cached, by_hash, hashes = self._cached, self._by_hash, self._hashes
        blocks = list(islice(cached, count))
        for block in blocks:
            del cached[block]
            evicted = hashes[block]
            assert evicted is not None
            del by_hash[evicted]
            hashes[block] = None
        return blocks

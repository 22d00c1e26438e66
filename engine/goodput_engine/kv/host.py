"""Host memory for KV blocks that were copied off the device: how many, and how fast.

Like the device's pool it hands out numbers; the bytes are the executor's. It must not know of
requests: who may keep a copy, and for how long, is the scheduler's to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["HostPool"]


class HostPool:
    """Host blocks 0 … total − 1, each as large as a device block.

    Args:
        total_blocks: the host-memory budget, in blocks; 0: nothing can be copied.
        ns_per_block: time to copy one block, one way.
    """

    __slots__ = ("_free", "ns_per_block", "total_blocks")

    def __init__(self, *, total_blocks: int, ns_per_block: int) -> None:
        self.total_blocks = total_blocks
        self.ns_per_block = ns_per_block
        self._free = list(range(total_blocks - 1, -1, -1))

    @property
    def free_blocks(self) -> int:
        """Blocks that can be handed out."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Blocks for one copy; the caller has looked at `free_blocks`."""
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        """Nobody needs these copies any more."""
        self._free.extend(blocks)

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless the pool and these tables, all there are, agree."""
        used = [block for table in tables for block in table]
        assert len(used) == len(set(used)), "a host block is used twice"
        assert sorted(used + self._free) == list(range(self.total_blocks))

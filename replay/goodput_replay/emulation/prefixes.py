"""Hashes of the blocks of a prompt that nobody renders: equal exactly where the texts would be.

Over HTTP a replayed prompt is tokens made from (salt, trace hash, position), and an engine
hashes every block of them. Here the blocks' hashes are made from the trace's hashes directly:
two prompts share one where they agree in every trace hash up to the end of that block, which
is where their tokens would agree. The numbers differ from those of a run over HTTP, what is
equal and what is not does not.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from goodput_replay.prompts import PromptKey

__all__ = ["block_keys"]

_BYTES: Final = 8
# Odd, and without structure: positions of one chain stay apart, and so do chains.
_STRIDE: Final = np.uint64(0x9E3779B97F4A7C15)


def block_keys(prompt: PromptKey, block_size: int) -> Sequence[int]:
    """One unsigned 64-bit key for each full block of a prompt.

    Args:
        prompt: its length, its own name and the trace's hashes.
        block_size: tokens per block of the engine, whatever the trace's is.
    """
    blocks = prompt.input_tokens // block_size
    shared = 0
    if prompt.hashes:
        hashed = min(prompt.input_tokens, len(prompt.hashes) * prompt.block_size)
        shared = hashed // block_size
    own = int.from_bytes(blake2b(prompt.request_id.encode(), digest_size=_BYTES).digest(), "little")
    # Its own blocks are found by itself alone, after a preemption: a range costs nothing.
    own >>= 1
    if not shared:
        return range(own, own + blocks)
    return [*_shared_keys(prompt, block_size, shared), *range(own + shared, own + blocks)]


def _shared_keys(prompt: PromptKey, block_size: int, count: int) -> list[int]:
    positions: NDArray[np.int64] = np.arange(1, count + 1)
    covering = -(-positions * block_size // prompt.block_size) - 1
    chain: list[int] = []
    previous = b""
    for trace_hash in prompt.hashes[: int(covering[-1]) + 1]:
        previous = blake2b(previous + str(trace_hash).encode(), digest_size=_BYTES).digest()
        chain.append(int.from_bytes(previous, "little"))
    keys = np.array(chain, dtype=np.uint64)[covering] + positions.astype(np.uint64) * _STRIDE
    found: list[int] = keys.tolist()
    return found

"""Hashes of KV blocks: the keys of prefix reuse and of placement by prefix.

A block's hash covers every token before it, so equal hashes mean equal prefixes. Engines and
routers must use the same function; otherwise a router's keys would not match the keys of an
engine's cache. Virtual time has no tokens to hash and takes the hashes of the trace.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["block_hashes", "byte_block_hashes"]

_DIGEST_BYTES: Final = 8


def block_hashes(tokens: Sequence[int], block_size: int, *, salt: bytes = b"") -> tuple[int, ...]:
    """Return the chained hashes of the full blocks of a prompt; a partial last block has none.

    Args:
        tokens: token ids, each in 0 … 2**32 − 1.
        block_size: tokens per block.
        salt: bytes that separate prompts that must not share blocks (of a tenant, an adapter).

    Returns:
        `len(tokens) // block_size` unsigned 64-bit integers.

    Raises:
        OverflowError: a token id is outside its range.
    """
    return byte_block_hashes(array("I", tokens).tobytes(), block_size * 4, salt=salt)


def byte_block_hashes(data: bytes, block_bytes: int, *, salt: bytes = b"") -> tuple[int, ...]:
    """Return the chained hashes of the full blocks of a text whose tokens are not known.

    Args:
        data: the bytes.
        block_bytes: bytes per block.
        salt: as in `block_hashes`.

    Returns:
        `len(data) // block_bytes` unsigned 64-bit integers.
    """
    view = memoryview(data)
    hashes: list[int] = []
    previous = blake2b(salt, digest_size=_DIGEST_BYTES).digest()
    for end in range(block_bytes, len(data) + 1, block_bytes):
        digest = blake2b(previous, digest_size=_DIGEST_BYTES)
        digest.update(view[end - block_bytes : end])
        previous = digest.digest()
        hashes.append(int.from_bytes(previous, "little"))
    return tuple(hashes)

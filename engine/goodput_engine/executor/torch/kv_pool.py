"""The contents of the KV blocks on the device and in host memory.

A block holds the keys and values of its tokens in all layers, contiguously, so a copy between
device and host is one copy per block. The scheduler decides about blocks; this module stores.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final

import torch

from goodput_engine.executor.torch.block_copies import BlockCopies, CudaStreams

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from goodput_engine.executor.torch.block_copies import CopyStreams
    from goodput_engine.scheduler.plan import Copy

__all__ = ["KVGeometry", "KVPool", "pin_exact_sizes"]

_CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGeometry:
    """The shape of the keys and values of one token.

    Args:
        num_layers: number of layers.
        num_kv_heads: key and value heads of a layer.
        head_dim: size of a head.
        dtype: data type of keys and values.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Size of the keys and values of one token in all layers."""
        item_bytes: int = self.dtype.itemsize
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * item_bytes


class KVPool:
    """Blocks of keys and values.

    Args:
        geometry: shape of the keys and values of a token.
        num_blocks: number of device blocks.
        block_size: tokens per block.
        num_host_blocks: number of host blocks for swapped requests.
        device: the device of the model.
        streams: the streams of the device; None for those of a GPU. A CPU copies at once.

    Attributes:
        device_blocks: `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`.
        host_blocks: the same with `num_host_blocks`.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        *,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        device: torch.device = _CPU,
        streams: CopyStreams | None = None,
    ) -> None:
        self.block_size = block_size
        block = (
            geometry.num_layers,
            2,
            block_size,
            geometry.num_kv_heads,
            geometry.head_dim,
        )
        # Not zeroed: the system then provides the memory of a block when it is first written.
        self.device_blocks = torch.empty((num_blocks, *block), dtype=geometry.dtype, device=device)
        # A GPU copies pinned memory without the help of the processor.
        pinned = device.type == "cuda" and num_host_blocks > 0
        if pinned:
            pin_exact_sizes()
        self.host_blocks = torch.empty(
            (num_host_blocks, *block), dtype=geometry.dtype, pin_memory=pinned
        )
        self._copies = None
        if streams is None and device.type == "cuda" and num_host_blocks:
            streams = CudaStreams(device)
        if streams is not None:
            self._copies = BlockCopies(streams, self.device_blocks, self.host_blocks)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of a layer's keys and values.

        Returns:
            Two tensors `[num_blocks, block_size, num_kv_heads, head_dim]`.
        """
        return self.device_blocks[:, index, 0], self.device_blocks[:, index, 1]

    def write(
        self, index: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write the keys and values of tokens in one layer.

        Args:
            index: the layer.
            slots: block · block_size + offset of each token, int64 `[num_tokens]`.
            keys: `[num_tokens, num_kv_heads, head_dim]`.
            values: `[num_tokens, num_kv_heads, head_dim]`.
        """
        blocks, offsets = slots // self.block_size, slots % self.block_size
        layer_keys, layer_values = self.layer(index)
        layer_keys[blocks, offsets] = keys
        layer_values[blocks, offsets] = values

    def copy(self, copy: Copy) -> None:
        """Copy blocks of a request between device and host memory; a GPU does it later."""
        if self._copies is not None:
            self._copies.start(copy)
            return
        on_device, on_host = list(copy.device_blocks), list(copy.host_blocks)
        if copy.to_host:
            self.host_blocks[on_host] = self.device_blocks[on_device]
        else:
            self.device_blocks[on_device] = self.host_blocks[on_host]

    def before_step(self, tables: Iterable[Sequence[int]]) -> None:
        """Let the next step wait for unfinished copies of its blocks.

        Args:
            tables: the block tables of its requests.
        """
        if self._copies is not None:
            self._copies.before_step(chain.from_iterable(tables))


def pin_exact_sizes() -> bool:
    """Let torch pin only the memory that a pool of over 1 GiB has, and not the next power of two.

    Returns:
        False if this version of torch has no such setting.
    """
    try:
        torch._C._accelerator_setAllocatorSettings(  # noqa: SLF001 - it has no public name
            "pinned_max_round_threshold_mb:1024"
        )
    except (AttributeError, ValueError):
        return False
    return True

"""Copies of small tensors from the host to a device that do not wait for the device.

`tensor.to(device)` waits until all earlier work of a GPU is done. A copy from pinned memory that is
queued behind this work does not wait, and torch reuses the pinned memory only after the copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["upload", "upload_list"]


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host on a device; the tensor itself if the device is the host."""
    if device.type == "cpu":
        return tensor
    # Not for a tensor of a test that stands for one of a GPU.
    if torch.cuda.is_initialized():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def upload_list(
    values: Sequence[object], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return numbers, or lists of them, as a tensor on a device."""
    return upload(torch.tensor(values, dtype=dtype), device)

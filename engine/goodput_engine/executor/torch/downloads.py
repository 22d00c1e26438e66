"""Copies of small tensors from a device to the host that do not wait for later work of the device.

`tensor.tolist()` of a GPU waits for all work that was queued before, also for a step that was
started after the tensor was computed. A copy to pinned memory that is queued at once, with an event
behind it, is done as soon as the tensor is.

The sampler decides what is copied, and needs no GPU. `CudaDownloads` are the copies of one.
"""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["CudaDownloads", "Downloads", "downloads_of"]


class Downloads(Protocol):
    """Copies from a device to the host, in the order of the device's work."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Queue a copy behind the present work; return its target, which is not filled yet."""
        ...

    def record(self) -> object:
        """Return an event that is done after the present work, copies included."""
        ...

    def wait(self, event: object) -> None:
        """Let the host wait for an event."""
        ...


class CudaDownloads:
    """Copies from an NVIDIA GPU, on the stream that computes the steps.

    They are a few kilobytes, so the next step does not notice that it runs after them.
    """

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Queue a copy to pinned memory, which torch reuses only after it; see `Downloads`."""
        target = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return target.copy_(tensor, non_blocking=True)

    def record(self) -> object:
        """Return a new event; see `Downloads`."""
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(self, event: object) -> None:
        """Wait for an event; see `Downloads`."""
        assert isinstance(event, torch.cuda.Event)
        event.synchronize()


def downloads_of(device: torch.device) -> Downloads | None:
    """Return the copies from a device; None if it is the host."""
    return CudaDownloads() if device.type == "cuda" else None

"""The order of steps and of copies of KV blocks, which a GPU runs on streams of their own.

A copy runs beside the step of its plan, and beside later steps. The scheduler assumes that it has
ended with its plan, and may give the blocks to another request. Each copy therefore has an event,
and whatever uses one of its blocks afterwards waits for this event on the device: a step, or a
copy in the other direction. The host never waits.

`BlockCopies` decides the order and needs no GPU. `CudaStreams` are the streams of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from goodput_engine.scheduler.plan import Copy

__all__ = ["BlockCopies", "CopyStreams", "CudaStreams", "StreamName"]


class StreamName(StrEnum):
    """The streams of a device; the work of one stream runs in the order of submission."""

    COMPUTE = "compute"
    TO_HOST = "to host"
    TO_DEVICE = "to device"


class CopyStreams(Protocol):
    """The streams of a device."""

    def record(self, name: StreamName) -> object:
        """Return an event that is done after the present work of a stream."""
        ...

    def wait(self, name: StreamName, event: object) -> None:
        """Let the later work of a stream wait for an event."""
        ...

    def is_done(self, event: object) -> bool:
        """True if an event is done, without waiting for it."""
        ...

    def copy(self, name: StreamName, source: torch.Tensor, target: torch.Tensor) -> None:
        """Add a copy to the work of a stream."""
        ...


class CudaStreams:
    """The streams of an NVIDIA GPU; steps are computed on the current one.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copying = {
            name: torch.cuda.Stream(device) for name in (StreamName.TO_HOST, StreamName.TO_DEVICE)
        }

    def record(self, name: StreamName) -> object:
        """Return a new event; see `CopyStreams`."""
        event = torch.cuda.Event()
        event.record(self._stream(name))
        return event

    def wait(self, name: StreamName, event: object) -> None:
        """Let a stream wait; see `CopyStreams`."""
        assert isinstance(event, torch.cuda.Event)
        self._stream(name).wait_event(event)

    def is_done(self, event: object) -> bool:
        """True if an event is done; see `CopyStreams`."""
        assert isinstance(event, torch.cuda.Event)
        return bool(event.query())

    def copy(self, name: StreamName, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy between a block of the device and a pinned one of the host."""
        with torch.cuda.stream(self._stream(name)):
            target.copy_(source, non_blocking=True)

    def _stream(self, name: StreamName) -> torch.cuda.Stream:
        return self._copying.get(name) or torch.cuda.current_stream(self._device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingCopy:
    """A copy that no step waits for yet.

    Args:
        stream: its stream.
        event: done after the copy.
        device_blocks, host_blocks: the blocks of both sides.
    """

    stream: StreamName
    event: object
    device_blocks: frozenset[int]
    host_blocks: frozenset[int]


class BlockCopies:
    """Starts copies, and lets steps and later copies wait for those of their blocks.

    Args:
        streams: the streams of the device.
        device_blocks: the blocks on the device, `[num_blocks, …]`.
        host_blocks: the blocks in pinned memory, `[num_host_blocks, …]`.
    """

    def __init__(
        self, streams: CopyStreams, device_blocks: torch.Tensor, host_blocks: torch.Tensor
    ) -> None:
        self._streams = streams
        self._device_blocks = device_blocks
        self._host_blocks = host_blocks
        self._pending: list[_PendingCopy] = []

    def start(self, copy: Copy) -> None:
        """Start a copy after all steps so far, and after earlier copies of its blocks."""
        streams = self._streams
        stream = StreamName.TO_HOST if copy.to_host else StreamName.TO_DEVICE
        on_device, on_host = frozenset(copy.device_blocks), frozenset(copy.host_blocks)
        # Earlier steps wrote the blocks, or may still read what was in them before.
        streams.wait(stream, streams.record(StreamName.COMPUTE))
        for other in self._pending:
            if other.stream != stream and (
                other.device_blocks & on_device or other.host_blocks & on_host
            ):
                streams.wait(stream, other.event)
        for device_block, host_block in zip(copy.device_blocks, copy.host_blocks, strict=True):
            source, target = self._device_blocks[device_block], self._host_blocks[host_block]
            if not copy.to_host:
                source, target = target, source
            streams.copy(stream, source, target)
        self._pending.append(
            _PendingCopy(
                stream=stream,
                event=streams.record(stream),
                device_blocks=on_device,
                host_blocks=on_host,
            )
        )

    def before_step(self, blocks: Iterable[int]) -> None:
        """Let the next step wait for the copies of the blocks that it reads or writes."""
        if not self._pending:
            return
        used = set(blocks)
        still_pending: list[_PendingCopy] = []
        for copy in self._pending:
            if not copy.device_blocks.isdisjoint(used):
                # Later copies start after this step, so they need not wait for this one.
                self._streams.wait(StreamName.COMPUTE, copy.event)
            elif not self._streams.is_done(copy.event):
                still_pending.append(copy)
        self._pending = still_pending

"""Measure the memory of this machine, of this process, and of a GPU.

The main memory is only measured on Linux, because other systems have no `/proc`. The limits of
control groups count: a container that exceeds its own limit is killed even if the machine has free
memory.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from goodput_core.errors import InputError
from goodput_core.process import control_groups

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PeakMemory", "available_bytes", "free_bytes", "is_out_of_memory"]

_KIB: Final = 1024
# Of a CPU; of the driver, called by torch or by Triton; and of the libraries of a GPU.
_OUT_OF_MEMORY: Final = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
# By the version of control groups: files of the limit and of the usage, and the reclaimable page
# cache in memory.stat.
_GROUP_FILES: Final = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def available_bytes(root: Path = Path("/")) -> int:
    """Return the memory that this process can still allocate without swapping.

    Args:
        root: the folder that contains `proc` and `sys`.

    Raises:
        InputError: this system does not report its memory.
    """
    try:
        available = _kib_field(root / "proc/meminfo", "MemAvailable")
    except (OSError, ValueError) as error:
        raise InputError(
            "the available memory cannot be measured on this system; serve real models on Linux"
        ) from error
    return max(0, min([available, *_left_in_groups(root)]))


def free_bytes(device: torch.device) -> int:
    """Return the memory that weights and KV blocks can still take on a device.

    Raises:
        InputError: this system does not report its memory.
    """
    if device.type == "cpu":
        return available_bytes()
    torch.cuda.empty_cache()  # memory that only torch holds is free for torch
    free: int = torch.cuda.mem_get_info(device)[0]
    return free


class PeakMemory:
    """The memory that this process takes beyond its size at the creation of this object.

    Args:
        device: the device whose memory is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type != "cpu":
            torch.cuda.reset_peak_memory_stats(device)
            self._before: int = torch.cuda.memory_allocated(device)
            return
        self._status = Path("/proc/self/status")
        _return_freed_memory()
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            pass  # the peak then includes that of loading, which is cautious
        self._before = _kib_field(self._status, "VmRSS")

    def grown_bytes(self) -> int:
        """Return the largest growth so far."""
        if self._device.type != "cpu":
            peak: int = torch.cuda.max_memory_allocated(self._device)
            return peak - self._before
        return max(0, _kib_field(self._status, "VmHWM") - self._before)


def is_out_of_memory(error: Exception) -> bool:
    """Return True if an allocation failed; only torch's allocator for a GPU has a type for that."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        part in str(error) for part in _OUT_OF_MEMORY
    )


def _return_freed_memory() -> None:
    """Return freed memory of the heap to the system, because its reuse would hide a growth."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        pass  # not the GNU C library


def _left_in_groups(root: Path) -> Iterator[int]:
    """Yield what the control groups of this process leave, those of their parents included."""
    for group, version in control_groups("memory", root):
        left = _left_in_group(group, *_GROUP_FILES[version])
        if left is not None:
            yield left


def _left_in_group(group: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    """Return the unused memory of one group; None if the group has no limit."""
    try:
        bound = int((group / limit).read_text(encoding="ascii"))
        used = int((group / usage).read_text(encoding="ascii"))
        for line in (group / "memory.stat").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name == reclaimable:
                used -= int(value)
    except (OSError, ValueError):
        return None  # "max", or no group of this hierarchy
    return bound - used


def _kib_field(path: Path, name: str) -> int:
    """Return a field of a file such as `/proc/meminfo`, in bytes."""
    for line in path.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * _KIB
    raise ValueError(f"{path} has no {name}")

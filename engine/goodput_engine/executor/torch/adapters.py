"""The attention adapters of this machine, probed in the order of preference.

Device, data type and block size are known before the weights are loaded, so an adapter that was
requested and cannot be had is refused early. The size of the heads is only known afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from goodput_core.errors import InputError
from goodput_core.spec.choices import AttentionKernel
from goodput_core.spec.workloads import block_size_problem
from goodput_engine.executor.torch.attention import AttentionAdapter, SDPAttention
from goodput_engine.executor.torch.flash_attention import FlashAttention, find_flash_attn

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["AttentionRequest", "ProbedAttention", "probe_attention"]

_FLASH_DTYPES: Final = frozenset({torch.float16, torch.bfloat16})
_FLASH_CAPABILITY: Final = (8, 0)
_MAX_FLASH_HEAD: Final = 256
_FLASH_HEAD_MULTIPLE: Final = 8
# The fastest first; each of them can reject a model.
_ON_GPU: Final = (AttentionKernel.FLASH_ATTN, AttentionKernel.TRITON, AttentionKernel.TORCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRequest:
    """The configured attention.

    Args:
        kernel: the kernel.
        block_size: tokens per KV block.
    """

    kernel: AttentionKernel = AttentionKernel.AUTO
    block_size: int = 16


class _UnusableError(Exception):
    """A kernel cannot be used; the message is a part of a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedAttention:
    """Kernels that can be used, in order of preference.

    Args:
        requested: the configured kernel.
        adapters: the adapters, at least one.
        rejected: the reason against each preferred kernel that cannot be used.
    """

    requested: AttentionKernel
    adapters: tuple[AttentionAdapter, ...]
    rejected: tuple[str, ...] = ()

    def select(self, head_dim: int) -> tuple[AttentionAdapter, str]:
        """Return the first adapter for heads of a size, and the reasons against those before it.

        Raises:
            InputError: the requested kernel cannot compute such heads.
        """
        rejected = list(self.rejected)
        for adapter in self.adapters:
            if not isinstance(adapter, FlashAttention) or (
                head_dim <= _MAX_FLASH_HEAD and head_dim % _FLASH_HEAD_MULTIPLE == 0
            ):
                return adapter, "; ".join(rejected)
            rejected.append(
                f"flash-attn: heads have a multiple of {_FLASH_HEAD_MULTIPLE} up to "
                f"{_MAX_FLASH_HEAD} elements, not {head_dim}"
            )
        raise _refusal(self.requested, rejected[-1].partition(": ")[2])


def probe_attention(
    request: AttentionRequest,
    *,
    device: torch.device,
    dtype: torch.dtype,
    find_flash: Callable[[], Callable[..., torch.Tensor]] = find_flash_attn,
    capability: Callable[[torch.device], tuple[int, int]] = torch.cuda.get_device_capability,
) -> ProbedAttention:
    """Return the adapters that compute a data type on a device.

    Args:
        request: the configured attention.
        device: the device of the model.
        dtype: data type of queries, keys and values.
        find_flash: returns the function of flash-attn, or raises `ImportError`.
        capability: returns the compute capability of a GPU.

    Raises:
        InputError: the requested kernel cannot be used.
    """
    kernels: tuple[AttentionKernel, ...] = (request.kernel,)
    if request.kernel is AttentionKernel.AUTO:
        kernels = _ON_GPU if device.type == "cuda" else (AttentionKernel.TORCH,)
    adapters: list[AttentionAdapter] = []
    rejected: list[str] = []
    for kernel in kernels:
        try:
            if kernel is AttentionKernel.TORCH:
                adapters.append(SDPAttention())
                continue
            if device.type != "cuda":
                raise _UnusableError("needs an NVIDIA GPU, and torch found none")
            if kernel is AttentionKernel.TRITON:
                adapters.append(_triton(dtype))
            else:
                adapters.append(_flash(request.block_size, dtype, capability(device), find_flash))
        except _UnusableError as error:
            if request.kernel is not AttentionKernel.AUTO:
                raise _refusal(kernel, str(error)) from error
            rejected.append(f"{kernel}: {error}")
    return ProbedAttention(
        requested=request.kernel, adapters=tuple(adapters), rejected=tuple(rejected)
    )


def _triton(dtype: torch.dtype) -> AttentionAdapter:
    if dtype == torch.float64:
        raise _UnusableError("multiplies no matrices of float64")
    try:
        from goodput_engine.executor.torch.triton_attention import (  # noqa: PLC0415 - optional
            TritonAttention,
        )
    except ModuleNotFoundError as error:
        raise _UnusableError(f"the package {error.name} is not installed") from error
    return TritonAttention()


def _flash(
    block_size: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    find: Callable[[], Callable[..., torch.Tensor]],
) -> AttentionAdapter:
    if block_size_problem(AttentionKernel.FLASH_ATTN, block_size) is not None:
        raise _UnusableError(
            f"needs KV blocks of a multiple of {FlashAttention.block_multiple} tokens, not "
            f"{block_size}"
        )
    if dtype not in _FLASH_DTYPES:
        name = str(dtype).removeprefix("torch.")
        raise _UnusableError(f"computes float16 and bfloat16, not {name}")
    if capability < _FLASH_CAPABILITY:
        found = ".".join(map(str, capability))
        raise _UnusableError(f"needs a GPU of compute capability 8.0 or higher, not {found}")
    try:
        return FlashAttention(find())
    except ImportError as error:
        raise _UnusableError(str(error)) from error


def _refusal(kernel: AttentionKernel, reason: str) -> InputError:
    return InputError(
        f"spec.engine.realModel.attention or --attention: {kernel} cannot be used, because "
        f"{_clause(reason)}; select another one, or auto"
    )


def _clause(reason: str) -> str:
    """Return a reason with a subject."""
    return reason if reason.startswith(("the ", "heads ")) else f"it {reason}"

"""The adapter of flash-attn 2, which is not among the packages that Goodput installs.

Its blocks have a multiple of 256 tokens, and it computes float16 and bfloat16 on NVIDIA GPUs of
compute capability 8.0 or higher.

Source of the contract: the documentation of `flash_attn_varlen_func`, and the checks of its
extension, both of flash-attn 2.8.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import TYPE_CHECKING, Final

import torch
from torch.nn.functional import pad

from goodput_core.spec.workloads import FLASH_ATTN_BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_engine.executor.torch.attention import AttentionRule, RaggedBatch

__all__ = ["FlashAttention", "find_flash_attn"]

# The first version that has all of them is 2.6.
_NEEDED: Final = frozenset({"block_table", "softcap", "window_size"})
_MAX_DETAIL: Final = 80


def find_flash_attn() -> Callable[..., torch.Tensor]:
    """Return `flash_attn_varlen_func`.

    Raises:
        ImportError: the package is not installed, does not fit this torch, or is too old; the
            reason as a part of a sentence.
    """
    try:
        module = import_module("flash_attn")
    except ModuleNotFoundError as error:
        raise ImportError("the package flash-attn is not installed") from error
    except ImportError as error:
        detail = " ".join(str(error).split())[:_MAX_DETAIL]
        raise ImportError(f"the package flash-attn cannot be imported: {detail}") from error
    function = getattr(module, "flash_attn_varlen_func", None)
    if function is None or not inspect.signature(function).parameters.keys() >= _NEEDED:
        raise ImportError("the package flash-attn is older than 2.6, or not version 2")
    found: Callable[..., torch.Tensor] = function
    return found


class FlashAttention:
    """Attention by `flash_attn_varlen_func` on a block table.

    Args:
        varlen: the function.
    """

    name = "flash-attn-2"
    block_multiple = FLASH_ATTN_BLOCK

    def __init__(self, varlen: Callable[..., torch.Tensor]) -> None:
        self._varlen = varlen
        self._batch: RaggedBatch | None = None
        self._cu_seqlens_k: torch.Tensor | None = None

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: RaggedBatch,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """Return the attention of every query; see `AttentionAdapter`."""
        if self._batch is not batch:  # it is the same in all layers
            self._batch = batch
            self._cu_seqlens_k = pad(batch.seqused_k.cumsum(0, dtype=torch.int32), (1, 0))
        max_queries = batch.max_queries
        if max_queries == 1 and len(q) != len(batch.seqused_k):
            # With a maximum of 1, it takes each sequence to have exactly one query.
            max_queries = 2
        return self._varlen(
            q,
            keys,
            values,
            cu_seqlens_q=batch.cu_seqlens_q,
            cu_seqlens_k=self._cu_seqlens_k,
            max_seqlen_q=max_queries,
            max_seqlen_k=batch.max_keys,
            softmax_scale=rule.scale,
            causal=True,  # the last query is at the last key
            # The keys before the one of the query, and those after it.
            window_size=(-1, -1) if rule.window is None else (rule.window - 1, 0),
            softcap=rule.softcap or 0.0,
            block_table=batch.block_table,
        )

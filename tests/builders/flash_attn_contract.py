"""flash-attn 2 without a GPU: the documented contract of its function, in plain torch.

It checks the arguments as the extension of flash-attn 2.8 does, and computes the documented
result. Import this module only after `pytest.importorskip("torch")`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["make_varlen_func"]

HALF = (torch.float16, torch.bfloat16)


def make_varlen_func(
    *, page_multiple: int = 256, dtypes: tuple[torch.dtype, ...] = HALF
) -> Callable[..., torch.Tensor]:
    """Return a `flash_attn_varlen_func`; pages and data types can be those of a small test."""

    def flash_attn_varlen_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert alibi_slopes is None
        assert not any((dropout_p, deterministic, return_attn_probs))
        assert isinstance(max_seqlen_q, int)
        assert isinstance(max_seqlen_k, int)
        assert block_table is not None, "keys and values are in pages"
        assert q.dtype == k.dtype == v.dtype
        assert q.dtype in dtypes
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == block_table.dtype == torch.int32
        assert cu_seqlens_q.is_contiguous()
        assert cu_seqlens_k.is_contiguous()
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == block_table.stride(-1) == 1
        total_q, num_heads, head_dim = q.shape
        num_pages, page_size, num_heads_k, _ = k.shape
        batch_size = len(cu_seqlens_q) - 1
        assert batch_size > 0
        assert num_heads % num_heads_k == 0
        assert head_dim <= 256
        assert page_size % page_multiple == 0, "Paged KV cache block size must be divisible by 256"
        assert k.shape == v.shape == (num_pages, page_size, num_heads_k, head_dim)
        assert cu_seqlens_k.shape == (batch_size + 1,)
        assert block_table.shape[0] == batch_size
        starts, key_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        assert starts[0] == key_starts[0] == 0
        assert starts[-1] == total_q
        if max_seqlen_q == 1:
            assert total_q == batch_size, "queries are reshaped to one for each sequence"
        scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        left, right = window_size
        if causal:
            right = 0
        out = torch.zeros_like(q)
        if max_seqlen_k <= 0:
            return out
        for row in range(batch_size):
            queries = slice(starts[row], starts[row + 1])
            num_queries = starts[row + 1] - starts[row]
            num_keys = key_starts[row + 1] - key_starts[row]
            # Longer sequences would be computed in part only.
            assert num_queries <= max_seqlen_q
            assert num_keys <= max_seqlen_k
            if not num_queries or not num_keys:
                continue
            pages = block_table[row, : -(-num_keys // page_size)].tolist()
            assert all(0 <= page < num_pages for page in pages)
            row_k, row_v = (
                pool[pages].flatten(0, 1)[:num_keys].repeat_interleave(num_heads // num_heads_k, 1)
                for pool in (k, v)
            )
            scores = torch.einsum("qhd,khd->hqk", q[queries].double(), row_k.double()) * scale
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            # The mask is aligned to the bottom right corner.
            at = torch.arange(num_queries)[:, None] + num_keys - num_queries
            key = torch.arange(num_keys)[None]
            seen = torch.ones(num_queries, num_keys, dtype=torch.bool)
            if left >= 0:
                seen &= key >= at - left
            if right >= 0:
                seen &= key <= at + right
            scores = scores.masked_fill(~seen, -torch.inf)
            weights = torch.nan_to_num(scores.softmax(-1))
            out[queries] = torch.einsum("hqk,khd->qhd", weights, row_v.double()).to(q.dtype)
        return out

    return flash_attn_varlen_func

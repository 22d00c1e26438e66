"""Attention over paged keys and values: the protocol of its adapters, and that of torch alone.

The tokens of a step are packed one after another, without padding. An adapter reads keys and
values only through the block table, and never uses a slot that no token was written to: the pool
may hold anything there, also NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "MAX_SCORES",
    "AttentionAdapter",
    "AttentionRule",
    "RaggedBatch",
    "SDPAttention",
]

MAX_SCORES: Final = 1 << 21
"""Elements of the scores, or of a mask, that are in memory together unless one query has more. All
scores of a chunk would take memory that grows with the square of its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedBatch:
    """The sequences of a step.

    Args:
        cu_seqlens_q: index of the first query of each sequence, then the number of all queries,
            int32 `[num_sequences + 1]`.
        seqused_k: number of keys of each sequence, int32 `[num_sequences]`. The last query of a
            sequence is at the position of the last key. A sequence has at least as many keys as
            queries, or no keys.
        block_table: blocks of each sequence in order, int32 `[num_sequences, max_blocks]`. Entries
            after the last used block are arbitrary.
        max_queries: upper bound of the queries of a sequence. The host knows both bounds without
            waiting for the device.
        max_keys: upper bound of `seqused_k`.
    """

    cu_seqlens_q: torch.Tensor
    seqused_k: torch.Tensor
    block_table: torch.Tensor
    max_queries: int
    max_keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """The way in which one layer computes attention.

    Args:
        scale: factor of the products of queries and keys.
        window: number of latest keys that a query sees, its own included; None for all keys.
        softcap: bound c of the scaled products s, which become c · tanh(s / c); None for none.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


class AttentionAdapter(Protocol):
    """A kernel for causal attention over paged keys and values."""

    @property
    def name(self) -> str:
        """Name for the logs."""
        ...

    @property
    def block_multiple(self) -> int:
        """The tokens per KV block are a multiple of this number."""
        ...

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: RaggedBatch,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """Return the attention of every query to the keys up to its own position.

        Args:
            q: packed queries, `[num_tokens, num_heads, head_dim]`.
            keys: the keys of one layer, `[num_blocks, block_size, num_kv_heads, head_dim]`, of
                the dtype of `q`. `num_heads` is a multiple of `num_kv_heads`.
            values: its values, of the same shape and dtype.
            batch: the sequences that the queries belong to.
            rule: scale, window and soft cap.

        Returns:
            `[num_tokens, num_heads, head_dim]`; zeros for the queries of a sequence without keys.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecodeGroup:
    """Sequences with one query each, which are computed together.

    Args:
        queries: index of each query, int64 `[sequences]`.
        blocks: block of each key, int64 `[sequences, keys]`. A shorter sequence repeats its last
            key, so that only written slots are read.
        offsets: slot of each key in its block, of the same shape.
        mask: True for the keys that a query sees, `[sequences, 1, 1, keys]`; None if all are of
            one length.
    """

    queries: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor
    mask: torch.Tensor | None


class _PlannedBatch:
    """A batch in the form in which `SDPAttention` computes it, the same for all layers."""

    def __init__(self, batch: RaggedBatch, block_size: int) -> None:
        self.batch = batch
        self.block_size = block_size
        starts, num_keys = batch.cu_seqlens_q.tolist(), batch.seqused_k.tolist()
        rows = [
            (row, starts[row], starts[row + 1], keys)
            for row, keys in enumerate(num_keys)
            if starts[row + 1] > starts[row] and keys
        ]
        decodes = [one for one in rows if one[2] - one[1] == 1]
        # A single sequence needs no padding.
        self.decodes = sorted(decodes, key=lambda one: one[3]) if len(decodes) > 1 else []
        self.others = [one for one in rows if not self.decodes or one[2] - one[1] > 1]
        self.all_rows = rows
        self._groups: dict[int | None, list[_DecodeGroup]] = {}

    def groups(self, window: int | None) -> list[_DecodeGroup]:
        """Return the decodes in groups of similar lengths.

        Args:
            window: number of latest keys that a query sees; None for all keys.
        """
        if window not in self._groups:
            self._groups[window] = list(self._make_groups(window))
        return self._groups[window]

    def _make_groups(self, window: int | None) -> Iterator[_DecodeGroup]:
        seen = [min(keys, window or keys) for *_, keys in self.decodes]
        first = 0
        for at, keys in enumerate(seen):
            # Padding may at most double the keys that are read.
            if at + 1 < len(seen) and seen[at + 1] <= 2 * seen[first]:
                continue
            yield self._group(self.decodes[first : at + 1], seen[first : at + 1], longest=keys)
            first = at + 1

    def _group(
        self, rows: list[tuple[int, int, int, int]], seen: list[int], *, longest: int
    ) -> _DecodeGroup:
        device = self.batch.block_table.device
        num_keys = torch.tensor([[keys] for *_, keys in rows], device=device)
        counts = torch.tensor([[count] for count in seen], device=device)
        at = torch.arange(longest, device=device)[None]
        positions = torch.minimum(num_keys - counts + at, num_keys - 1)
        table = self.batch.block_table[[row for row, *_ in rows]]
        return _DecodeGroup(
            queries=torch.tensor([start for _, start, *_ in rows], device=device),
            blocks=table.gather(1, positions // self.block_size).long(),
            offsets=positions % self.block_size,
            mask=None if seen[0] == longest else (at < counts)[:, None, None],
        )


class SDPAttention:
    """Attention by `scaled_dot_product_attention`.

    Sequences with one query each are computed together. Each call gathers their keys and values,
    and a shorter one is padded with its own last key: other slots may never have been written. A
    chunk of a prompt is computed alone, and so is a sequence with a soft cap.
    """

    name = "torch-sdpa"
    block_multiple = 1

    def __init__(self) -> None:
        self._planned: _PlannedBatch | None = None

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: RaggedBatch,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """Return the attention of every query; see `AttentionAdapter`."""
        block_size = keys.shape[1]
        planned = self._planned
        if planned is None or planned.batch is not batch or planned.block_size != block_size:
            planned = self._planned = _PlannedBatch(batch, block_size)
        out = torch.zeros_like(q)
        for row, start, end, num_keys in planned.all_rows if rule.softcap else planned.others:
            first_position = num_keys - (end - start)
            # Blocks that are outside the window of every query are not read.
            oldest = 0 if rule.window is None else max(0, first_position - rule.window + 1)
            skipped = oldest // block_size
            table = batch.block_table[row, skipped : -(-num_keys // block_size)]
            num_read = num_keys - skipped * block_size
            out[start:end] = self._attend_chunk(
                q[start:end].transpose(0, 1),
                keys[table].flatten(0, 1)[:num_read].transpose(0, 1),
                values[table].flatten(0, 1)[:num_read].transpose(0, 1),
                rule,
            ).transpose(0, 1)
        for group in () if rule.softcap else planned.groups(rule.window):
            out[group.queries] = scaled_dot_product_attention(
                q[group.queries][:, :, None],
                keys[group.blocks, group.offsets].transpose(1, 2),
                values[group.blocks, group.offsets].transpose(1, 2),
                attn_mask=group.mask,
                scale=rule.scale,
                enable_gqa=q.shape[1] != keys.shape[2],
            )[:, :, 0]
        return out

    def _attend_chunk(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """Return the attention of one sequence; see `_attend_one`."""
        return _attend_one(q, keys, values, rule)


def _attend_one(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: AttentionRule
) -> torch.Tensor:
    """Return the attention of the last queries of one sequence, `[num_heads, queries, head_dim]`.

    Args:
        q: `[num_heads, queries, head_dim]`.
        keys: `[num_kv_heads, num_keys, head_dim]`; the last key belongs to the last query.
        values: `[num_kv_heads, num_keys, head_dim]`.
        rule: scale, window and soft cap.
    """
    num_heads, num_queries, _ = q.shape
    num_keys = keys.shape[1]
    windowed = rule.window is not None and num_keys > rule.window
    scored_heads = 1 if rule.softcap is None else num_heads
    if rule.softcap is None and not windowed and num_queries == num_keys:
        return _attend_part(q, keys, values, rule)  # without a mask
    at_once = max(1, MAX_SCORES // (scored_heads * num_keys))
    if num_queries <= at_once:
        return _attend_part(q, keys, values, rule)
    out = torch.empty_like(q)
    for first in range(0, num_queries, at_once):
        last = min(first + at_once, num_queries)
        seen = num_keys - num_queries + last
        out[:, first:last] = _attend_part(q[:, first:last], keys[:, :seen], values[:, :seen], rule)
    return out


def _attend_part(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: AttentionRule
) -> torch.Tensor:
    """Return the attention of queries whose scores fit into memory; see `_attend_one`."""
    num_heads, num_queries, _ = q.shape
    num_kv_heads, num_keys, _ = keys.shape
    windowed = rule.window is not None and num_keys > rule.window
    mask = None
    if windowed or 1 < num_queries < num_keys or (rule.softcap is not None and num_queries > 1):
        query_at = torch.arange(num_keys - num_queries, num_keys, device=q.device)[:, None]
        key_at = torch.arange(num_keys, device=q.device)
        mask = key_at <= query_at
        if rule.window is not None:
            mask &= key_at > query_at - rule.window
    if rule.softcap is None:
        return scaled_dot_product_attention(
            q[None],
            keys[None],
            values[None],
            attn_mask=mask,
            is_causal=mask is None and num_queries > 1,
            scale=rule.scale,
            enable_gqa=num_heads != num_kv_heads,
        )[0]
    grouped = q.reshape(num_kv_heads, num_heads // num_kv_heads, num_queries, -1)
    scores = grouped @ keys[:, None].transpose(-2, -1)
    # In place, because the scores are the largest tensor of a step.
    scores.mul_(rule.scale).div_(rule.softcap).tanh_().mul_(rule.softcap)
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    return (scores.softmax(-1) @ values[:, None]).reshape(q.shape)

"""Attention over paged keys and values as a Triton kernel, for GPUs.

A program computes some consecutive queries of one sequence with all query heads that share a
key-value head. It walks over the keys in tiles and reads each one at its place in the pool, through
the block table; nothing is gathered into another buffer. If a step has too few programs for the
device, the keys of a sequence are divided among several programs, and a second kernel joins their
results.

Triton compiles a kernel again for each value of a constant, and for an integer that is 1 or a
multiple of 16. Numbers that vary from step to step are excluded from this, so that no request waits
for a compilation.

Source of the tiling: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work
Partitioning", 2023. Of the division of keys: the same, section 3.2, and "Flash-Decoding".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from goodput_engine.executor.torch.attention import AttentionRule, RaggedBatch

__all__ = ["Tile", "TritonAttention", "choose_tile"]

# The matrix units multiply tiles of at least 16 rows and columns.
_MIN_TILE: Final = 16
_LARGE_HEAD: Final = 128
# A program that reads fewer keys than this costs more to start and to join than it saves.
_MIN_SPLIT_KEYS: Final = 256
_PROGRAMS_PER_PROCESSOR: Final = 4
_CPU_PROCESSORS: Final = 8


class Tile(NamedTuple):
    """The part of a sequence that a program computes at a time.

    Args:
        rows: queries times heads of a group.
        keys: keys of one iteration.
        warps: warps of the program.
    """

    rows: int
    keys: int
    warps: int


def choose_tile(head_dim: int, dtype: torch.dtype, *, decodes: bool) -> Tile:
    """Return the largest tile that fits into the registers and the shared memory of a processor.

    Args:
        head_dim: size of a head.
        dtype: data type of queries, keys and values.
        decodes: True if each sequence of the step has one query.
    """
    if dtype == torch.float32:  # no matrix unit computes it exactly
        return Tile(_MIN_TILE, 32, 4)
    keys = 64 if head_dim <= _LARGE_HEAD else 32
    if decodes:
        return Tile(_MIN_TILE, keys, 4)
    return Tile(128 if head_dim <= _LARGE_HEAD else 64, keys, 8)


class TritonAttention:
    """Attention by a kernel that reads keys and values at their place.

    It computes float16, bfloat16 and float32. On a CPU it runs in Triton's interpreter, which is
    for tests (`TRITON_INTERPRET=1` before the first import).

    Args:
        splits: number of programs that share the keys of a sequence in a step that only decodes;
            None to derive it from the number of programs and of the device's processors.
    """

    name = "triton-paged"
    block_multiple = 1

    def __init__(self, *, splits: int | None = None) -> None:
        self._splits = splits

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: RaggedBatch,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """Return the attention of every query; see `AttentionAdapter`."""
        num_tokens, num_heads, head_dim = q.shape
        block_size, num_kv_heads = keys.shape[1], keys.shape[2]
        group = num_heads // num_kv_heads
        num_sequences, max_blocks = batch.block_table.shape
        decodes = num_tokens <= num_sequences
        tile = choose_tile(head_dim, q.dtype, decodes=decodes)
        rows = triton.next_power_of_2(max(group, tile.rows))
        tile_queries = rows // group
        num_tiles = num_tokens // tile_queries + num_sequences
        splits = 1
        if decodes:
            splits = self._splits or _num_splits(
                num_tiles * num_kv_heads, max_blocks * block_size, q.device
            )
        out = torch.empty_like(q)
        # The results of the programs that share a sequence, before they are joined.
        parts = q.new_empty(
            (splits, num_tokens, num_heads, head_dim) if splits > 1 else 0, dtype=torch.float32
        )
        sums = q.new_empty(
            (2, splits, num_tokens, num_heads) if splits > 1 else 0, dtype=torch.float32
        )
        padded_dim = max(_MIN_TILE, triton.next_power_of_2(head_dim))
        _attend[(num_tiles, num_kv_heads, splits)](
            q,
            keys,
            values,
            out,
            parts,
            sums,
            batch.cu_seqlens_q,
            batch.seqused_k,
            batch.block_table,
            rule.scale,
            rule.softcap or 0.0,
            num_sequences,
            num_tokens,
            splits,
            num_heads,
            *q.stride()[:2],
            *keys.stride()[:3],
            *values.stride()[:3],
            *out.stride()[:2],
            batch.block_table.stride(0),
            GROUP=group,
            ROWS=rows,
            TILE_QUERIES=tile_queries,
            TILE_KEYS=tile.keys,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim,
            BLOCK_SIZE=block_size,
            WINDOW=rule.window or 0,
            HAS_SOFTCAP=rule.softcap is not None,
            IS_SPLIT=splits > 1,
            num_warps=tile.warps,
        )
        if splits > 1:
            _join[(num_tokens, num_heads)](
                parts,
                sums,
                out,
                num_tokens,
                splits,
                num_heads,
                *out.stride()[:2],
                HEAD_DIM=head_dim,
                PADDED_DIM=padded_dim,
                PADDED_SPLITS=triton.next_power_of_2(splits),
            )
        return out


def _num_splits(programs: int, max_keys: int, device: torch.device) -> int:
    """Return the number of programs for each sequence and head.

    It depends only on shapes, so that no step waits for a value of the device.
    """
    processors = (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else _CPU_PROCESSORS
    )
    wanted = processors * _PROGRAMS_PER_PROCESSOR // programs
    splits = max(1, min(wanted, max_keys // _MIN_SPLIT_KEYS))
    # Powers of two are few. The kernel that joins the results has one version for each.
    return 1 << (splits.bit_length() - 1)


@triton.jit(do_not_specialize=["num_sequences", "num_tokens", "splits", "table_stride"])
def _attend(
    q,
    keys,
    values,
    out,
    parts,
    sums,
    cu_seqlens_q,
    seqused_k,
    block_table,
    scale,
    softcap,
    num_sequences,
    num_tokens,
    splits,
    num_heads,
    q_token_stride,
    q_head_stride,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Compute one tile of queries of one sequence with the heads of one key-value head."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)

    # The tiles of sequence i begin at cu_seqlens_q[i] // TILE_QUERIES + i: at least as many as it
    # needs, without a table that the host would have to prepare.
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q + middle) // TILE_QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    sequence = low
    first_token = tl.load(cu_seqlens_q + sequence)
    num_queries = tl.load(cu_seqlens_q + sequence + 1) - first_token
    first_query = (tile - first_token // TILE_QUERIES - sequence) * TILE_QUERIES
    if first_query >= num_queries:
        return
    num_keys = tl.load(seqused_k + sequence)

    # Row r is the query r // GROUP of the tile with the head r % GROUP of the group.
    row = tl.arange(0, ROWS)
    query = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_row = (row < TILE_QUERIES * GROUP) & (query < num_queries)
    position = num_keys - num_queries + query
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < HEAD_DIM
    token = (first_token + query).to(tl.int64)
    q_tile = tl.load(
        q + token[:, None] * q_token_stride + head[:, None] * q_head_stride + dim[None, :],
        mask=is_row[:, None] & is_dim[None, :],
        other=0.0,
    )

    # The keys that some query of the tile sees, and the share of this program.
    first_position = num_keys - num_queries + first_query
    last_query = tl.minimum(first_query + TILE_QUERIES, num_queries) - 1
    end = tl.minimum(num_keys - num_queries + last_query + 1, num_keys)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0)
    if IS_SPLIT:
        share = tl.cdiv(tl.cdiv(end - begin, splits), TILE_KEYS) * TILE_KEYS
        begin = begin + split * share
        end = tl.minimum(end, begin + share)

    largest = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    sum_values = tl.zeros([ROWS, PADDED_DIM], dtype=tl.float32)
    offset = tl.arange(0, TILE_KEYS)
    for start in range(begin, end, TILE_KEYS):
        key = start + offset
        is_key = key < end
        block = tl.load(
            block_table + sequence * table_stride + key // BLOCK_SIZE, mask=is_key, other=0
        ).to(tl.int64)
        slot = key % BLOCK_SIZE
        key_tile = tl.load(
            keys
            + block[None, :] * k_block_stride
            + slot[None, :] * k_slot_stride
            + kv_head * k_head_stride
            + dim[:, None],
            mask=is_dim[:, None] & is_key[None, :],
            other=0.0,
        )
        scores = tl.dot(q_tile, key_tile, input_precision="ieee") * scale
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (e^2x + 1), which is also right where the exponential overflows.
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        is_seen = is_key[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            is_seen &= key[None, :] > position[:, None] - WINDOW
        # Exponentials of base 2 are the fast ones.
        scores = tl.where(is_seen, scores * 1.4426950408889634, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # A row that has seen no key yet would subtract infinity from infinity.
        finite = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(largest - finite)
        total = total * shrink + tl.sum(weights, 1)
        value_tile = tl.load(
            values
            + block[:, None] * v_block_stride
            + slot[:, None] * v_slot_stride
            + kv_head * v_head_stride
            + dim[None, :],
            mask=is_key[:, None] & is_dim[None, :],
            other=0.0,
        )
        sum_values = sum_values * shrink[:, None] + tl.dot(
            weights.to(value_tile.dtype), value_tile, input_precision="ieee"
        )
        largest = new_largest

    if IS_SPLIT:
        at = (split * num_tokens + token) * num_heads + head
        tl.store(
            parts + at[:, None] * HEAD_DIM + dim[None, :],
            sum_values,
            mask=is_row[:, None] & is_dim[None, :],
        )
        tl.store(sums + at, largest, mask=is_row)
        tl.store(sums + splits * num_tokens * num_heads + at, total, mask=is_row)
    else:
        result = sum_values / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            out
            + token[:, None] * out_token_stride
            + head[:, None] * out_head_stride
            + dim[None, :],
            result.to(out.dtype.element_ty),
            mask=is_row[:, None] & is_dim[None, :],
        )


@triton.jit(do_not_specialize=["num_tokens", "splits"])
def _join(
    parts,
    sums,
    out,
    num_tokens,
    splits,
    num_heads,
    out_token_stride,
    out_head_stride,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
):
    """Join the results of the programs that shared the keys of one query and head."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, PADDED_SPLITS)
    is_split = split < splits
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < HEAD_DIM
    at = (split * num_tokens + token) * num_heads + head
    largest = tl.load(sums + at, mask=is_split, other=float("-inf"))
    totals = tl.load(sums + splits * num_tokens * num_heads + at, mask=is_split, other=0.0)
    overall = tl.max(largest, 0)
    factors = tl.exp2(largest - tl.where(overall == float("-inf"), 0.0, overall))
    total = tl.sum(totals * factors, 0)
    sums_of_values = tl.load(
        parts + at[:, None] * HEAD_DIM + dim[None, :],
        mask=is_split[:, None] & is_dim[None, :],
        other=0.0,
    )
    result = tl.sum(sums_of_values * factors[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(
        out + token * out_token_stride + head * out_head_stride + dim,
        result.to(out.dtype.element_ty),
        mask=is_dim,
    )

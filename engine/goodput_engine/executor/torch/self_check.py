"""The check of a loaded model before it serves: packed steps must give the model's own logits.

One prompt is computed whole, by the attention of transformers. Then our attention computes it in
chunks and single tokens, on paged keys and values, beside a token at the end of the longest
context. If the logits differ, the outputs of a request would depend on the other requests.

In a data type of low precision, the logits differ by rounding alone. A rotary embedding that
follows the longest request is then found by the keys of the first layer, which few operations
separate from the token ids.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

import torch

from goodput_core.errors import InputError
from goodput_engine.executor.torch.kv_pool import KVPool
from goodput_engine.executor.torch.model import PackedRow

if TYPE_CHECKING:
    from goodput_engine.executor.torch.model import PackedModel

__all__ = ["check_model"]

_BLOCK_SIZE: Final = 4
_CHUNKS: Final = (7, 1, 6, 1, 1)
"""Sizes of the steps after the first, which is longer than one block by a token: chunks that begin
and end within a block, and decodes."""
_TOLERANCE: Final = 1e-4
_LOW_PRECISION_TOLERANCE: Final = 0.05
"""Largest difference of logits, as a share of the largest logit."""
_KEY_TOLERANCE: Final = 0.05
"""Largest difference of keys, as a share of the largest in the same channel. Channels may differ by
orders of magnitude."""
_KEY_FLOOR: Final = 1e-3
"""The same for a channel of nothing but rounding errors, as a share of the largest key."""


def check_model(model: PackedModel) -> None:
    """Compare packed steps with the model's own attention.

    Raises:
        InputError: the logits differ; one sentence without the name of the model.
    """
    block_size = max(_BLOCK_SIZE, model.adapter.block_multiple)
    ends = sorted(
        {min(end, model.max_model_tokens) for end in accumulate((block_size + 1, *_CHUNKS))}
    )
    ids = [(7919 * (at + 1)) % model.vocab_size for at in range(ends[-1])]
    expected = model.reference_logits(ids)[[end - 1 for end in ends]]
    low = torch.finfo(expected.dtype).bits < 32
    bound = (_LOW_PRECISION_TOLERANCE if low else _TOLERANCE) * expected.abs().max()
    alone, keys_alone = _packed_logits(model, ids, ends, block_size, None)
    if not bool(((alone - expected).abs() <= bound).all()):
        if not bool(expected.isfinite().all()):
            raise InputError(
                "its logits are not finite numbers; download the weights again, or select a data "
                "type with a larger range"
            )
        raise InputError("paged attention does not give the logits of its own attention")
    beside, keys_beside = _packed_logits(model, ids, ends, block_size, model.max_model_tokens - 1)
    same_logits = bool(((beside - expected).abs() <= bound).all())
    if not (same_logits and _same_keys(keys_alone, keys_beside)):
        raise InputError(
            f"a request of {model.max_model_tokens} tokens changes the outputs of others, because "
            "the rotary embedding follows the longest one; limit the context to the "
            "original_max_position_embeddings of config.json"
        )


def _same_keys(keys: torch.Tensor, others: torch.Tensor) -> bool:
    """True if keys, `[num_tokens, num_kv_heads, head_dim]`, differ by rounding only."""
    keys, others = keys.float(), others.float()
    sizes = keys.abs()
    bound = _KEY_TOLERANCE * sizes.amax(0) + _KEY_FLOOR * sizes.max()
    return bool(((others - keys).abs() <= bound).all())


def _packed_logits(
    model: PackedModel,
    ids: list[int],
    ends: list[int],
    block_size: int,
    neighbour_position: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits after the last token of each step, and the keys of the first layer.

    Args:
        model: the model.
        ids: the prompt.
        ends: number of its tokens that are computed after each step.
        block_size: tokens per KV block.
        neighbour_position: position of a token of another request in each step; None to compute
            the prompt alone.
    """
    blocks = list(range(-(-len(ids) // block_size)))
    pool = KVPool(
        model.geometry,
        num_blocks=len(blocks) + 1,
        block_size=block_size,
        device=model.device,
    )
    pool.device_blocks.fill_(torch.nan)
    logits: list[torch.Tensor] = []
    for start, end in pairwise([0, *ends]):
        rows = [PackedRow(ids[start:end], start, blocks, samples=True)]
        if neighbour_position is not None:
            # The neighbour sees only itself, so one block suffices at any position.
            rows.append(
                PackedRow(ids[:1], 0, [len(blocks)], samples=False, shift=neighbour_position)
            )
        logits.append(model.compute(rows, pool))
    keys, _ = pool.layer(0)
    return torch.cat(logits), keys[blocks].flatten(0, 1)[: len(ids)]

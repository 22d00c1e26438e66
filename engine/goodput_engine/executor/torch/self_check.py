"""The check of a loaded model before it serves: packed steps must give the model's own logits.

One prompt is computed whole, by the attention of transformers. Then our attention computes it in
chunks and single tokens, on paged keys and values, beside a token at the end of the longest
context. If the logits differ, the outputs of a request would depend on the other requests.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Final

import torch

from goodput_core.errors import InputError
from goodput_engine.executor.torch.kv_pool import KVPool
from goodput_engine.executor.torch.model import PackedRow

if TYPE_CHECKING:
    from goodput_engine.executor.torch.model import PackedModel

__all__ = ["check_model"]

_BLOCK_SIZE: Final = 4
_CHUNKS: Final = (5, 7, 1, 6, 1, 1)
"""Sizes of the steps: chunks that begin and end within a block, and decodes."""
_TOLERANCE: Final = 1e-4
_LOW_PRECISION_TOLERANCE: Final = 0.05
"""Largest difference of logits, as a share of the largest logit."""


def check_model(model: PackedModel) -> None:
    """Compare packed steps with the model's own attention.

    Raises:
        InputError: the logits differ; one sentence without the name of the model.
    """
    length = min(sum(_CHUNKS), model.max_model_tokens)
    ids = [(7919 * (at + 1)) % model.vocab_size for at in range(length)]
    ends = [end - 1 for end in accumulate(_CHUNKS) if end <= length]
    expected = model.reference_logits(ids)[ends]
    low = torch.finfo(expected.dtype).bits < 32
    bound = (_LOW_PRECISION_TOLERANCE if low else _TOLERANCE) * expected.abs().max()
    for neighbour_position in (None, model.max_model_tokens - 1):
        logits = _packed_logits(model, ids, neighbour_position)[: len(ends)]
        if bool(((logits - expected).abs() <= bound).all()):
            continue
        if not bool(expected.isfinite().all()):
            raise InputError(
                "its logits are not finite numbers; download the weights again, or select a data "
                "type with a larger range"
            )
        if neighbour_position is None:
            raise InputError("paged attention does not give the logits of its own attention")
        raise InputError(
            f"a request of {model.max_model_tokens} tokens changes the outputs of others, because "
            "the rotary embedding follows the longest one; limit the context to the "
            "original_max_position_embeddings of config.json"
        )


def _packed_logits(
    model: PackedModel, ids: list[int], neighbour_position: int | None
) -> torch.Tensor:
    """Return the logits after the last token of each step.

    Args:
        model: the model.
        ids: the prompt.
        neighbour_position: position of a token of another request in each step; None to compute
            the prompt alone.
    """
    blocks = list(range(-(-len(ids) // _BLOCK_SIZE)))
    pool = KVPool(
        model.geometry,
        num_blocks=len(blocks) + 1,
        block_size=_BLOCK_SIZE,
        device=model.device,
    )
    pool.device_blocks.fill_(torch.nan)
    logits: list[torch.Tensor] = []
    start = 0
    for size in _CHUNKS:
        chunk = ids[start : start + size]
        if not chunk:
            break
        rows = [PackedRow(chunk, start, blocks, samples=True)]
        if neighbour_position is not None:
            # The neighbour sees only itself, so one block suffices at any position.
            rows.append(
                PackedRow(ids[:1], 0, [len(blocks)], samples=False, shift=neighbour_position)
            )
        logits.append(model.compute(rows, pool))
        start += len(chunk)
    return torch.cat(logits)

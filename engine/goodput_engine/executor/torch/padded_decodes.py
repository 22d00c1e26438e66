"""Steps that only decode, padded to a few batch sizes, on buffers that stay at one place.

A CUDA graph repeats kernels with the same shapes and addresses. The step therefore has fixed
buffers and a block table as wide as the longest request. Rows without a request compute one token
at position 0 of a block that is reserved for them, so they neither read nor write another block.

`PaddedDecodes` needs no GPU. Only `CudaGraphs` does, which records the step of each size.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final, Protocol

import torch

from goodput_engine.executor.torch.attention import RaggedBatch
from goodput_engine.executor.torch.uploads import upload, upload_list

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from goodput_engine.executor.torch.kv_pool import KVPool
    from goodput_engine.executor.torch.model import LateTokens, PackedModel, PackedRow

__all__ = ["CudaGraphs", "PaddedDecodes", "StepRecorder", "batch_sizes"]

# Small batches are padded by less than a factor of two, large ones by at most this number of rows.
_STEP: Final = 16
# Columns of a step before those of its block table: id, position, slot, and number of keys.
_FIRST_BLOCK: Final = 4


def batch_sizes(max_rows: int) -> list[int]:
    """Return the sizes to which batches of at most `max_rows` rows are padded, in order."""
    sizes = [size for size in (1, 2, 4, 8) if size < max_rows]
    return [*sizes, *range(_STEP, max_rows, _STEP), max_rows]


class StepRecorder(Protocol):
    """Makes the repeated computation of steps faster."""

    def record(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Return a function that computes the same step again, on the same buffers."""
        ...


class CudaGraphs:
    """Records steps as CUDA graphs, which share their working memory."""

    def __init__(self) -> None:
        self._memory: object = None

    def record(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Record a step; see `StepRecorder`.

        Raises:
            RuntimeError: the step waits for the device, which a graph cannot.
        """
        # Kernels are compiled, and libraries take their memory, before the step is recorded. A
        # recording that fails would leave torch unable to free memory in this process, so a step
        # that waits for the device is found by an error of torch before.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            logits = step()
        self._memory = graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return replay


class PaddedDecodes:
    """Computes steps in which each row decodes one token.

    Args:
        model: the model.
        pool: has one more block than the scheduler knows, which padding writes.
        sizes: batch sizes in ascending order.
        recorder: records the step of each size; None to compute each step anew.

    Attributes:
        reserved_block: the last block of the pool.
    """

    def __init__(
        self,
        model: PackedModel,
        pool: KVPool,
        *,
        sizes: Sequence[int],
        recorder: StepRecorder | None = None,
    ) -> None:
        self.reserved_block = len(pool.device_blocks) - 1
        self._model = model
        self._pool = pool
        self._sizes = list(sizes)
        self._max_blocks = -(-model.max_model_tokens // pool.block_size)
        rows, device = self._sizes[-1], model.device
        self._ids = torch.zeros((1, rows), dtype=torch.long, device=device)
        self._positions = torch.zeros((1, rows), dtype=torch.long, device=device)
        self._slots = torch.zeros(rows, dtype=torch.long, device=device)
        self._last = torch.arange(rows, device=device)
        self._ends = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._num_keys = torch.ones(rows, dtype=torch.int32, device=device)
        # Entries after the last block of a row are arbitrary, but never outside of the pool.
        self._blocks = torch.zeros((rows, self._max_blocks), dtype=torch.int32, device=device)
        self._steps: dict[int, Callable[[], torch.Tensor]] = {}
        self._fill([], self._sizes[-1])
        # The largest first, so that the others fit into its memory.
        for size in reversed(self._sizes):
            self._steps[size] = step = self._step(size)
            if recorder is not None:
                self._steps[size] = recorder.record(step)

    def takes(self, rows: Sequence[PackedRow]) -> bool:
        """True if each row decodes one token, and the largest size holds all rows."""
        return len(rows) <= self._sizes[-1] and all(
            row.samples and len(row.token_ids) == 1 for row in rows
        )

    def compute(self, rows: Sequence[PackedRow], late: LateTokens | None = None) -> torch.Tensor:
        """Compute a step.

        Args:
            rows: rows that `takes` accepts, at least one.
            late: see `PackedModel.compute`.

        Returns:
            The logits of each row, `[num_rows, vocab_size]`. The next step overwrites them.
        """
        size = self._sizes[bisect_left(self._sizes, len(rows))]
        self._fill(rows, size)
        if late is not None:
            device = self._ids.device
            indices = upload_list(list(late.indices), device)
            self._ids[0, upload_list(list(late.rows), device)] = late.ids[indices]
        return self._steps[size]()[: len(rows)]

    def _step(self, size: int) -> Callable[[], torch.Tensor]:
        """Return the computation of a batch size on the buffers."""

        def step() -> torch.Tensor:
            # A new object each time: an adapter on the host may keep a plan for each batch.
            batch = RaggedBatch(
                cu_seqlens_q=self._ends[: size + 1],
                seqused_k=self._num_keys[:size],
                block_table=self._blocks[:size],
                # A recorded step is repeated with longer sequences.
                max_queries=1,
                max_keys=self._max_blocks * self._pool.block_size,
            )
            return self._model.compute_batch(
                self._ids[:, :size],
                self._positions[:, :size],
                self._pool,
                batch,
                slots=self._slots[:size],
                last=self._last[:size],
            )

        return step

    def _fill(self, rows: Sequence[PackedRow], size: int) -> None:
        """Write the rows of a step and its padding to the buffers, with one copy to the device."""
        block_size, reserved = self._pool.block_size, self.reserved_block
        width = max([1, *(row.start // block_size + 1 for row in rows)])
        host = torch.zeros((size, _FIRST_BLOCK + width), dtype=torch.long)
        lines = host.numpy()
        for at, row in enumerate(rows):
            used = row.start // block_size + 1
            slot = row.blocks[used - 1] * block_size + row.start % block_size
            lines[at, :_FIRST_BLOCK] = (row.token_ids[0], row.start, slot, row.start + 1)
            lines[at, _FIRST_BLOCK : _FIRST_BLOCK + used] = row.blocks[:used]
        lines[len(rows) :, 2] = reserved * block_size
        lines[len(rows) :, 3] = 1
        lines[len(rows) :, _FIRST_BLOCK] = reserved
        step = upload(host, self._ids.device)
        self._ids[0, :size] = step[:, 0]
        self._positions[0, :size] = step[:, 1]
        self._slots[:size] = step[:, 2]
        self._num_keys[:size] = step[:, 3]
        self._blocks[:size, :width] = step[:, _FIRST_BLOCK:]

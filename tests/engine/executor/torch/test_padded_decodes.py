"""Padded steps that only decode give the logits of ragged steps, and touch no other block."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

import torch
from tests.builders.torch_models import ARCHITECTURES, ModelBench, TinyModel

from goodput_core.spec.choices import Preemption
from goodput_engine.executor.torch import triton_attention
from goodput_engine.executor.torch.kv_pool import KVPool
from goodput_engine.executor.torch.model import LateTokens, PackedRow
from goodput_engine.executor.torch.padded_decodes import PaddedDecodes, batch_sizes
from goodput_engine.executor.torch.triton_attention import TritonAttention
from goodput_engine.messages import SamplingOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.torch

BLOCK_SIZE = 4
LENGTHS = (9, 1, 16, 4, 31)
"""Prompt tokens of the requests: also such whose next token begins a block."""


def prompt(number: int) -> list[int]:
    return [(7 * number + 3 * at) % 97 for at in range(LENGTHS[number])]


def prefilled(model: TinyModel, number: int) -> tuple[KVPool, list[PackedRow]]:
    """Return a poisoned pool with the prompts of some requests, and their first decodes."""
    pool = KVPool(model.packed.geometry, num_blocks=41, block_size=BLOCK_SIZE)
    pool.device_blocks.fill_(torch.nan)
    order = [(at * 17) % 40 for at in range(40)]
    rows = []
    for request in range(number):
        ids = prompt(request)
        blocks = [order.pop() for _ in range(len(ids) // BLOCK_SIZE + 1)]
        model.packed.compute([PackedRow(ids, 0, blocks, True)], pool)
        rows.append(PackedRow([request + 5], len(ids), blocks, True))
    return pool, rows


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_padded_step_equals_the_ragged_step_and_pads_only_the_reserved_block(
    tmp_path: Path, architecture: str
) -> None:
    model = TinyModel.build(tmp_path, architecture, "float64")
    for number in (1, 3, 5):
        pool, rows = prefilled(model, number)
        padded = PaddedDecodes(model.packed, pool, sizes=(1, 4, 8))
        pool.device_blocks[padded.reserved_block] = torch.nan
        before = pool.device_blocks.clone()
        assert padded.takes(rows)
        logits = padded.compute(rows)
        after = pool.device_blocks.clone()
        pool.device_blocks.copy_(before)
        expected = model.packed.compute(rows, pool)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
        # One slot of each row was written, and the first one of the reserved block.
        written = (~after.isnan() & before.isnan()).any(-1).any(-1).any(2).any(1)
        slots = {(row.blocks[row.start // BLOCK_SIZE], row.start % BLOCK_SIZE) for row in rows}
        padding = {(padded.reserved_block, 0)} if number != 1 else set()
        assert {(block, slot) for block, slot in written.nonzero().tolist()} == slots | padding
        kept = ~before.isnan()
        assert torch.equal(after[kept], before[kept])


def test_a_padded_step_takes_tokens_that_only_the_device_has(tmp_path: Path) -> None:
    model = TinyModel.build(tmp_path, "Llama", "float64")
    pool, rows = prefilled(model, 3)
    padded = PaddedDecodes(model.packed, pool, sizes=(4,))
    expected = padded.compute(rows).clone()
    unread = [row._replace(token_ids=[0]) if at != 1 else row for at, row in enumerate(rows)]
    late = LateTokens([0, 2], [3, 1], torch.tensor([9, rows[2].token_ids[0], 9, 5]))
    assert torch.equal(padded.compute(unread, late), expected)


def test_steps_of_different_sizes_leave_nothing_to_each_other(tmp_path: Path) -> None:
    model = TinyModel.build(tmp_path, "Mistral", "float64")
    pool, rows = prefilled(model, 5)
    padded = PaddedDecodes(model.packed, pool, sizes=(1, 2, 5))
    alone = [padded.compute([row]).clone() for row in rows]
    together = padded.compute(rows).clone()
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-12)
    again = padded.compute([rows[4], rows[0]])
    torch.testing.assert_close(again, torch.cat([alone[4], alone[0]]), rtol=0, atol=1e-12)


def test_the_kernel_for_gpus_computes_padded_steps_with_a_table_of_full_width(
    tmp_path: Path,
) -> None:
    model = TinyModel.build(tmp_path, "Mistral", "float32")
    pool, rows = prefilled(model, 5)
    before = pool.device_blocks.clone()
    expected = model.packed.compute(rows, pool)
    pool.device_blocks.copy_(before)
    model.packed.adapter = TritonAttention(splits=3)
    padded = PaddedDecodes(model.packed, pool, sizes=(8,))
    torch.testing.assert_close(padded.compute(rows), expected, rtol=0, atol=1e-4)


def test_a_padded_step_divides_the_keys_alike_for_every_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph keeps the splits of the step that was recorded."""
    model = TinyModel.build(tmp_path, "Llama", "float32", max_position_embeddings=2048)
    model.packed.adapter = TritonAttention()
    pool = KVPool(model.packed.geometry, num_blocks=1 + 2 * 128, block_size=16)
    pool.device_blocks.zero_()  # the rows have keys that no step wrote
    found: list[int] = []
    num_splits = triton_attention._num_splits

    def log(*arguments: Any) -> int:
        found.append(num_splits(*arguments))
        return found[-1]

    def splits_of(compute: Callable[[], object]) -> set[int]:
        found.clear()
        compute()
        return set(found)

    monkeypatch.setattr(triton_attention, "_num_splits", log)
    padded = PaddedDecodes(model.packed, pool, sizes=(2,))
    short, long = (
        [PackedRow([5], start, range(128 * at, 128 * (at + 1)), True) for at in range(2)]
        for start in (3, 1200)
    )
    fixed = [splits_of(partial(padded.compute, rows)) for rows in (short, long)]
    assert fixed[0] == fixed[1]
    assert fixed[0] != {1}, "the keys are divided"
    # A step that is not recorded has a table as wide as its longest row.
    cut = [row._replace(blocks=row.blocks[:1]) for row in short]
    assert splits_of(lambda: model.packed.compute(cut, pool)) != fixed[0]


@pytest.mark.parametrize("max_rows", [1, 2, 7, 8, 9, 16, 40, 256])
def test_every_batch_has_a_size_that_is_not_much_larger(max_rows: int) -> None:
    sizes = batch_sizes(max_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_rows
    for rows in range(1, max_rows + 1):
        size = next(one for one in sizes if one >= rows)
        assert size < 2 * rows or size - rows < 16


class ReplayedSteps:
    """A recorder that fails like a graph would if a step read a buffer that moved.

    Attributes:
        recorded: number of recorded steps.
        replayed: number of repetitions.
    """

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def record(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        self.recorded += 1
        output = step()

        def replay() -> torch.Tensor:
            self.replayed += 1
            with torch.inference_mode():
                return output.copy_(step())

        return replay


@pytest.mark.parametrize("starts_ahead", [False, True])
def test_an_engine_replays_its_decodes_and_computes_other_steps_ragged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts_ahead: bool
) -> None:
    model = TinyModel.build(tmp_path, "Llama", "float64")
    ragged: list[int] = []
    compute = model.packed.compute

    def log(rows: Any, *others: Any) -> Any:
        ragged.append(sum(len(row.token_ids) for row in rows))
        return compute(rows, *others)

    monkeypatch.setattr(model.packed, "compute", log)
    recorder = ReplayedSteps()
    bench = ModelBench(
        model,
        "sarathi",
        Preemption.SWAP,
        blocks=30,
        block_size=4,
        depth=int(starts_ahead),
        starts_ahead=starts_ahead,
        decode_sizes=(1, 2, 4),
        recorder=recorder,
    )
    assert recorder.recorded == 3
    for family in range(6):
        bench.submit(6, 16 if family < 4 else 5, family=family, ignore_eos=True)
    bench.run_dry()
    assert recorder.replayed > 10
    # Six decodes are more than the largest size.
    assert 6 in ragged


def test_penalties_do_not_delay_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TinyModel.build(tmp_path, "Llama", "float64")
    outputs = []
    for ahead in (False, True):
        bench = ModelBench(
            model,
            "sarathi",
            Preemption.RECOMPUTE,
            blocks=30,
            block_size=4,
            depth=int(ahead),
            starts_ahead=ahead,
            decode_sizes=(4,) if ahead else (),
        )
        for family in range(3):
            sampling = SamplingOptions(
                temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.4, seed=family
            )
            bench.submit(6, 16, family=family, sampling=sampling, min_tokens=9)
        started: list[bool] = []
        can_follow = bench.executor._can_follow

        def log(step: Any, can_follow: Any = can_follow, started: list[bool] = started) -> bool:
            started.append(can_follow(step))
            return started[-1]

        monkeypatch.setattr(bench.executor, "_can_follow", log)
        bench.finish()
        assert all(started)
        assert bool(started) == ahead
        outputs.append(bench.token_ids)
    assert outputs[0] == outputs[1]

"""`hybrid` keeps as much as the better of the two other preemption modes."""

from __future__ import annotations

import statistics

import pytest
from benchmarks.cells import Cell, run_cell
from benchmarks.design import read_knees
from benchmarks.preemption_modes import mode_cells

from goodput_core.spec.choices import Policy, Preemption

_SEEDS = (101, 102)


def _cell(blocks: int, gb_per_s: float) -> Cell:
    name = f"modes/kv-bound/1.5x/{blocks} blocks/{gb_per_s:g} GB/s"
    return next(cell for cell in mode_cells(read_knees()) if cell.name == name)


@pytest.mark.parametrize(
    ("policy", "blocks", "gb_per_s"),
    [(Policy.SJF, 512, 64.0), (Policy.FASTSERVE, 307, 1.0)],
)
def test_hybrid_keeps_as_much_as_the_better_of_the_two_other_modes(
    policy: Policy, blocks: int, gb_per_s: float
) -> None:
    cell = _cell(blocks, gb_per_s)
    shares = {
        mode: statistics.fmean(run_cell(cell, policy, seed, mode).share for seed in _SEEDS)
        for mode in Preemption
    }
    assert shares[Preemption.HYBRID] >= max(shares.values()) - 0.01

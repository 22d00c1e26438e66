"""`hybrid` keeps as much as the better of the two other preemption modes."""

from __future__ import annotations

import statistics

import pytest
from benchmarks.comparison.cells import run_cell
from benchmarks.comparison.design import read_knees
from benchmarks.comparison.preemption_modes import mode_cells

from goodput_core.spec.choices import Policy, Preemption

_SEEDS = (101, 102)


@pytest.mark.parametrize(("blocks", "gb_per_s"), [(45, 64.0), (64, 8.0)])
def test_hybrid_keeps_as_much_as_the_better_of_the_two_other_modes(
    blocks: int, gb_per_s: float
) -> None:
    name = f"modes/kv-bound/1.5x/{blocks} blocks/{gb_per_s:g} GB/s"
    cell = next(cell for cell in mode_cells(read_knees()) if cell.name == name)
    shares = {
        mode: statistics.fmean(run_cell(cell, Policy.SJF, seed, mode).share for seed in _SEEDS)
        for mode in Preemption
    }
    assert shares[Preemption.HYBRID] >= max(shares.values()) - 0.01

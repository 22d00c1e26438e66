"""`hybrid` keeps as much as the better of the two other preemption modes."""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor

import pytest
from benchmarks.comparison import preemption_modes
from benchmarks.comparison.cells import run_cell
from benchmarks.comparison.design import read_knees
from benchmarks.comparison.preemption_modes import ModeResult, compare_modes, mode_cells

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


@pytest.mark.parametrize("broken", [False, True])
def test_new_seeds_decide_on_a_broken_result(
    monkeypatch: pytest.MonkeyPatch, *, broken: bool
) -> None:
    def shares(cell: object, policy: str, seeds: list[int], *, short: bool = False) -> ModeResult:
        lost = 0.02 if broken or 1 in seeds else 0.0
        return ModeResult(
            cell="cell",
            policy=policy,
            shares={"swap": 0.5, "recompute": 0.9, "hybrid": 0.9 - lost},
            high=-lost / 2,
            preemptions=len(seeds),
            short=short,
        )

    monkeypatch.setattr(preemption_modes, "_compare", shares)
    cell = mode_cells(read_knees())[0]
    with ThreadPoolExecutor(1) as pool:
        (result,) = compare_modes(pool, [cell], range(1, 4), ["sjf"])
        (short,) = compare_modes(pool, [cell], range(1, 4), ["sjf"], short=True)
    assert result.broken is broken
    assert result.preemptions == 12, "four times as many seeds"
    assert result.before is not None
    assert result.before.difference == pytest.approx(-0.02)
    assert short.before is None

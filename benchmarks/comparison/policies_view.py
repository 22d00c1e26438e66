"""Tables and plot of the comparison of policies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.comparison.rule import SURE_SHARE

from goodput_core.spec.choices import Policy

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.comparison.admitted import Admitted
    from benchmarks.comparison.plateau import Curve
    from benchmarks.comparison.preemption_modes import ModeResult
    from benchmarks.comparison.rule import CellResult, Chances

__all__ = ["draw", "show_cells", "show_chances", "show_curves", "show_modes"]


def show_cells(results: Sequence[CellResult], seeds: int) -> None:
    """Print the table of the rule, the worst cells first."""
    if not results:
        return
    width = max(len(result.cell) for result in results)
    print(
        f"{'cell':{width}}  {'slo':>6}  {'ensured':>8}  {'chances':>13}  {'worst pair':18}"
        f"  {'difference':>10}  {'at least':>8}  {'worst seed':>10}"
    )
    for result in sorted(results, key=_worst):
        worst = result.differences[0]
        print(
            f"{result.cell:{width}}  {result.shares[Policy.SLO]:6.1%}  {_admitted(result.admitted)}"
            f"  {worst.policy:10} {result.shares[worst.policy]:7.1%}"
            f"  {worst.mean:+10.2%}  {worst.low:+8.2%}  {result.worst_seed:10.1%}"
            f"{_of_bound(result)}{'  broken' if result.broken else ''}"
        )
    cpu_s = sum(result.cpu_s for result in results)
    print(
        f"{len(results)} cells, {seeds} seeds, {cpu_s / 60:.1f} CPU-minutes. The rule is broken in "
        f"{sum(result.broken for result in results)} cells, in "
        f"{sum(result.mean_broken for result in results)} of them by the mean difference, in "
        f"{sum(result.admitted_broken for result in results)} by the admitted requests."
    )
    for result in results:
        for before in result.opened:
            after = next(one for one in result.differences if one.policy == before.policy)
            print(
                f"{result.cell}: to {before.policy}, {before.mean:+.2%} with at least"
                f" {before.low:+.2%} on {before.seeds} seeds was open. The next {after.seeds} seeds"
                f" decide: {after.mean:+.2%}, at least {after.low:+.2%}."
            )
    ensurable = [result.admitted for result in results if result.admitted.sure]
    kept = sum(admitted.sure_share >= SURE_SHARE for admitted in ensurable)
    print(
        f"Of the admitted requests whose targets could be ensured, at least {SURE_SHARE:.0%} were "
        f"in time in {kept} of {len(ensurable)} cells."
    )


def show_chances(mixes: Sequence[Chances]) -> None:
    """Print the chances of the admitted requests whose targets could not be ensured."""
    if not mixes:
        return
    width = max(len(one.mix) for one in mixes)
    print(f"\n{'mix':{width}}  {'others':>6}  predicted  in time  difference")
    for one in mixes:
        admitted = one.admitted
        count = max(1, admitted.others)
        print(
            f"{one.mix:{width}}  {admitted.others:6}  {admitted.predicted / count:9.1%}"
            f"  {admitted.others_kept / count:7.1%}  {admitted.difference:+10.1%}"
            f"{'  broken' * one.broken}"
        )


def _admitted(admitted: Admitted) -> str:
    """Return the share in time of ensurable requests, and of the others less their chances."""
    ensured = f"{admitted.sure_share:8.1%}" if admitted.sure else f"{'':8}"
    if not admitted.others:
        return f"{ensured}  {'':13}"
    return f"{ensured}  {admitted.others:5} {admitted.difference:+7.1%}"


def _worst(result: CellResult) -> float:
    """Return the number by which the worst pair of a cell is judged."""
    worst = result.differences[0]
    return worst.mean if result.short else worst.low


def _of_bound(result: CellResult) -> str:
    return "" if result.bound_share is None else f"  {result.bound_share:6.1%} of the bound"


def show_modes(results: Sequence[ModeResult]) -> None:
    """Print the differences of `hybrid` to the better of the other modes, the worst first."""
    if not results:
        return
    width = max(len(result.cell) for result in results)
    print(
        f"\n{'cell':{width}}  {'policy':10}  {'recompute':>9}  {'swap':>6}  {'hybrid':>6}"
        f"  {'difference':>10}"
    )
    for result in sorted(results, key=lambda one: one.difference):
        shares = result.shares
        print(
            f"{result.cell:{width}}  {result.policy:10}  {shares['recompute']:9.1%}"
            f"  {shares['swap']:6.1%}  {shares['hybrid']:6.1%}  {result.difference:+10.2%}"
            f"{'' if result.before is None else f'  (first {result.before.difference:+.2%})'}"
            f"{'  broken' if result.broken else ''}"
        )


def show_curves(lines: Sequence[Curve]) -> None:
    """Print the kept requests of `slo` by load."""
    if not lines:
        return
    width = max(len(line.name) for line in lines)
    print(
        "\noffered → kept per second (admitted in time), by multiples of the knee; lowest: of the "
        "most\nkept at a lower load; ensured: lowest share in time where targets can be ensured"
    )
    for line in lines:
        points = "  ".join(
            f"{p.factor:g}x {p.offered_per_s:.1f}→{p.kept_per_s:.1f} ({p.admitted_kept:.1%})"
            for p in line.points
        )
        print(
            f"{line.name:{width}} {points}  lowest {line.lowest:.1%}  ensured {line.ensured:.1%}"
            f"{'  broken' * line.broken}"
        )


def draw(lines: Sequence[Curve], path: Path) -> None:
    """Draw kept against offered requests, a panel for each series and a line for each policy."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(line.name for line in lines))
    others = dict.fromkeys(line.policy for line in lines if line.policy != Policy.SLO)
    colours = {policy: f"C{number}" for number, policy in enumerate(others)}
    rows = -(-len(names) // 3)
    figure = Figure(figsize=(12, 3.2 * rows), layout="constrained")
    panels = figure.subplots(rows, 3, squeeze=False).flatten()
    for panel, name in zip(panels, names, strict=False):
        for line in lines:
            if line.name == name:
                panel.plot(
                    [point.factor for point in line.points],
                    [point.kept_per_s for point in line.points],
                    marker=".",
                    label=line.policy,
                    color="black" if line.policy == Policy.SLO else colours[line.policy],
                    linewidth=2.5 if line.policy == Policy.SLO else 1,
                )
        panel.set_title(name)
        panel.set_xlabel("offered, multiples of the knee")
        panel.set_ylabel("kept requests/s")
        panel.grid(alpha=0.3)
    for panel in panels[len(names) :]:
        panel.set_visible(False)
    panels[0].legend(frameon=False, fontsize="x-small")
    figure.savefig(path, dpi=110)

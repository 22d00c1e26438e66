"""Least squares whose coefficients cannot be negative, for the few that a step's time has.

A negative cost of a token is noise that a budget law would act upon. With at most four unknowns
the exact answer is found by trying which of them are zero, from sums alone, so the engine can
fit while it serves without a numerical library.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["nonnegative_least_squares"]

# Of columns scaled to length one: closer to dependent than this is dependent.
_SINGULAR: Final = 1e-10


def nonnegative_least_squares(
    gram: Sequence[Sequence[float]], right: Sequence[float]
) -> list[float]:
    """The x ≥ 0 that minimises |A·x − b|², from AᵀA and Aᵀb.

    Args:
        gram: AᵀA, [n, n], n small: up to 2ⁿ systems are solved.
        right: Aᵀb, [n].

    Returns:
        x, [n]. Columns of zeros, and those that others make up, may get 0.

    Source: Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23: the solution
    is the unconstrained one of the columns that are not zero in it.
    """
    columns = [i for i in range(len(right)) if gram[i][i] > 0]
    best, best_gain = [0.0] * len(right), 0.0
    for count in range(len(columns), 0, -1):
        for chosen in combinations(columns, count):
            solved = _solve(gram, right, chosen)
            if solved is None or min(solved) < 0:
                continue
            # By how much the squared error is below that of x = 0.
            gain = sum(right[i] * x for i, x in zip(chosen, solved, strict=True))
            if gain > best_gain:
                best_gain = gain
                best = [0.0] * len(right)
                for i, x in zip(chosen, solved, strict=True):
                    best[i] = x
        if count == len(columns) and best_gain > 0:
            break  # nothing constrained is better than what needs no constraint
    return best


def _solve(
    gram: Sequence[Sequence[float]], right: Sequence[float], chosen: tuple[int, ...]
) -> list[float] | None:
    """Unconstrained, of some columns; None: they are dependent. Gaussian elimination."""
    scale = [gram[i][i] ** -0.5 for i in chosen]
    rows = [
        [*(gram[i][j] * si * sj for j, sj in zip(chosen, scale, strict=True)), right[i] * si]
        for i, si in zip(chosen, scale, strict=True)
    ]
    size = len(rows)
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        if abs(rows[pivot][column]) < _SINGULAR:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for row in range(column + 1, size):
            factor = rows[row][column] / rows[column][column]
            for at in range(column, size + 1):
                rows[row][at] -= factor * rows[column][at]
    solution = [0.0] * size
    for row in range(size - 1, -1, -1):
        known = sum(rows[row][at] * solution[at] for at in range(row + 1, size))
        solution[row] = (rows[row][size] - known) / rows[row][row]
    return [x * s for x, s in zip(solution, scale, strict=True)]

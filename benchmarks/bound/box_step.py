"""Better prices of device time, by the box-step method.

The bound is a convex function of the prices (`prices`), and each set of prices gives a tangent of
it. A linear programme over the tangents gives the next prices to try.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from benchmarks.bound.prices import bound_at, cheapest, step_surplus
from scipy.optimize import linprog
from scipy.sparse import csr_array, eye_array, hstack, vstack

if TYPE_CHECKING:
    from benchmarks.bound.prices import Prices, Response
    from benchmarks.bound.stages import Resources, Stages
    from numpy.typing import NDArray

__all__ = ["improve"]


def improve(
    stages: Stages,
    resources: Resources,
    start: Prices,
    *,
    blocks: NDArray[np.int64],
    rounds: int,
    gap: float,
) -> tuple[Prices, Response]:
    """Lower the bound by better prices.

    The bound is a convex function of the prices. Each round adds its tangent, summed over each
    block of requests, to a model of the function. The prices that minimise the model within a box
    around the best prices are tried next.

    Args:
        stages: the chains.
        resources: resources of all replicas.
        start: the first prices.
        blocks: block of each chain.
        rounds: number of prices to try.
        gap: stop if the model's minimum is less than this share below the bound.

    Source: the box-step method, Marsten, Hogan, Blankenship, Operations Research 1975.
    """
    best, response = start, bound_at(stages, resources, start)
    answer, tried = response, start
    shape = start.resources.shape
    lengths = np.diff(start.edges)
    worth = step_surplus(stages, resources, replace(start, resources=np.zeros(shape)))
    # Prices of this size are noticed, also those of resources that had none.
    means = start.resources.mean(axis=1)
    times = resources.limit > 0
    per_step = means[times].max() * resources.per_step[times].max()
    scale = np.full((shape[0], 1), means[times].max())
    scale[~times, 0] = per_step / np.abs(resources.per_step[~times])
    tangents, gains = [], []
    width = 0.1
    for _ in range(rounds):
        usage, gain = _tangent(stages, tried, answer, blocks)
        tangents.append(usage)
        gains.append(gain)
        high = best.resources * (1 + width) + width * scale
        low = best.resources * (1 - min(width, 1))
        model = _minimise(
            tangents=tangents,
            gains=gains,
            resources=resources,
            lengths=lengths,
            worth=worth,
            low=low,
            high=high,
        )
        if model is None:
            break
        value, resource_prices = model
        inside = ((resource_prices < high * 0.999) & (resource_prices > low * 1.001)) | (
            resource_prices <= 0
        )
        if value > (1 - gap) * response.bound:
            if width > 4 or inside.all():
                break
            width *= 2
        predicted = response.bound - value
        tried = replace(start, resources=resource_prices)
        answer = bound_at(stages, resources, tried)
        if answer.bound < response.bound:
            if answer.bound < response.bound - predicted / 2:
                width *= 2
            best, response = tried, answer
        else:
            width /= 2
    return best, response


def _tangent(
    stages: Stages, prices: Prices, response: Response, blocks: NDArray[np.int64]
) -> tuple[csr_array, NDArray[np.float64]]:
    """Return the use of resources and the gain of each block in a response.

    Returns:
        The use of each resource in each interval, shape [blocks, resources · intervals], and the
        gain without the prices of steps, shape [blocks].
    """
    used = np.flatnonzero(response.flow > 0)
    owner, work = stages.owner[used], stages.work[used]
    amount = response.flow[used] * stages.count[owner]
    until = np.where(response.is_late[used], stages.late_s[used], stages.due_s[used])
    pairs, taken = cheapest(prices, work, stages.start_s[used], until, stages.share_s[used])
    inside = pairs.interval >= 0
    stage, interval = pairs.stage[inside], pairs.interval[inside]
    intervals, count = prices.resources.shape[1], int(blocks.max()) + 1
    values = (taken[inside] * amount[stage])[:, None] * work[stage]
    columns = interval[:, None] + intervals * np.arange(work.shape[1])
    rows = np.broadcast_to(blocks[owner[stage]][:, None], columns.shape)
    usage = csr_array(
        (values.ravel(), (rows.ravel(), columns.ravel())), shape=(count, prices.resources.size)
    )
    usage.sum_duplicates()
    gain = np.where(response.is_late[used], 0, stages.gain[used])
    gain = gain - prices.steps[owner] * stages.steps[used]
    return usage, np.asarray(np.bincount(blocks[owner], gain * amount, count), dtype=np.float64)


def _minimise(
    *,
    tangents: list[csr_array],
    gains: list[NDArray[np.float64]],
    resources: Resources,
    lengths: NDArray[np.float64],
    worth: NDArray[np.float64],
    low: NDArray[np.float64],
    high: NDArray[np.float64],
) -> tuple[float, NDArray[np.float64]] | None:
    """Return the minimum of the model and its prices; None if the solver failed."""
    blocks, size, intervals = len(gains[0]), low.size, len(lengths)
    rows = vstack([hstack([-usage, -eye_array(blocks)]) for usage in tangents])
    # Prices at which a step costs at least its worth; others are never better.
    step = hstack(
        [-factor * eye_array(intervals) for factor in resources.per_step]
        + [csr_array((intervals, blocks))]
    )
    solution = linprog(
        np.concatenate([(resources.limit[:, None] * lengths).ravel(), np.ones(blocks)]),
        A_ub=csr_array(vstack([rows, step])),
        b_ub=np.concatenate([*(-gain for gain in gains), -worth]),
        bounds=np.column_stack(
            [
                np.concatenate([low.ravel(), np.zeros(blocks)]),
                np.concatenate([high.ravel(), np.full(blocks, np.inf)]),
            ]
        ),
        method="highs-ipm",
    )
    if solution.x is None:
        return None
    return float(solution.fun), np.maximum(0, solution.x[:size]).reshape(low.shape)

"""Prices of device time: a linear programme over stages, and the bound that any prices give.

Time is cut into intervals. The programme distributes shares of stages over the intervals of their
windows, within the resources of each interval. Its dual variables are prices of the resources.

The bound does not need optimal prices. At any prices of at least 0, no schedule gains more than
the value of all resources at these prices plus, for each request, its weight less the cost of its
cheapest service, if that is positive (weak duality). Prices may therefore come from a smaller
programme with fewer requests and from an inexact solver; the bound is computed from all requests.
Work within an interval that a window only overlaps counts as if the interval's resources were
available throughout the window, so longer intervals only raise the bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from benchmarks.bound.stages import ROUNDING_S
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array

if TYPE_CHECKING:
    from benchmarks.bound.stages import Resources, Stages

__all__ = [
    "Prices",
    "Response",
    "Solution",
    "bound_at",
    "cheapest",
    "edges_of",
    "reduce",
    "solve",
    "step_surplus",
]

# Shares of a stage below this are nothing.
_TOLERANCE = 1e-6
# Levels of work per weight among requests with about the same arrival, in a sample.
_LEVELS = 8
# Stages whose costs are computed at once, which bounds the memory.
_BATCH = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices, all at least 0.

    Args:
        edges: times that separate the intervals.
        resources: price of each resource in each interval, shape [resources, intervals].
        steps: price of a step within the window of a request, shape [chains].
    """

    edges: NDArray[np.float64]
    resources: NDArray[np.float64]
    steps: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A solution of the linear programme.

    Args:
        value: expected weight of the requests in time.
        prices: the dual variables.
    """

    value: float
    prices: Prices


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pairs:
    """Stages and intervals within their windows; interval −1 is after the last deadline.

    Args:
        stage, interval: indices.
        most: largest share of the stage that one replica computes in the interval.
    """

    stage: NDArray[np.int64]
    interval: NDArray[np.int64]
    most: NDArray[np.float64]

    def cost(self, work: NDArray[np.float64], prices: Prices) -> NDArray[np.float64]:
        """Return the cost of each stage in each interval; nothing after the last deadline."""
        cost = np.einsum("pr,rp->p", work[self.stage], prices.resources[:, self.interval])
        return np.where(self.interval < 0, 0, cost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """The bound at some prices, and the cheapest service of each request.

    Args:
        bound: the upper bound.
        surplus: gain of a request of each chain less the cost of its cheapest service.
        flow: probability that the stage is computed.
        is_late: True if the cheapest service computes the stage without its gain.
    """

    bound: float
    surplus: NDArray[np.float64]
    flow: NDArray[np.float64]
    is_late: NDArray[np.bool_]


def edges_of(stages: Stages, most: int, count: int) -> NDArray[np.float64]:
    """Return the times that separate the intervals.

    Time is cut at arrivals and deadlines, or into `count` equal intervals if more than `most` cuts
    were needed.
    """
    first = stages.first
    last = np.append(first[1:], len(stages.owner)) - 1
    times = np.concatenate([stages.start_s[first], stages.due_s[first], stages.late_s[last]])
    edges: NDArray[np.float64] = np.unique(np.round(times[np.isfinite(times)], 9))
    if len(edges) < 2:
        return np.array([edges[0], edges[0] + 1])
    if len(edges) > most + 1:
        return np.linspace(edges[0], edges[-1], count + 1)
    return edges


def reduce(
    stages: Stages, pairs: int, edges: NDArray[np.float64]
) -> tuple[Stages, NDArray[np.int64]]:
    """Return a sample of the chains with about this many stages in intervals.

    Groups of chains that are similar in arrival and work are replaced with copies of their middle
    one. The sample approximates the chains; it does not bound them.

    Returns:
        The sample, and for each chain the index of its group in the sample; −1 for chains without
        a gain, which are in no group.
    """
    first, reach = stages.first, _reach(stages)
    weight = np.add.reduceat(stages.gain * reach, first)
    work = np.add.reduceat(stages.work.max(axis=1) * reach, first)
    useful = np.flatnonzero(weight > 0)
    all_pairs = len(_pairs(edges, stages.start_s, stages.due_s, stages.share_s).stage)
    size = max(1, math.ceil(all_pairs / pairs))
    by_arrival = useful[np.argsort(stages.start_s[first[useful]], kind="stable")]
    groups: list[NDArray[np.int64]] = []
    for block in np.array_split(by_arrival, max(1, len(useful) // (_LEVELS * size))):
        ordered = block[np.argsort(work[block] / weight[block], kind="stable")]
        groups += np.array_split(ordered, max(1, len(ordered) // size))
    groups = sorted((g for g in groups if len(g)), key=lambda group: int(group[len(group) // 2]))
    group_of = np.full(len(stages.count), -1)
    for number, group in enumerate(groups):
        group_of[group] = number
    middle = np.array([group[len(group) // 2] for group in groups], dtype=np.int64)
    count = np.array([stages.count[group].sum() for group in groups])
    return stages.select(middle, count), group_of


def solve(stages: Stages, resources: Resources, edges: NDArray[np.float64]) -> Solution:
    """Solve the linear programme.

    Raises:
        RuntimeError: the solver failed.
    """
    pairs = _pairs(edges, stages.start_s, stages.due_s, stages.share_s)
    lengths = np.diff(edges)
    intervals, chains, columns = len(lengths), len(stages.count), len(lengths) + len(pairs.stage)
    share = intervals + np.arange(len(pairs.stage))
    inside = pairs.interval >= 0
    count = stages.count[stages.owner]
    rows: list[NDArray[np.int64]] = []
    cols: list[NDArray[np.int64]] = []
    values: list[NDArray[np.float64]] = []
    limits: list[NDArray[np.float64]] = []
    size = 0

    def entries(row: NDArray[np.int64], col: NDArray[np.int64], value: NDArray[np.float64]) -> None:
        rows.append(row + size)
        cols.append(col)
        values.append(np.broadcast_to(value, row.shape))

    # Work and steps within the limits of each resource in each interval.
    every = np.arange(intervals)
    for resource, per_step in enumerate(resources.per_step):
        at = pairs.interval[inside]
        entries(every, every, np.array(per_step))
        entries(at, share[inside], stages.work[pairs.stage[inside], resource])
        limits.append(resources.limit[resource] * lengths)
        size += intervals
    # A stage is computed only for the requests that survive the stage before it.
    is_first = np.zeros(len(stages.owner), dtype=bool)
    is_first[stages.first] = True
    entries(pairs.stage, share, np.array(1.0))
    later = ~np.append(is_first[1:], True)
    before = later[pairs.stage]
    entries(pairs.stage[before] + 1, share[before], -stages.survive[pairs.stage[before]])
    limits.append(np.where(is_first, count, 0))
    size += len(stages.owner)
    # A request takes part in at most all steps within its window.
    begin, end = _spans(stages, edges)
    bounded = np.flatnonzero(end >= 0)
    row = np.full(chains, -1)
    row[bounded] = np.arange(len(bounded))
    counted = row[stages.owner[pairs.stage]] >= 0
    entries(
        row[stages.owner[pairs.stage[counted]]],
        share[counted],
        stages.steps[pairs.stage[counted]],
    )
    chain, at = _ranges(begin[bounded], end[bounded])
    entries(chain, at, -stages.count[bounded][chain])
    limits.append(np.zeros(len(bounded)))
    size += len(bounded)

    matrix = csr_array(
        (np.concatenate(values), (np.concatenate(rows), np.concatenate(cols))),
        shape=(size, columns),
    )
    gain = np.concatenate([np.zeros(intervals), stages.gain[pairs.stage]])
    most = np.concatenate(
        [lengths * resources.step_rate, pairs.most * (count * _reach(stages))[pairs.stage]]
    )
    solution = linprog(
        -gain,
        A_ub=matrix,
        b_ub=np.concatenate(limits),
        bounds=np.column_stack([np.zeros(columns), most]),
        method="highs-ipm",
    )
    if solution.x is None:
        raise RuntimeError(f"the linear programme was not solved: {solution.message}")
    price = np.maximum(0, -solution.ineqlin.marginals)
    last = intervals * len(resources.per_step)
    steps = np.zeros(chains)
    steps[bounded] = price[last + len(stages.owner) :]
    return Solution(
        value=float(-solution.fun),
        prices=Prices(
            edges=edges,
            resources=price[:last].reshape(len(resources.per_step), intervals),
            steps=steps,
        ),
    )


def bound_at(stages: Stages, resources: Resources, prices: Prices) -> Response:
    """Return an upper bound at these prices, and the cheapest service of each request.

    Args:
        stages: the chains; `prices.steps` has one price for each.
        resources: resources of all replicas.
        prices: any prices of at least 0.
    """
    per_step = np.where(_spans(stages, prices.edges)[1] >= 0, prices.steps, 0)
    step_costs = per_step[stages.owner] * stages.steps
    on_time = _costs(stages, prices, stages.due_s) + step_costs
    late = on_time
    if (stages.late_s > stages.due_s).any():
        late = _costs(stages, prices, stages.late_s) + step_costs
    first = stages.first
    position = np.arange(len(stages.owner)) - first[stages.owner]
    surplus = np.zeros(len(stages.count))
    begun, is_late = (np.zeros(len(stages.owner), dtype=bool) for _ in range(2))
    for index in range(int(position.max()), -1, -1):
        at = np.flatnonzero(position == index)
        chain = stages.owner[at]
        later = stages.survive[at] * surplus[chain]
        gained, given_up = stages.gain[at] - on_time[at] + later, later - late[at]
        surplus[chain] = np.maximum(0, np.maximum(gained, given_up))
        begun[at] = surplus[chain] > 0
        is_late[at] = given_up > gained
    flow = np.where(begun, 1.0, 0.0)
    for index in range(1, int(position.max()) + 1):
        at = np.flatnonzero(position == index)
        flow[at] *= flow[at - 1] * stages.survive[at - 1]
    lengths = np.diff(prices.edges)
    value = (resources.limit @ prices.resources) @ lengths
    value += np.maximum(0, step_surplus(stages, resources, prices)) @ (
        lengths * resources.step_rate
    )
    return Response(
        bound=float(value + surplus @ stages.count), surplus=surplus, flow=flow, is_late=is_late
    )


def step_surplus(stages: Stages, resources: Resources, prices: Prices) -> NDArray[np.float64]:
    """Return the worth of a step beyond its cost in each interval."""
    begin, end = _spans(stages, prices.edges)
    bounded = end >= 0
    worth = (prices.steps * stages.count)[bounded]
    size = len(prices.edges)
    change = np.bincount(begin[bounded], worth, size) - np.bincount(end[bounded], worth, size)
    surplus: NDArray[np.float64] = np.cumsum(change)[:-1] - resources.per_step @ prices.resources
    return surplus


def _costs(stages: Stages, prices: Prices, until_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the lowest cost of the work of each stage; infinite if its window is too short."""
    costs = []
    for begin in range(0, len(stages.owner), _BATCH):
        part = slice(begin, begin + _BATCH)
        work, share_s = stages.work[part], stages.share_s[part]
        pairs, taken = cheapest(prices, work, stages.start_s[part], until_s[part], share_s)
        total = np.bincount(pairs.stage, taken, len(work))
        cost = np.bincount(pairs.stage, taken * pairs.cost(work, prices), len(work))
        costs.append(np.where(total >= 1 - _TOLERANCE, cost, np.inf))
    return np.concatenate(costs)


def cheapest(
    prices: Prices,
    work: NDArray[np.float64],
    start_s: NDArray[np.float64],
    until_s: NDArray[np.float64],
    share_s: NDArray[np.float64],
) -> tuple[_Pairs, NDArray[np.float64]]:
    """Return stages in intervals, and the share of the stage that its cheapest service takes."""
    pairs = _pairs(prices.edges, start_s, until_s, share_s)
    order = np.lexsort((pairs.cost(work, prices), pairs.stage))
    pairs = _Pairs(stage=pairs.stage[order], interval=pairs.interval[order], most=pairs.most[order])
    if not len(order):
        return pairs, pairs.most
    before = np.cumsum(pairs.most) - pairs.most
    first = np.minimum(np.searchsorted(pairs.stage, np.arange(len(work))), len(order) - 1)
    return pairs, np.clip(1 - (before - before[first][pairs.stage]), 0, pairs.most)


def _pairs(
    edges: NDArray[np.float64],
    start_s: NDArray[np.float64],
    until_s: NDArray[np.float64],
    share_s: NDArray[np.float64],
) -> _Pairs:
    """Return the intervals in which each stage can be computed."""
    free = np.isinf(until_s)
    until = np.minimum(until_s, edges[-1])
    begin = np.maximum(0, np.searchsorted(edges, start_s, side="right") - 1)
    end = np.where(free, begin, np.searchsorted(edges, until, side="left"))
    stage, interval = _ranges(begin, end)
    overlap = np.minimum(edges[interval + 1], until[stage]) - np.maximum(
        edges[interval], start_s[stage]
    )
    # Widened by the rounding of times, so that a stage which just fits its window fits.
    shares = (overlap + ROUNDING_S) / np.maximum(share_s[stage], ROUNDING_S)
    keep = shares > _TOLERANCE
    after = np.flatnonzero(free)
    return _Pairs(
        stage=np.concatenate([stage[keep], after]),
        interval=np.concatenate([interval[keep], np.full(len(after), -1)]),
        most=np.concatenate([np.minimum(shares[keep], 1), np.ones(len(after))]),
    )


def _spans(
    stages: Stages, edges: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return first and last interval (exclusive) of each chain; −1 as the last one without end."""
    first = stages.first
    late = np.maximum.reduceat(stages.late_s, first)
    begin = np.maximum(0, np.searchsorted(edges, stages.start_s[first], side="right") - 1)
    end = np.where(np.isinf(late), -1, np.searchsorted(edges, np.minimum(late, edges[-1])))
    return begin, end


def _reach(stages: Stages) -> NDArray[np.float64]:
    """Return the probability that a request that is always served reaches each stage."""
    first = stages.first
    logs = np.log(np.maximum(stages.survive, 1e-300))
    running = np.cumsum(logs) - logs
    reach: NDArray[np.float64] = np.exp(running - running[first][stages.owner])
    return reach


def _ranges(
    begin: NDArray[np.int64], end: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return each (index, value) with begin[index] ≤ value < end[index]."""
    counts = np.maximum(0, end - begin)
    index = np.repeat(np.arange(len(begin)), counts)
    offset = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return index, begin[index] + offset

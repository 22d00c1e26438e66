"""A run cut into equal stretches of time: what every drawing over time is drawn from.

At most a hundred and twenty stretches, however long the run, so the report of an hour is no
larger than that of a minute. Requests belong to the stretch in which they were scheduled;
answers to the one in which they ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from goodput_core.slo.judging import JudgementKind, MissReason
from goodput_core.slo.record import Outcome
from goodput_core.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from goodput_replay.run.columns import RunColumns

__all__ = ["ClassTimeline", "Timeline", "cut_timeline"]

_WIDTHS_S: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600)
_MOST: Final = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTimeline:
    """One class over time; every array has the shape [num_stretches]."""

    name: str
    good: NDArray[np.int64]
    total: NDArray[np.int64]

    @property
    def attainment(self) -> NDArray[np.float64]:
        """Good over total, NaN where nothing was judged."""
        share: NDArray[np.float64] = np.where(
            self.total > 0, self.good / np.maximum(self.total, 1), np.nan
        )
        return share


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The whole run over time; every array has the shape [num_stretches].

    Args:
        edges_s: where stretches begin, and the window's end: [num_stretches + 1].
        widths_s: the length of each; the last may be shorter.
        classes: by class, in the order asked for.
        offered: requests scheduled.
        served: complete answers that ended.
        in_flight: most requests in flight at once.
        misses: by first reason, requests that missed; reasons without a miss are left out.
        lag_p50_ms: median lag of the client, NaN where nothing was sent.
        lag_max_ms: largest lag of the client, NaN where nothing was sent.
    """

    edges_s: NDArray[np.float64]
    widths_s: NDArray[np.float64]
    classes: tuple[ClassTimeline, ...]
    offered: NDArray[np.int64]
    served: NDArray[np.int64]
    in_flight: NDArray[np.int64]
    misses: dict[MissReason, NDArray[np.int64]]
    lag_p50_ms: NDArray[np.float64]
    lag_max_ms: NDArray[np.float64]

    @property
    def width_s(self) -> float:
        """The length of a whole stretch."""
        return float(self.widths_s[0])


def cut_timeline(
    columns: RunColumns, names: tuple[str, ...], *, start_s: float, length_s: float
) -> Timeline:
    """Cut the window into stretches.

    Args:
        columns: the judged requests.
        names: the classes to follow.
        start_s: the window's start, seconds since the run's zero.
        length_s: the window's length.
    """
    width = next((w for w in _WIDTHS_S if length_s / w <= _MOST), _WIDTHS_S[-1])
    count = max(1, int(np.ceil(length_s / width)))
    edges = np.minimum(np.arange(count + 1, dtype=np.float64) * width, max(length_s, 1e-9))
    since_start_s = columns.scheduled_ns / NS_PER_S - start_s
    stretch = np.clip((since_start_s // width).astype(np.int64), 0, count - 1)
    good = columns.of_kind(JudgementKind.ATTAINED)
    judged = good | columns.of_kind(JudgementKind.MISSED)
    end_s = columns.end_ns / NS_PER_S - start_s
    served = columns.of_outcome(Outcome.OK) & (end_s >= 0) & (end_s <= length_s)
    lag_ms = columns.lag_ns / NS_PER_MS
    return Timeline(
        edges_s=edges,
        widths_s=np.diff(edges),
        classes=tuple(
            ClassTimeline(
                name=name,
                good=_count(stretch, good & columns.of_class(name), count),
                total=_count(stretch, judged & columns.of_class(name), count),
            )
            for name in names
        ),
        offered=_count(stretch, np.ones(len(stretch), dtype=np.bool_), count),
        served=np.histogram(end_s[served], bins=edges)[0].astype(np.int64),
        in_flight=_in_flight(columns.sent_ns / NS_PER_S - start_s, end_s, edges),
        misses=_misses(columns, stretch, count),
        lag_p50_ms=_per_stretch(stretch, lag_ms, count, 0.5),
        lag_max_ms=_per_stretch(stretch, lag_ms, count, 1.0),
    )


def _count(stretch: NDArray[np.int64], chosen: NDArray[np.bool_], count: int) -> NDArray[np.int64]:
    return np.bincount(stretch[chosen], minlength=count).astype(np.int64)


def _misses(
    columns: RunColumns, stretch: NDArray[np.int64], count: int
) -> dict[MissReason, NDArray[np.int64]]:
    found = {
        reason: _count(stretch, columns.of_first_reason(reason), count) for reason in MissReason
    }
    return {reason: counts for reason, counts in found.items() if counts.any()}


def _in_flight(
    sent_s: NDArray[np.float64], end_s: NDArray[np.float64], edges: NDArray[np.float64]
) -> NDArray[np.int64]:
    """The largest number of requests in flight at any instant of each stretch."""
    was_sent = np.isfinite(sent_s)
    starts = np.sort(sent_s[was_sent])
    ends = np.sort(np.where(np.isfinite(end_s), end_s, np.inf)[was_sent])
    # In flight rises only at a send, so the most of a stretch is at its start or at a send.
    instants = np.concatenate((edges[:-1], starts))
    level = np.searchsorted(starts, instants, side="right") - np.searchsorted(
        ends, instants, side="right"
    )
    place = np.clip(np.searchsorted(edges, instants, side="right") - 1, 0, len(edges) - 2)
    most = np.zeros(len(edges) - 1, dtype=np.int64)
    np.maximum.at(most, place, level)
    return most


def _per_stretch(
    stretch: NDArray[np.int64], values: NDArray[np.float64], count: int, q: float
) -> NDArray[np.float64]:
    """A quantile of the values of each stretch, NaN where there are none."""
    found = np.full(count, np.nan)
    there = np.isfinite(values)
    order = np.argsort(stretch[there], kind="stable")
    ordered = values[there][order]
    bounds = np.searchsorted(stretch[there][order], np.arange(count + 1))
    for place, (first, last) in enumerate(pairwise(bounds.tolist())):
        if first < last:
            found[place] = np.quantile(ordered[first:last], q, method="inverted_cdf")
    return found

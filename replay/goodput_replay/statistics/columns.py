"""A few integers of each record: all that the statistics of a run look at.

Judging happens here, once as it was and once without the client's lag, so that records need not
be kept: a million requests take about 50 MB instead of several gigabytes.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from goodput_core.slo.attainment import AttainmentTally
from goodput_core.slo.judging import JudgementKind, judge, targets_for, without_lag

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from goodput_core.slo.record import RequestRecord
    from goodput_core.slo.targets import SLOClass

__all__ = ["ATTAINED", "MISSED", "OUTSIDE", "Columns", "read_columns"]

OUTSIDE: Final = -1
"""In neither count: excluded or unjudged."""
MISSED: Final = 0
ATTAINED: Final = 1
_FLAGS: Final = {JudgementKind.ATTAINED: ATTAINED, JudgementKind.MISSED: MISSED}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """One entry for each record, in the order read; `[num_requests]` each unless stated.

    Args:
        tally: the counts, by class and overall.
        class_index: int64, the place of its class in `tally.by_class()`.
        scheduled_ns: int64.
        until_ns: int64, its first token or its end without one; `scheduled_ns` if never sent.
        overdue_ns: int64, when its patience for a first token ended; `until_ns` if nothing was
            promised about it.
        judged: int8, `ATTAINED`, `MISSED` or `OUTSIDE`.
        judged_on_time: int8, the same had the client sent it on time.
        lag_ns: int64 `[num_sent]`, how late each was sent, at least 0.
        tightest_ttft_ns: the smallest TTFT promised to any request; None without one.
    """

    tally: AttainmentTally
    class_index: NDArray[np.int64]
    scheduled_ns: NDArray[np.int64]
    until_ns: NDArray[np.int64]
    overdue_ns: NDArray[np.int64]
    judged: NDArray[np.int8]
    judged_on_time: NDArray[np.int8]
    lag_ns: NDArray[np.int64]
    tightest_ttft_ns: int | None


def read_columns(records: Iterable[RequestRecord], promised: Mapping[str, SLOClass]) -> Columns:
    """Judge every record and keep what the statistics need; reads `records` once."""
    tally = AttainmentTally(promised)
    places = {name: place for place, name in enumerate(promised)}
    class_index, scheduled, until, overdue, lags = (array("q") for _ in range(5))
    judged, judged_on_time = array("b"), array("b")
    tightest: int | None = None
    for record in records:
        targets = targets_for(record, promised)
        judgement = judge(record, targets)
        tally.add(record, judgement)
        flag = on_time = _FLAGS.get(judgement.kind, OUTSIDE)
        lag_ns = record.lag_ns
        if lag_ns is not None:
            lags.append(max(0, lag_ns))
        if flag == MISSED and lag_ns is not None and lag_ns > 0:
            on_time = _FLAGS.get(judge(without_lag(record), targets).kind, OUTSIDE)
        until_ns = _waited_until_ns(record)
        patience_ns = targets.e2e_ns if targets.ttft_ns is None else targets.ttft_ns
        class_index.append(places.setdefault(record.slo_class, len(places)))
        scheduled.append(record.scheduled_ns)
        until.append(until_ns)
        overdue.append(until_ns if patience_ns is None else record.scheduled_ns + patience_ns)
        judged.append(flag)
        judged_on_time.append(on_time)
        if targets.ttft_ns is not None:
            tightest = targets.ttft_ns if tightest is None else min(tightest, targets.ttft_ns)
    return Columns(
        tally=tally,
        class_index=np.array(class_index, dtype=np.int64),
        scheduled_ns=np.array(scheduled, dtype=np.int64),
        until_ns=np.array(until, dtype=np.int64),
        overdue_ns=np.array(overdue, dtype=np.int64),
        judged=np.array(judged, dtype=np.int8),
        judged_on_time=np.array(judged_on_time, dtype=np.int8),
        lag_ns=np.array(lags, dtype=np.int64),
        tightest_ttft_ns=tightest,
    )


def _waited_until_ns(record: RequestRecord) -> int:
    if record.first_token_ns is not None:
        return record.first_token_ns
    return record.scheduled_ns if record.end_ns is None else record.end_ns

"""Rejections (4xx) of a candidate, which a run alone takes for errors of the client.

Beside a baseline that answered the same requests, they are misses of the candidate.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow.compute as pc

from goodput_core.slo.record import Outcome
from goodput_core.slo.verdict import VerdictKind, decide
from goodput_core.units import NS_PER_S
from goodput_replay.compare.pairing import pair_requests
from goodput_replay.runs.chosen_rows import read_chosen
from goodput_replay.runs.columns import OUTCOMES
from goodput_replay.runs.measures import RunMeasures
from goodput_replay.runs.records import read_records
from goodput_replay.runs.summary_builder import read_stalls
from goodput_replay.statistics.evidence import gather

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from goodput_replay.compare.runs import LoadedRun

__all__ = ["is_valid_beside"]

_KEY_ERRORS: Final = (401, 403, 407)
_OK: Final = OUTCOMES.index(Outcome.OK)


def is_valid_beside(run: LoadedRun, baseline: LoadedRun) -> bool:
    """Return True if the run's only problem are rejections (4xx) of requests that are valid.

    A request is valid if the baseline answered it. A missing or wrong key is always the client's
    fault.
    """
    rejected = excused = 0
    rows = array("q")
    for row, (record, judgement) in read_chosen(run.folder, _find_refused):
        if judgement is not None and record.client_error:
            rejected += 1
            if record.status not in _KEY_ERRORS:
                rows.append(row)
    if rows:
        excused = _count_answered(baseline, run, np.array(rows, dtype=np.int64))
    summary = run.summary
    start_ns = min([run.counts.start_ns, *(int(p.scheduled_ns.min()) for p in run.parts())])
    window_ns = max(1, round(summary.window.length_s * NS_PER_S))
    evidence = gather(
        read_records(run.folder, gaps=False),
        classes=run.slo_classes(),
        window_ns=window_ns,
        window_start_ns=start_ns,
        rows_planned=summary.window.rows_planned,
        incomplete="" if summary.run.complete else summary.run.abort_reason or "it was stopped",
        outage_s=summary.outage_s,
        stalls=read_stalls(summary.client),
        exact_lag=False,
    )
    measures = RunMeasures(
        run.folder,
        [counts.name for counts in evidence.counts],
        window_start_ns=start_ns,
        window_ns=window_ns,
    )
    validity = replace(
        evidence.validity,
        client_errors=rejected - excused,
        lag_p99_ns=measures.lag_p99_ns,
    )
    return decide(evidence.classes, validity).kind is not VerdictKind.INVALID


def _count_answered(baseline: LoadedRun, candidate: LoadedRun, rows: NDArray[np.int64]) -> int:
    """Count the requests of the candidate in some rows that the baseline answered completely.

    Args:
        baseline: the first run.
        candidate: the second run.
        rows: indices in the records of the candidate.

    Raises:
        InputError: the records cannot be read.
    """
    count = 0
    for before, after in pair_requests(baseline.parts, candidate.parts):
        answered = before["outcome_code"] == _OK
        count += int(np.count_nonzero(answered & np.isin(after["row"], rows)))
    return count


def _find_refused(batch: Any) -> Any:
    """Return the mask of the records of a batch that may be the client's own errors."""
    status = batch["status"]
    refused = pc.and_(pc.greater_equal(status, 300), pc.less(status, 500))
    return pc.fill_null(refused, False)

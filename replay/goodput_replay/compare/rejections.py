"""Errors of the client in runs of a comparison: requests that the server rejected as invalid.

A request that the candidate rejects, and that the baseline answered, is valid. Its rejection is
therefore a miss of the candidate, although the candidate's run alone takes it for an error of the
client. A missing or wrong key is always the client's error.
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
from goodput_replay.runs.record_rows import read_judged
from goodput_replay.runs.summary_builder import read_stalls
from goodput_replay.statistics.evidence import EvidenceTally

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from goodput_replay.compare.runs import LoadedRun

__all__ = ["find_client_errors", "is_valid_with"]

_KEY_ERRORS: Final = (401, 403, 407)
_OK: Final = OUTCOMES.index(Outcome.OK)


def find_client_errors(run: LoadedRun, baseline: LoadedRun | None = None) -> NDArray[np.int64]:
    """Return the rows of a run's records that are errors of its client, ascending.

    Args:
        run: the run.
        baseline: the run of the other build, whose responses show which requests are valid; None if
            there is none.

    Raises:
        InputError: the records cannot be read.
    """
    rows, excusable = array("q"), array("q")
    if not run.summary.validity.client_errors:
        return np.empty(0, dtype=np.int64)
    for row, (record, judgement) in read_chosen(run.folder, _find_rejected):
        if judgement is not None and record.client_error:
            rows.append(row)
            if record.status not in _KEY_ERRORS:
                excusable.append(row)
    errors = np.array(rows, dtype=np.int64)
    if baseline is None or not excusable:
        return errors
    return np.setdiff1d(errors, _find_answered(baseline, run, np.array(excusable)))


def is_valid_with(run: LoadedRun, errors: NDArray[np.int64]) -> bool:
    """Return True if the run is valid when no other rejections are errors of the client.

    Args:
        run: the run.
        errors: rows of the errors of the client, from `find_client_errors`.

    Raises:
        InputError: the records cannot be read.
    """
    summary = run.summary
    start_ns = min([run.counts.start_ns, *(int(p.scheduled_ns.min()) for p in run.parts())])
    window_ns = max(1, round(summary.window.length_s * NS_PER_S))
    tally = EvidenceTally(
        classes=run.slo_classes(),
        window_ns=window_ns,
        window_start_ns=start_ns,
        stalls=read_stalls(summary.client),
        exact_lag=False,
    )
    found = 0
    for row, (record, judgement) in enumerate(read_judged(run.folder, gaps=False)):
        is_error = found < len(errors) and row == errors[found]
        found += is_error
        if judgement is not None:
            tally.add(record, known_valid=not is_error)
    evidence = tally.evidence(
        rows_planned=summary.window.rows_planned,
        incomplete="" if summary.run.complete else summary.run.abort_reason or "it was stopped",
        outage_s=summary.outage_s,
    )
    measures = RunMeasures(
        run.folder,
        [counts.name for counts in evidence.counts],
        window_start_ns=start_ns,
        window_ns=window_ns,
    )
    validity = replace(evidence.validity, lag_p99_ns=measures.lag_p99_ns)
    return decide(evidence.classes, validity).kind is not VerdictKind.INVALID


def _find_answered(
    baseline: LoadedRun, candidate: LoadedRun, rows: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the rows of the candidate whose requests the baseline answered completely.

    Args:
        baseline: the first run.
        candidate: the second run.
        rows: indices in the records of the candidate.

    Raises:
        InputError: the records cannot be read.
    """
    answered = [
        after["row"][(before["outcome_code"] == _OK) & np.isin(after["row"], rows)]
        for before, after in pair_requests(baseline.parts, candidate.parts)
    ]
    return np.concatenate([np.empty(0, dtype=np.int64), *answered])


def _find_rejected(batch: Any) -> Any:
    """Return the mask of the records of a batch that may be errors of the client."""
    status = batch["status"]
    rejected = pc.and_(pc.greater_equal(status, 300), pc.less(status, 500))
    return pc.fill_null(rejected, False)

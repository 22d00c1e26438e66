"""A recorded baseline: the latest of several earlier runs of one build, beside a new run.

Two runs of different days differ by more than the two runs of a pair, because machines and their
neighbours change. The replicate is therefore the recording: one run of each counts, and the spread
is that between recordings, not that within their pairs.
"""

from __future__ import annotations

import statistics
from collections import Counter
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from goodput_core.errors import InputError
from goodput_core.slo.pairs import RunSpread
from goodput_replay.compare.recording import find_history
from goodput_replay.compare.runs import (
    LoadedRun,
    difference_between,
    load_run,
    missed_shares,
    read_checked_summary,
)
from goodput_replay.runs.records import open_records, read_batches

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from goodput_replay.compare.comparable import RunInputs
    from goodput_replay.runs.summary import Summary

__all__ = ["find_recorded_runs", "load_recorded_runs", "read_recorded_spread"]

_LEAST: Final = 3
"""One run is the baseline, and two others are the fewest that have a spread."""
_LATEST: Final = 30
"""Recordings that are read; older ones say little about the machines of today."""


def find_recorded_runs(
    folder: Path, revision: str | None, like: Summary | RunInputs | None = None
) -> list[Path]:
    """Return one run of each recording, the latest first.

    Recordings that are invalid or incomplete, those of other requests, and those of other
    revisions, are left out.

    Args:
        folder: a folder of recordings of `replay ab` of one build with itself.
        revision: revision that must have served the runs; only the part after the last hyphen
            counts, so that a copy of a service under another name can be recorded. None if any
            revision may have.
        like: a run with the requests of the recordings; None if they may have any.

    Raises:
        InputError: fewer than three recordings are left, or one compares two builds.
    """
    runs, problems = _fitting_runs(folder, revision, like)
    _require_enough(folder, len(runs), problems)
    return runs


def _fitting_runs(
    folder: Path, revision: str | None, like: Summary | RunInputs | None
) -> tuple[list[Path], list[str]]:
    """Return the runs of `find_recorded_runs`, and why others were left out."""
    valid: list[tuple[str, Path, Summary]] = []
    problems: list[str] = []
    for one, recording in find_history(folder):
        for pair in recording.pairs[:1]:
            run = one / pair.baseline
            try:
                summary = read_checked_summary(run)
            except InputError as error:
                problems.append(str(error))
                continue
            if summary.validity.valid:
                valid.append((summary.run.started_at, run, summary))
            else:
                problems.append(f"{run} is invalid")
    found: list[Path] = []
    for _, run, summary in sorted(valid, key=itemgetter(0), reverse=True):
        if len(found) == _LATEST:
            break
        difference = "" if like is None else difference_between(like, summary)
        problem = f"{run} is of other requests: {difference}" if difference else ""
        try:
            problem = problem or _served_by_others(run, revision)
        except InputError as error:
            problem = str(error)
        if problem:
            problems.append(problem)
        else:
            found.append(run)
    return found, problems


def read_recorded_spread(
    folder: Path, judged: Sequence[LoadedRun], *, revision: str | None = None
) -> dict[str, RunSpread]:
    """Return the spread between the recordings by class, without the run that is judged.

    Args:
        folder: see `find_recorded_runs`.
        judged: the judged runs, at least one; recordings of other requests are left out.
        revision: see `find_recorded_runs`.

    Raises:
        InputError: see `find_recorded_runs`; or fewer than two recordings fit.
    """
    runs = load_recorded_runs(folder, judged[0].summary, judged, revision=revision)
    missed = {name: missed_shares(runs, name) for run in runs for name in run.class_names}
    return {
        name: RunSpread(
            # The difference of two runs has twice the variance of one.
            variance=2 * statistics.variance(shares),
            degrees=len(shares) - 1,
            missed=statistics.fmean(shares),
        )
        for name, shares in missed.items()
        if len(shares) > 1
    }


def load_recorded_runs(
    folder: Path,
    like: Summary | RunInputs,
    judged: Sequence[LoadedRun],
    *,
    revision: str | None = None,
) -> list[LoadedRun]:
    """Return one run of each recording of the same requests, without the runs that are judged.

    Args:
        folder: see `find_recorded_runs`.
        like: a run with these requests.
        judged: runs that are judged.
        revision: see `find_recorded_runs`.

    Raises:
        InputError: see `find_recorded_runs`; or fewer than two recordings fit.
    """
    known = {(run.summary.run.started_at, run.summary.records_digest) for run in judged}
    runs: list[LoadedRun] = []
    paths, problems = _fitting_runs(folder, revision, like)
    for path in paths:
        summary = read_checked_summary(path)
        if (identity := (summary.run.started_at, summary.records_digest)) not in known:
            known.add(identity)
            runs.append(load_run(path))
    _require_enough(folder, len(runs) + 1, problems)
    return runs


def _require_enough(folder: Path, count: int, problems: Sequence[str]) -> None:
    """Reject a folder with too few recordings.

    Raises:
        InputError: names the first recording that was left out, and why.
    """
    if count >= _LEAST:
        return
    left_out = f"; {len(problems)} more were left out: {problems[0]}" if problems else ""
    raise InputError(
        f"{folder}: a recorded baseline needs {_LEAST} recordings of one build with itself, made "
        f"at different times, and there are {count}{left_out}"
    )


def _served_by_others(run: Path, revision: str | None) -> str:
    """Return a sentence about the revisions that served a run; empty if it is the expected one."""
    if revision is None:
        return ""
    names = Counter[str]()
    with open_records(run) as opened:
        for batch in read_batches(opened, ["revision"]):
            for one in batch["revision"].value_counts().to_pylist():
                names[str(one["values"] or "")] += one["counts"]
    del names[""]  # requests without a response
    if not names:
        return f"{run} does not name the revision that served it"
    others = [name for name in names if name.rpartition("-")[2] != revision.rpartition("-")[2]]
    return f"{run} was served by revision {others[0]}, not {revision}" if others else ""

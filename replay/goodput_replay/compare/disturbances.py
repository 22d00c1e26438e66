"""Disturbances of a comparison: invalid runs, and what could have decided in place of the builds.

A gate judges its runs again without each disturbance. A check that has another verdict then says
nothing about the builds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from goodput_core.slo.conformance import describe_deviation
from goodput_core.slo.evidence import is_load_lacking
from goodput_core.slo.verdict import Reason
from goodput_replay.compare.rejections import is_valid_with
from goodput_replay.compare.runs import LoadedRun
from goodput_replay.runs.prompt_kind import PromptKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from datetime import datetime
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from goodput_core.slo.conformance import Deviation

__all__ = [
    "RunPairs",
    "find_leading_build",
    "find_overlap",
    "invalid_runs",
    "judged_otherwise",
    "prompt_ratio",
]

RunPairs = Sequence[tuple[LoadedRun, LoadedRun | None]]
"""Pairs of a candidate's run and the baseline's; None without a baseline."""


def invalid_runs(runs: RunPairs, errors: Mapping[Path, NDArray[np.int64]]) -> Iterator[str]:
    """Yield each invalid run with its reason, as the end of a sentence.

    A run of a pair is also invalid if its client's errors made its load another one than that of
    the other run, although a FAIL alone would be valid.

    Args:
        runs: the pairs.
        errors: rows of the errors of the client by the folder of the run.
    """
    for candidate, baseline in runs:
        for run in (baseline, candidate):
            if run is None:
                continue
            rows, validity = errors[run.folder], run.summary.validity
            has_other = run is candidate and baseline is not None
            excusable = has_other and validity.reason is Reason.CLIENT_ERROR
            if not validity.valid and not (excusable and is_valid_with(run, rows)):
                sentence = validity.sentence.removeprefix("The run is invalid: ")
                yield f"{run.folder}: {sentence.rstrip('.')}"
            elif baseline is not None and is_load_lacking(len(rows), run.summary.overall.requests):
                rejected = f"{len(rows)} of {run.summary.overall.requests} requests"
                yield (
                    f"{run.folder}: the server rejected {rejected} as invalid (3xx or 4xx), so its "
                    "load was lighter than that of the trace; correct the key, the address or the "
                    "requests"
                )


def find_leading_build(runs: RunPairs) -> str:
    """Return the build that ran first in every one of several pairs; empty if neither did.

    A steady drift of the machine is then a part of the difference.
    """
    is_candidate = {
        candidate.started_at < baseline.started_at
        for candidate, baseline in runs
        if baseline is not None
    }
    if len(runs) < 2 or len(is_candidate) != 1 or runs[0][0].is_virtual:
        return ""
    return "candidate" if is_candidate.pop() else "baseline"


def find_overlap(runs: Sequence[LoadedRun]) -> tuple[LoadedRun, LoadedRun] | None:
    """Return two runs whose windows overlap in time; None if all runs were one after the other.

    Such runs may have shared a machine or the service. Runs in virtual time share nothing.

    Args:
        runs: at least one run.
    """
    if runs[0].is_virtual:
        return None
    spans = sorted(((*_span(run), run) for run in runs), key=lambda span: span[:2])
    latest = spans[0]
    for span in spans[1:]:
        if span[0] < latest[1]:
            return latest[2], span[2]
        latest = span
    return None


def _span(run: LoadedRun) -> tuple[datetime, datetime]:
    """Return the times at which the window of a run started and ended."""
    window = run.summary.window
    start = run.started_at + timedelta(seconds=window.start_s)
    return start, start + timedelta(seconds=window.length_s)


def judged_otherwise(
    runs: RunPairs, errors: Mapping[Path, NDArray[np.int64]]
) -> Iterator[tuple[str, RunPairs]]:
    """Yield the runs as if something had not disturbed them, with the condition in words.

    Deviations are decided in the favour of both builds, as an early end is either a miss in both
    or in none. If the builds deviate in different ways, they are also decided for each one alone.
    Last, all disturbances are left out together, because each alone may be too small to decide.

    Args:
        runs: valid pairs.
        errors: rows of the errors of the client by the folder of the run.
    """
    is_real = not runs[0][0].is_virtual
    if is_real:
        yield "without the client's lag", _judge_each(runs, LoadedRun.judged_without_lag)
    rejected = [
        sum(len(errors[run.folder]) for run in side if run is not None)
        for side in zip(*runs, strict=True)
    ]
    rejections = ""
    if any(rejected):
        counts = zip(rejected, ("candidate", "baseline"), strict=True)
        counted = ", ".join(f"{count} in the {build}" for count, build in counts if count)
        rejections = f"without the requests that the server rejected as invalid ({counted})"
        yield rejections, _judge_each(runs, lambda run: run.judged_without(errors[run.folder]))
    ours = _count_doubts(candidate for candidate, _ in runs)
    theirs = _count_doubts(baseline for _, baseline in runs if baseline is not None)
    doubts = "; ".join(
        f"{describe_deviation(kind, count)} (in the {build})"
        for build, counts in (("candidate", ours), ("baseline", theirs))
        for kind, count in counts.items()
    )
    if doubts:
        condition = f"{doubts}; with responses as requested"
        favoured = _judge_each(runs, LoadedRun.judged_favourably)
        yield condition, favoured
        if theirs and ours.keys() ^ theirs.keys():
            yield condition, [(a, other) for (a, _), (_, other) in zip(favoured, runs, strict=True)]
            yield condition, [(one, b) for (one, _), (_, b) in zip(runs, favoured, strict=True)]
    if is_real + bool(rejections) + bool(doubts) > 1:
        parts = [f"{doubts}; with responses as requested" if doubts else "", rejections]
        parts.append("without the client's lag" if is_real else "")
        everything = _judge_each(runs, lambda run: run.judged_undisturbed(errors[run.folder]))
        yield " and ".join(filter(None, parts)), everything


def prompt_ratio(runs: Sequence[LoadedRun]) -> float:
    """Return the prompt tokens that the targets counted, divided by those of the trace.

    Args:
        runs: runs of one build. Prompts that were not counted, or were token ids, are left out; 1
            without others.
    """
    found = [
        run.summary.prompt_tokens
        for run in runs
        if run.summary.prompt_tokens is not None
        and run.summary.target.prompt is not PromptKind.TOKEN_IDS
    ]
    planned = sum(one.planned for one in found)
    reported = sum(one.reported for one in found)
    return reported / planned if planned and reported else 1.0


def _judge_each(runs: RunPairs, judge: Callable[[LoadedRun], LoadedRun]) -> RunPairs:
    return [(judge(one), None if other is None else judge(other)) for one, other in runs]


def _count_doubts(runs: Iterable[LoadedRun]) -> dict[Deviation, int]:
    """Count the responses by each deviation that may change how they are judged."""
    counts: Counter[Deviation] = Counter()
    for run in runs:
        for one in run.summary.validity.deviations:
            if one.kind.leaves_doubt:
                counts[one.kind] += one.count
    return dict(counts)

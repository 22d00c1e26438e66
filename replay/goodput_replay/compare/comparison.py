"""Two finished runs side by side: attainment, goodput, latencies, and requests that changed.

Runs of the same requests under the same SLO are paired by request id. Others are compared as
independent samples, and the result says so. A comparison of two runs describes these runs. Only
several pairs show how much of a difference is noise between runs; see `gate`.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import Meta

from goodput_core.slo.intervals import WindowEstimate
from goodput_core.slo.pairs import DifferenceEstimate
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_replay.compare.quantile_differences import LatencySample, quantile_differences
from goodput_replay.compare.runs import (
    LoadedRun,
    Matching,
    difference_between,
    match,
    require_same_sessions,
)
from goodput_replay.runs.records import open_records
from goodput_replay.runs.rounding import cut_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = [
    "ClassComparison",
    "ComparisonResult",
    "Flip",
    "LatencyComparison",
    "RunComparison",
    "compare",
    "compare_runs",
    "encode_comparison",
]

_VERSION: Final = "1"
_LEVELS: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_MAX_FLIPS: Final = 200
_TEXTS: Final = ("slo_class", "outcome", "miss_reasons", "detail", "replica")


def _doc(description: str) -> Meta:
    return Meta(description=description)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyComparison:
    """One quantile of one latency in both runs, milliseconds."""

    metric: Annotated[str, _doc("ttft, tpot or e2e.")]
    quantile: Annotated[str, _doc("p50, p90 or p99, nearest rank.")]
    baseline_ms: Annotated[float, _doc("Quantile in the baseline.")]
    candidate_ms: Annotated[float, _doc("Quantile in the candidate.")]
    bounds_ms: Annotated[
        tuple[float, float] | None,
        _doc("Bounds of candidate less baseline; null if there are too few requests."),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassComparison:
    """One class in both runs."""

    name: Annotated[str, _doc("Class name; empty for requests without a class.")]
    objective: Annotated[str | None, _doc("Objective of the class in the baseline.")]
    baseline_attainment: Annotated[float | None, _doc("Share of requests that met the SLO.")]
    candidate_attainment: Annotated[float | None, _doc("Share of requests that met the SLO.")]
    baseline_goodput_per_s: Annotated[float, _doc("Requests per second that met the SLO.")]
    candidate_goodput_per_s: Annotated[float, _doc("Requests per second that met the SLO.")]
    difference: Annotated[float | None, _doc("Attainment of the candidate less the baseline.")]
    difference_lower: Annotated[float | None, _doc("Lower bound of the difference.")]
    difference_upper: Annotated[float | None, _doc("Upper bound of the difference.")]
    matched: Annotated[int, _doc("Requests judged in both runs; 0 if unpaired.")]
    gained: Annotated[int, _doc("Requests that met the SLO only in the candidate.")]
    lost: Annotated[int, _doc("Requests that met the SLO only in the baseline.")]
    gained_by_reason: Annotated[
        dict[str, int], _doc("First miss reason in the baseline of the gained requests.")
    ]
    lost_by_reason: Annotated[
        dict[str, int], _doc("First miss reason in the candidate of the lost requests.")
    ]
    latencies: Annotated[tuple[LatencyComparison, ...], _doc("Quantiles of the latencies.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A request that met its SLO in one run only."""

    request_id: Annotated[str, _doc("Request id in the trace.")]
    slo_class: Annotated[str, _doc("Class name.")]
    at_s: Annotated[float, _doc("Scheduled arrival, seconds since the start of the window.")]
    input_tokens: Annotated[int, _doc("Prompt tokens.")]
    output_tokens: Annotated[int, _doc("Output tokens in the run that met the SLO.")]
    lost: Annotated[bool, _doc("True if only the baseline met the SLO.")]
    reasons: Annotated[tuple[str, ...], _doc("Miss reasons in the run that missed.")]
    detail: Annotated[str, _doc("Error message of the run that missed; may be empty.")]
    baseline_ttft_ms: Annotated[float | None, _doc("TTFT in the baseline.")]
    candidate_ttft_ms: Annotated[float | None, _doc("TTFT in the candidate.")]
    baseline_tpot_ms: Annotated[float | None, _doc("TPOT in the baseline.")]
    candidate_tpot_ms: Annotated[float | None, _doc("TPOT in the candidate.")]
    baseline_replica: Annotated[str, _doc("Replica in the baseline, if reported.")]
    candidate_replica: Annotated[str, _doc("Replica in the candidate, if reported.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """One run against the baseline."""

    baseline: Annotated[str, _doc("Folder of the baseline.")]
    candidate: Annotated[str, _doc("Folder of the candidate.")]
    paired: Annotated[bool, _doc("True if requests were matched by id.")]
    unpaired_because: Annotated[str, _doc("Why the runs are not paired; empty if they are.")]
    invalid: Annotated[tuple[str, ...], _doc("Reasons why one of the runs is invalid.")]
    dropped: Annotated[int, _doc("Requests that were not judged in both runs; 0 if unpaired.")]
    classes: Annotated[tuple[ClassComparison, ...], _doc("Results per class.")]
    flips: Annotated[tuple[Flip, ...], _doc("Requests that changed, lost ones first, at most 200.")]
    other_flips: Annotated[int, _doc("Changed requests that flips does not list.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonResult:
    """Result of `replay compare`."""

    version: Annotated[str, _doc("Version of this schema.")] = _VERSION
    confidence: Annotated[float, _doc("One-sided confidence of each bound.")]
    note: Annotated[str, _doc("What the bounds leave out.")]
    comparisons: Annotated[
        tuple[RunComparison, ...], _doc("Each further run against the first one.")
    ]


_NOTE: Final = (
    "The bounds describe the difference within these runs. They exclude the noise between runs, "
    "which `replay ab` measures."
)
_VIRTUAL_NOTE: Final = "The runs were in virtual time, which has no noise between runs."

_CAUSAL_NOTE: Final = (
    "The runs have causal sessions: a request was sent after the one before it had ended, at "
    "times that differ between the runs."
)


def encode_comparison(result: ComparisonResult) -> bytes:
    """Encode a result as indented JSON with a trailing newline."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"


def compare_runs(runs: Sequence[LoadedRun], *, confidence: float) -> ComparisonResult:
    """Compare every run with the first one.

    Args:
        runs: at least two runs, the baseline first.
        confidence: one-sided confidence of each bound.

    Raises:
        InputError: the runs have different modes of sessions.
    """
    require_same_sessions(runs)
    baseline, *others = runs
    note = _VIRTUAL_NOTE if all(run.is_virtual for run in runs) else _NOTE
    if baseline.summary.run.sessions is not None:
        note = f"{note} {_CAUSAL_NOTE}"
    return ComparisonResult(
        confidence=confidence,
        note=note,
        comparisons=tuple(compare(baseline, other, confidence=confidence) for other in others),
    )


def compare(baseline: LoadedRun, candidate: LoadedRun, *, confidence: float) -> RunComparison:
    """Compare two runs, paired by request id if they served the same requests."""
    reason = difference_between(baseline.summary, candidate.summary)
    matching = None if reason else match(baseline, candidate)
    names = [*baseline.columns.class_names, *candidate.columns.class_names]
    flips, other_flips = ((), 0) if matching is None else _list_flips(matching)
    return RunComparison(
        baseline=str(baseline.folder),
        candidate=str(candidate.folder),
        paired=matching is not None,
        unpaired_because=reason,
        invalid=tuple(
            f"{run.folder}: {run.summary.validity.sentence}"
            for run in (baseline, candidate)
            if not run.summary.validity.valid
        ),
        dropped=0
        if matching is None
        else matching.only_baseline + matching.only_candidate + matching.not_judged,
        classes=tuple(
            _compare_class(name, baseline, candidate, matching, confidence)
            for name in dict.fromkeys(names)
        ),
        flips=flips,
        other_flips=other_flips,
    )


def _compare_class(
    name: str,
    baseline: LoadedRun,
    candidate: LoadedRun,
    matching: Matching | None,
    confidence: float,
) -> ClassComparison:
    rows = [_class_row(run, name) for run in (baseline, candidate)]
    if matching is None:
        difference, lower, upper = _unpaired_difference(name, baseline, candidate, confidence)
        matched = gained = lost = 0
        reasons: tuple[dict[str, int], dict[str, int]] = ({}, {})
    else:
        counts = matching.counts(name)
        matched, gained, lost = (sum(c) for c in (counts.total, counts.gained, counts.lost))
        difference = lower = upper = None
        if matched:
            interval = DifferenceEstimate([counts]).interval(confidence)
            difference, lower, upper = interval.difference, interval.lower, interval.upper
        reasons = _count_reasons(matching, name)
    promises = {promise.name: promise.objective for promise in baseline.summary.promises}
    return ClassComparison(
        name=name,
        objective=promises.get(name),
        baseline_attainment=rows[0][0],
        candidate_attainment=rows[1][0],
        baseline_goodput_per_s=rows[0][1],
        candidate_goodput_per_s=rows[1][1],
        difference=None if difference is None else round(difference, 6),
        difference_lower=None if lower is None else cut_share(lower),
        difference_upper=None if upper is None else round(upper, 6),
        matched=matched,
        gained=gained,
        lost=lost,
        gained_by_reason=reasons[0],
        lost_by_reason=reasons[1],
        latencies=tuple(_compare_latencies(name, baseline, candidate, matching, confidence)),
    )


def _class_row(run: LoadedRun, name: str) -> tuple[float | None, float]:
    for row in run.summary.classes:
        if row.name == name:
            return row.attainment, row.goodput_per_s
    return None, 0.0


def _unpaired_difference(
    name: str, baseline: LoadedRun, candidate: LoadedRun, confidence: float
) -> tuple[float | None, float | None, float | None]:
    """Return the difference of two independent attainments, and its bounds.

    Source: Newcombe, "Interval estimation for the difference between independent proportions",
    Statistics in Medicine, 1998, method 10, with the intervals of the two windows.
    """
    counts = [run.second_counts(name) for run in (baseline, candidate)]
    shares = [one.attainment.share for one in counts]
    if shares[0] is None or shares[1] is None:
        return None, None, None
    first, second = (WindowEstimate(one).interval(confidence) for one in counts)
    difference = float(shares[1] - shares[0])
    below = math.hypot(float(shares[1]) - second.lower, first.upper - float(shares[0]))
    above = math.hypot(second.upper - float(shares[1]), float(shares[0]) - first.lower)
    return difference, max(-1.0, difference - below), min(1.0, difference + above)


def _compare_latencies(
    name: str,
    baseline: LoadedRun,
    candidate: LoadedRun,
    matching: Matching | None,
    confidence: float,
) -> list[LatencyComparison]:
    rows = []
    for metric in ("ttft", "tpot", "e2e"):
        differences = quantile_differences(
            _latencies(baseline, name, metric),
            _latencies(candidate, name, metric),
            list(_LEVELS.values()),
            confidence=confidence,
            paired=matching is not None,
        )
        rows += [
            LatencyComparison(
                metric=metric,
                quantile=level,
                baseline_ms=_to_ms(one.baseline_ns),
                candidate_ms=_to_ms(one.candidate_ns),
                bounds_ms=None
                if one.bounds_ns is None
                else (_to_ms(one.bounds_ns[0]), _to_ms(one.bounds_ns[1])),
            )
            for level, one in zip(_LEVELS, differences or (), strict=False)
        ]
    return rows


def _latencies(run: LoadedRun, name: str, metric: str) -> LatencySample:
    values: NDArray[np.float64] = getattr(run.columns, f"{metric}_ns")
    measured = run.columns.of_class(name) & np.isfinite(values)
    return LatencySample(
        values_ns=values[measured], seconds=run.seconds[measured], window_s=run.window_s
    )


def _count_reasons(matching: Matching, name: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return the first miss reasons of the gained requests, and those of the lost ones."""
    mask = matching.of_class(name)
    gained = matching.baseline.columns.first_reasons(matching.at_baseline[mask & matching.gained])
    lost = matching.candidate.columns.first_reasons(matching.at_candidate[mask & matching.lost])
    return dict(Counter(gained).most_common()), dict(Counter(lost).most_common())


def _list_flips(matching: Matching) -> tuple[tuple[Flip, ...], int]:
    """Return changed requests, lost ones first and each in the order of arrival, and the rest."""
    lost, gained = np.flatnonzero(matching.lost), np.flatnonzero(matching.gained)
    at = matching.baseline.columns.scheduled_ns[matching.at_baseline]
    chosen = np.concatenate([part[np.argsort(at[part])] for part in (lost, gained)])
    shown = chosen[:_MAX_FLIPS]
    before, after = matching.baseline, matching.candidate
    texts = [
        _read_texts(run, indices[shown])
        for run, indices in ((before, matching.at_baseline), (after, matching.at_candidate))
    ]
    start_s = before.summary.window.start_s
    is_lost = matching.lost
    flips = []
    for number, position in enumerate(shown.tolist()):
        i, j = int(matching.at_baseline[position]), int(matching.at_candidate[position])
        missed = texts[1][number] if is_lost[position] else texts[0][number]
        good = before.columns if is_lost[position] else after.columns
        flips.append(
            Flip(
                request_id=before.ids[i].as_py(),
                slo_class=texts[0][number]["slo_class"],
                at_s=round(float(before.columns.scheduled_ns[i]) / NS_PER_S - start_s, 3),
                input_tokens=int(before.columns.input_tokens[i]),
                output_tokens=int(good.output_tokens[i if is_lost[position] else j]),
                lost=bool(is_lost[position]),
                reasons=tuple(missed["miss_reasons"]),
                detail=missed["detail"],
                baseline_ttft_ms=_optional_ms(before.columns.ttft_ns[i]),
                candidate_ttft_ms=_optional_ms(after.columns.ttft_ns[j]),
                baseline_tpot_ms=_optional_ms(before.columns.tpot_ns[i]),
                candidate_tpot_ms=_optional_ms(after.columns.tpot_ns[j]),
                baseline_replica=texts[0][number]["replica"],
                candidate_replica=texts[1][number]["replica"],
            )
        )
    return tuple(flips), len(chosen) - len(shown)


def _read_texts(run: LoadedRun, indices: NDArray[np.int64]) -> list[dict[str, Any]]:
    """Return the text columns of a few requests."""
    rows = run.columns.row[indices]
    with open_records(run.folder) as opened:
        table = opened.read(columns=list(_TEXTS)).take(pa.array(rows))
    texts: list[dict[str, Any]] = table.to_pylist()
    return texts


def _to_ms(ns: float) -> float:
    return round(ns / NS_PER_MS, 3)


def _optional_ms(ns: np.float64) -> float | None:
    return _to_ms(float(ns)) if np.isfinite(ns) else None
